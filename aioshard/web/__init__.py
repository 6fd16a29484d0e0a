"""ASGI parts; they need the extra `web`. `aioshard.web.health` has the routes and the server."""
