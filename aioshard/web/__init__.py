"""Health routes, dashboard and their server, as ASGI parts; they need the extra `web`."""

import importlib.util

from aioshard.errors import MissingExtraError

if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn")):
    raise MissingExtraError("the health server with its dashboard", "web")

from aioshard.web.access_log import PollFilter
from aioshard.web.asyncapi import asyncapi_route
from aioshard.web.health import drain_route, health_routes, serve_health
from aioshard.web.page import dashboard, dashboard_routes

__all__ = [
    "PollFilter",
    "asyncapi_route",
    "dashboard",
    "dashboard_routes",
    "drain_route",
    "health_routes",
    "serve_health",
]
