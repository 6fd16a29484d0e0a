"""Health routes, dashboard and their server, as ASGI parts; they need the extra `web`."""
