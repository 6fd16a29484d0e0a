"""Questions to the health server of a running app."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

import click

__all__ = ["Answer", "HealthServer", "NoAnswerError", "timeout", "url"]

url = click.argument("url", metavar="URL")

timeout = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)


class NoAnswerError(Exception):
    """There is no answer, or none of aioshard's; the message is a sentence for the user."""


class Answer(NamedTuple):
    """What the server said."""

    status: int
    text: str

    def json(self, address: str, *fields: str) -> dict[str, Any]:
        """The text as a JSON object.

        Args:
            address: Where it is from, for messages.
            fields: That it must have: many a server says yes to everything.

        Raises:
            NoAnswerError: It is none.
        """
        try:
            found = json.loads(self.text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoAnswerError(_foreign(address, "something that is no JSON object"))
        for field in fields:
            if field not in found:
                raise NoAnswerError(_foreign(address, f"a JSON object without {field!r}"))
        return found


class HealthServer:
    """The server that `aioshard run --health-port` starts, or an application with the health routes.

    It is asked directly, never through a proxy of the environment: it is hardly ever outside.
    """

    def __init__(self, base: str, *, timeout: float) -> None:
        """Make a client; nothing is asked yet.

        Args:
            base: Where the routes are: `http://host:port`, with a path where they are mounted under one.
            timeout: Seconds to wait for each answer.

        Raises:
            UsageError: *base* is no address.
        """
        full = base if "://" in base else f"http://{base}"
        try:
            parts = urllib.parse.urlsplit(full)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or any(character.isspace() or not character.isprintable() for character in full):
            raise click.UsageError(
                f"{base!r} was found, the base URL of a health server was expected, such as http://127.0.0.1:8080"
            )
        self.base = full.rstrip("/")
        self._timeout = timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, *expected: int) -> Answer:
        """The answer of `base/path`.

        Args:
            path: Without a slash in front.
            expected: Status codes beside 200 that are an answer too.

        Raises:
            NoAnswerError: Nobody answered in time, or with another status.
        """
        address = f"{self.base}/{path}"
        try:
            with self._opener.open(address, timeout=self._timeout) as response:
                return Answer(response.status, response.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            with error:
                if error.code in expected:
                    return Answer(error.code, error.read().decode("utf-8", "replace"))
            raise NoAnswerError(_foreign(address, f"{error.code} {error.reason}")) from None
        except TimeoutError:
            raise self._too_slow() from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._too_slow() from None
            raise NoAnswerError(
                f"{self.base} cannot be reached ({_reason(error.reason)}): check the address, and that the app runs "
                "with --health-port or serves the health routes"
            ) from None
        except (http.client.HTTPException, OSError) as error:
            raise NoAnswerError(_foreign(address, f"something that is no HTTP ({_reason(error)})")) from None

    def _too_slow(self) -> NoAnswerError:
        return NoAnswerError(
            f"{self.base} did not answer within {self._timeout:g} s: a handler may be blocking the event loop, or the "
            "machine is busy; --timeout waits longer"
        )


def _foreign(address: str, found: str) -> str:
    return (
        f"{address} answered with {found}, which aioshard's health server does not: give its base URL, with the path "
        "where the health routes are mounted"
    )


def _reason(error: BaseException | str) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
