"""`aioshard health` and `aioshard explain`, and the client of health servers that they and `aioshard top` use."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.output import UNHEALTHY, print_result

UNAVAILABLE = 503
"""Status of a probe that fails."""

urls_argument = click.argument("urls", metavar="[URL]...", nargs=-1)
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=5.0,
    show_default=True,
    help="Seconds to wait for each answer.",
)
_REFUSALS = (400, 401, 403, 404, 409, 415, 422, 504)
"""Status of an action that is refused."""
_DEFAULT_URL = "http://127.0.0.1:8080"


# Client -------------------------------------------------------------------------------------


class NoAnswerError(click.ClickException):
    """The health server did not answer, or another program answered."""

    exit_code = UNHEALTHY


class ActionRefusedError(click.ClickException):
    """A process refused an action."""

    exit_code = UNHEALTHY


class HealthServer:
    """Client of the server that `aioshard run --health-port` starts, or of an application with the health routes.

    It connects directly, never through a proxy of the environment, because the server is usually nearby.
    """

    def __init__(self, base: str, *, timeout: float) -> None:
        """Create a client; nothing is sent yet.

        Args:
            base: URL below which the routes are, such as `http://host:port`.
            timeout: Seconds to wait for each answer.

        Raises:
            UsageError: *base* is not a URL.
        """
        url = base if "://" in base else f"http://{base}"
        try:
            parts = urllib.parse.urlsplit(url)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or any(character.isspace() or not character.isprintable() for character in url):
            raise click.UsageError(
                f"{base!r} is not the base URL of a health server; expected one such as {_DEFAULT_URL}"
            )
        self.base = url.rstrip("/")
        self._timeout = timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, *expected: int) -> tuple[int, str]:
        """Request `base/path`; return the status and the text of the answer.

        Args:
            path: Without a leading slash.
            expected: Acceptable status codes besides 200.

        Raises:
            NoAnswerError: The answer did not arrive in time, or has another status.
        """
        return self._request(f"{self.base}/{path}", path, *expected)

    def post(self, path: str, content: dict[str, Any], *, token: str) -> dict[str, Any]:
        """Send JSON to `base/path`, and return the JSON of the answer.

        Args:
            path: Without a leading slash.
            content: The body.
            token: Allows the action.

        Raises:
            NoAnswerError: The answer did not arrive in time, or another program answered.
            ActionRefusedError: The process refused it.
        """
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{self.base}/{path}", json.dumps(content).encode(), headers)  # noqa: S310 - http
        status, text = self._request(request, path, *_REFUSALS)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {}
        if status == http.HTTPStatus.NOT_FOUND:
            raise self._no_answer("takes no actions: start it with --web and a token, see `aioshard run --help`")
        if not isinstance(answer, dict) or not answer.keys() & {"done", "error"}:
            raise self._no_answer(f"answered /{path} without saying what it did")
        if "error" in answer:
            raise ActionRefusedError(f"{self.base} refused it: {answer['error']}")
        return answer

    def _request(self, request: str | urllib.request.Request, path: str, *expected: int) -> tuple[int, str]:
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return response.status, response.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            with error:
                if error.code in expected:
                    return error.code, error.read().decode("utf-8", "replace")
            raise self._no_answer(f"answered /{path} with {error.code} {error.reason}") from None
        except (http.client.HTTPException, OSError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, TimeoutError):
                raise NoAnswerError(
                    f"{self.base} did not answer within {self._timeout:g} s: a handler may be blocking the event loop, "
                    "or the machine is busy; --timeout waits longer"
                ) from None
            raise self._no_answer(f"did not answer ({reason})") from None

    def get_json(self, path: str, *expected: int) -> tuple[int, dict[str, Any]]:
        """Request `base/path`, which contains the state of the app as JSON; see `get`.

        Raises:
            NoAnswerError: As for `get`, or another program answered, as many servers do to every request.
        """
        status, text = self.get(path, *expected)
        try:
            body = json.loads(text)
        except ValueError:
            body = None
        if not isinstance(body, dict) or "state" not in body:
            raise self._no_answer(f"answered /{path} without the state of an app")
        return status, body

    def _no_answer(self, what: str) -> NoAnswerError:
        return NoAnswerError(
            f"{self.base} {what}: check the address, and that the app runs with --health-port or serves the health "
            "routes"
        )


def health_servers(urls: Sequence[str], timeout: float) -> list[HealthServer]:
    """Return a client for each URL; for the default URL if there are none.

    Raises:
        UsageError: An argument is not a URL.
    """
    return [HealthServer(url, timeout=timeout) for url in dict.fromkeys(urls or (_DEFAULT_URL,))]


# Commands -----------------------------------------------------------------------------------


@click.command()
@urls_argument
@click.option("--live", is_flag=True, help="Check /livez, whether a restart would help, instead of /readyz.")
@click.option("--strict", is_flag=True, help="Also fail if there are findings, which a restart would not fix.")
@timeout_option
@options.as_json("the answer of each app")
def health(urls: Sequence[str], *, live: bool, strict: bool, timeout: float, as_json: bool) -> int:
    """Check the health of running apps.

    URL is the base of a health server; the default is http://127.0.0.1:8080. Ends with 0 if all apps are ready, and
    with 3 if one is not or does not answer. Use it for probes that run a command, such as the HEALTHCHECK of a
    container. --strict is for people, and for deployments that wait until all is well, not for probes.
    """

    def ask(server: HealthServer) -> tuple[dict[str, Any], str, bool]:
        status, body = server.get_json("livez" if live else "readyz", UNAVAILABLE)
        passed = status != UNAVAILABLE
        healthy = passed and not (strict and body["findings"])
        reasons = body.get("reasons", ())
        others = [finding for finding in body["findings"] if not any(finding in reason for reason in reasons)]
        quality = "alive" if live else "ready"
        verdict = quality if passed else f"not {quality}"
        lines = [f"{verdict} (the app is {body['state']})"]
        lines += [f"  because {reason}" for reason in reasons]
        lines += [f"  look at: {finding}" for finding in others]
        return {**body, "healthy": healthy}, "\n".join(lines), healthy

    return _ask_all(urls, timeout, ask, as_json=as_json)


@click.command()
@urls_argument
@timeout_option
@options.as_json("the diagnosis and the explanation of each app")
def explain(urls: Sequence[str], *, timeout: float, as_json: bool) -> int:
    """Explain why partitions do not advance.

    URL is the base of a health server; the default is http://127.0.0.1:8080. For every partition that does not
    advance: which record, which limit, since when, and what to do. Ends with 3 if an app does not answer.
    """

    def ask(server: HealthServer) -> tuple[dict[str, Any], str, bool]:
        _, explanation = server.get("explain")
        _, diagnosis = server.get_json("explain?format=json")
        return {**diagnosis, "explanation": explanation}, explanation.removesuffix("\n"), True

    return _ask_all(urls, timeout, ask, as_json=as_json)


def _ask_all(
    urls: Sequence[str],
    timeout: float,
    ask: Callable[[HealthServer], tuple[dict[str, Any], str, bool]],
    *,
    as_json: bool,
) -> int:
    """Print the answer of each app as an object or as text; return 3 if one is not good or missing.

    With several apps, the URL of each is a line before its text.
    """
    code = 0
    servers = health_servers(urls, timeout)
    for server in servers:
        error = None
        try:
            body, text, good = ask(server)
        except NoAnswerError as raised:
            raised.show()
            body = {"healthy": False}
            text = ""
            good = False
            error = raised.message
        lines = [] if error is not None else [text]
        if lines and len(servers) > 1:
            lines.insert(0, f"{server.base}:")
        print_result({"url": server.base, "error": error, **body}, lines, as_json=as_json)
        if not good:
            code = UNHEALTHY
    return code
