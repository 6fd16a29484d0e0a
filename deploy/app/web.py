"""The same app inside a web server: `uvicorn web:api`. The server handles signals and sets the exit code."""

from billing import app
from starlette.applications import Starlette

from aioshard.web.health import health_routes

# /livez, /readyz, /metrics, /statistics.json and /explain; add your own routes to this list
api = Starlette(lifespan=app.lifespan, routes=health_routes(app))
