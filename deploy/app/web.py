"""The same app inside a web server: `uvicorn web:api`. The server owns the signals and the exit code."""

from billing import app
from starlette.applications import Starlette

from aioshard.web.health import health_routes

# /livez, /readyz, /metrics, /statistics.json and /explain; your own routes go beside them
api = Starlette(lifespan=app.lifespan, routes=health_routes(app))
