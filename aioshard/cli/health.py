"""`aioshard health`: is a running app alive, is it ready, and what should somebody look at?"""

import json
from collections.abc import Iterator
from typing import Any

import click

from aioshard.cli import asking, options
from aioshard.cli.asking import HealthServer, NoAnswerError
from aioshard.cli.exit_codes import UNHEALTHY

__all__ = ["command"]

_UNAVAILABLE = 503


@click.command()
@asking.url
@click.option("--live", is_flag=True, help="Ask only whether a restart would help (/livez), not whether it is ready.")
@click.option(
    "--strict", is_flag=True, help="Count it as unhealthy that something stands still which a restart would not cure."
)
@asking.timeout
@options.as_json("the answer")
def command(url: str, *, live: bool, strict: bool, timeout: float, as_json: bool) -> int:
    """Ask a running app for its health.

    URL is the base of its health server, such as http://127.0.0.1:8080. Ends with 0 when the app is ready, and with 3
    when it is not or nobody answers. For probes that run a command, such as the HEALTHCHECK of a container. With
    --strict it ends with 3 also when the app says that somebody should look at something: for a person or a deployment
    that waits until all is well, not for a probe, because a restart would not help.
    """
    server = HealthServer(url, timeout=timeout)
    path = "livez" if live else "readyz"
    try:
        answer = server.ask(path, _UNAVAILABLE)
        body = answer.json(f"{server.base}/{path}", "state", "findings")
    except NoAnswerError as error:
        if as_json:
            click.echo(json.dumps({"url": server.base, "healthy": False, "error": str(error)}))
        click.echo(f"Error: {error}", err=True)
        return UNHEALTHY
    healthy = answer.status != _UNAVAILABLE
    well = healthy and not (strict and body.get("findings"))
    if as_json:
        click.echo(json.dumps({**body, "url": server.base, "healthy": well, "error": None}))
    else:
        click.echo("\n".join(_told(body, "alive" if live else "ready", healthy=healthy)))
    return 0 if well else UNHEALTHY


def _told(body: dict[str, Any], fact: str, *, healthy: bool) -> Iterator[str]:
    yield f"{fact} (the app is {body.get('state')})" if healthy else f"not {fact} (the app is {body.get('state')})"
    for reason in body.get("reasons", ()):
        yield f"  because {reason}"
    for finding in body.get("findings", ()):
        yield f"  look at: {finding}"
