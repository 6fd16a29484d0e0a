"""Health routes, dashboard and their server, as ASGI parts; they need the extra `web`."""

import importlib.util

from aioshard.errors import MissingExtraError

if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn")):
    raise MissingExtraError("the health server with its dashboard", "web")
