"""The AsyncAPI document of an app as a page: for the teams that publish to it or read what it publishes."""

import html
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Mount, Route

from aioshard.app import App
from aioshard.asyncapi import document
from aioshard.errors import MissingExtraError
from aioshard.web.server import SAFE, Json

_VIEWER = "asyncapi_viewer"
"""Package that contains the viewer; its Python code is not used."""
_ICON = Path(__file__).with_name("static") / "icon.svg"
_PAGE = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>{title}</title>
    <link rel="icon" href="icon.svg" type="image/svg+xml">
    <script type="module" src="viewer.js"></script>
  </head>
  <body>
    <asyncapi-viewer src="asyncapi.json" sidebar>
      <noscript>The document is <a href="asyncapi.json">asyncapi.json</a>; this page needs JavaScript.</noscript>
    </asyncapi-viewer>
  </body>
</html>
"""


def asyncapi_route(app: App, path: str = "/asyncapi", *, title: str | None = None, version: str = "0.1.0") -> Mount:
    """Return the route of a page that shows the topics and payloads of an app.

    The page is at *path* followed by `/`, and the document below it at `asyncapi.json`. Nothing is loaded from other
    sites. The document is made for each request, from the handlers that the app has then.

    Args:
        app: The app, running or not.
        path: Path of the page.
        title: Title of the document; the group id by default.
        version: Version of the document.

    Raises:
        MissingExtraError: The extra `asyncapi` is not installed.

    Example:
        >>> from starlette.applications import Starlette
        >>> api = Starlette(routes=[asyncapi_route(App("billing"))])
        >>> str(api.url_path_for("document"))
        '/asyncapi/asyncapi.json'
    """
    script = _viewer()
    shown_title = title or app.group_id

    def page(_: Request) -> Response:
        return HTMLResponse(_PAGE.format(title=html.escape(shown_title)), headers=SAFE)

    def content(_: Request) -> Response:
        return Json(document(app, shown_title, version), headers=SAFE)

    def viewer(_: Request) -> Response:
        return FileResponse(script, media_type="text/javascript", headers=SAFE)

    def icon(_: Request) -> Response:
        return FileResponse(_ICON, media_type="image/svg+xml", headers=SAFE)

    return Mount(
        path,
        routes=[
            Route("/", page, name="page"),
            Route("/asyncapi.json", content, name="document"),
            Route("/viewer.js", viewer, name="viewer"),
            Route("/icon.svg", icon, name="icon"),
        ],
    )


def _viewer() -> Path:
    """Return the script of the viewer."""
    found = find_spec(_VIEWER)
    if found is None or found.origin is None:
        raise MissingExtraError("the page of the AsyncAPI document", "asyncapi")
    return Path(found.origin).parent / "static" / "asyncapi-viewer.js"
