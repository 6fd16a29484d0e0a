"""Access control and audit log of the dashboard: checks the token, the origin and the body of a request."""

import hmac
import logging
import time
from collections.abc import Callable

import anyio

from aioshard.errors import MissingExtraError, SettingsError
from aioshard.web.actions import Action, RefusedError

try:
    from starlette.requests import ClientDisconnect, Request
except ImportError as error:
    raise MissingExtraError("the page", "web") from error

__all__ = ["SHORTEST_TOKEN", "Guard", "body_of", "check_token"]

logger = logging.getLogger("aioshard.web.audit")

SHORTEST_TOKEN = 16
"""Minimum length of a token; a shorter one can be guessed."""
LARGEST_BODY = 4096
"""Maximum bytes of a request body."""
_BODY_TIMEOUT = 5.0
_MOST_REFUSED = 20
_REFUSED_WITHIN = 60.0
"""At most this many refused requests are logged in this many seconds, so that nobody can flood the log."""


def check_token(token: str) -> str:
    """Return a token set by an operator, without surrounding white space.

    Raises:
        SettingsError: The token is too short, or cannot be sent in a header.
    """
    token = token.strip()
    if len(token) < SHORTEST_TOKEN:
        raise SettingsError(
            f"the token of the page has {len(token)} characters: expected at least {SHORTEST_TOKEN}, such as "
            "`openssl rand -hex 24` prints"
        )
    if not all("!" <= character <= "~" for character in token):
        raise SettingsError(
            "the token of the page has a character that no header takes: expected ASCII letters, digits and signs, "
            "without spaces"
        )
    return token


class Guard:
    """Decides who may act, and logs every request with its sender and result.

    The logger is `aioshard.web.audit`; the token never appears in its lines.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a guard.

        Args:
            token: The token set by the operator.
            clock: Clock in seconds, to limit the log.

        Raises:
            SettingsError: As for `check_token`.
        """
        self._token = check_token(token).encode()
        self._clock = clock
        self._logged_since = -_REFUSED_WITHIN
        self._logged = 0
        self._not_logged = 0

    def check(self, request: Request) -> None:
        """Accept a request that has the token and does not come from another site's page.

        Raises:
            RefusedError: The request is not accepted.
        """
        own = _place(f"{request.url.scheme}://{request.headers.get('host', '')}")
        if any(_place(origin) != own for origin in request.headers.getlist("origin")):
            raise RefusedError(403, "the request comes from a page of another site: use the app's own page")
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not given:
            raise RefusedError(401, "the token is missing: expected the header Authorization: Bearer TOKEN")
        if not hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._token):
            raise RefusedError(401, "the token is wrong: it is the one that the operator of the app has set")
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise RefusedError(415, "the body is not declared as JSON: expected Content-Type: application/json")

    def done(self, request: Request, action: Action, sentence: str) -> None:
        """Log a performed action."""
        logger.warning("%s by %s: %s", action, _address(request), sentence)

    def refused(self, request: Request, what: Action | None, refusal: RefusedError) -> None:
        """Log a refused request, unless the limit of the log is reached."""
        now = self._clock()
        if now - self._logged_since >= _REFUSED_WITHIN:
            if self._not_logged:
                logger.warning("%d more refused request(s) are not in the log", self._not_logged)
            self._logged_since, self._logged, self._not_logged = now, 0, 0
        if self._logged >= _MOST_REFUSED:
            self._not_logged += 1
            return
        self._logged += 1
        asked = "a request" if what is None else str(what)
        logger.warning("%s by %s was refused (%d): %s", asked, _address(request), refusal.status, refusal.sentence)


def _place(origin: str) -> tuple[str, str]:
    """Return host and port of an origin, without default ports; the scheme does not count.

    A proxy in front may speak TLS to the browser and plain HTTP to us.
    """
    scheme, separator, place = origin.strip().lower().partition("://")
    host, colon, port = place.rpartition(":")
    if not separator or not place:
        return "no origin", origin
    if not colon or not port.isdigit():
        return place, ""
    return host, "" if port == {"http": "80", "https": "443"}.get(scheme) else port


def _address(request: Request) -> str:
    return "an unknown address" if request.client is None else f"{request.client.host}:{request.client.port}"


async def body_of(request: Request) -> bytes:
    """Read the body, and stop reading at its maximum size.

    Raises:
        RefusedError: The body is too long, or does not arrive.
    """
    too_large = RefusedError(413, f"the body is larger than {LARGEST_BODY} bytes: no action is")
    length = request.headers.get("content-length", "")
    if length.isdigit() and len(length) < 20 and int(length) > LARGEST_BODY:  # noqa: PLR2004 - digits of any length
        raise too_large
    body = bytearray()
    try:
        with anyio.fail_after(_BODY_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST_BODY:
                    raise too_large
    except TimeoutError:
        raise RefusedError(408, f"the body did not come within {_BODY_TIMEOUT:g} s") from None
    except ClientDisconnect:
        raise RefusedError(400, "the connection was closed before the whole body had come") from None
    return bytes(body)
