"""By which names a server on this machine alone is asked: a page of another site may have its own lead here."""

import ipaddress

from aioshard.errors import MissingExtraError

try:
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

    from aioshard.web.answers import SAFE
except ImportError as error:
    raise MissingExtraError("the health server", "web") from error

__all__ = ["OwnNames"]


class OwnNames:
    """An application that is served on this machine alone: who asks has to call it by a name of it, or an address.

    A page of another site could else have its own name lead here, and read what is shown. It cannot have an address
    lead elsewhere, so any is taken: what stands in front, as a proxy of the pod, may pass its own on.
    """

    def __init__(self, application: ASGIApp, host: str) -> None:
        """Make one of an application.

        Args:
            application: Who answers.
            host: What the operator calls the address, taken beside `localhost`.
        """
        self._application = application
        self._names = {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse with 403."""
        application = self._application
        # Who names nobody is no browser.
        asked = [value.decode("latin-1").lower() for name, value in scope.get("headers", ()) if name == b"host"]
        if not all(map(self._is_own, asked)):
            sentence = (
                "this server listens on its machine alone and is not asked by this name: use http://localhost, or "
                "have it listen on another address (--host)"
            )
            application = JSONResponse({"error": sentence}, status_code=403, headers=SAFE)
        await application(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
