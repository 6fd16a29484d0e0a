"""`aioshard explain`: why the partitions of a running app do not advance."""

import json

import click

from aioshard.cli import asking, options
from aioshard.cli.asking import HealthServer, NoAnswerError
from aioshard.cli.exit_codes import UNHEALTHY

__all__ = ["command"]

_AS_JSON = "explain?format=json"


@click.command()
@asking.url
@asking.timeout
@options.as_json("the diagnosis, and the explanation with it,")
def command(url: str, *, timeout: float, as_json: bool) -> int:
    """Say why the partitions of a running app do not advance.

    URL is the base of its health server, such as http://127.0.0.1:8080. For every partition that does not advance:
    which record, which limit, since when, and what to do. Exits with 3 when nobody answers.
    """
    server = HealthServer(url, timeout=timeout)
    try:
        explanation = server.ask("explain").text
        diagnosis = server.ask(_AS_JSON).json(f"{server.base}/{_AS_JSON}") if as_json else {}
    except NoAnswerError as error:
        if as_json:
            click.echo(json.dumps({"url": server.base, "error": str(error)}))
        click.echo(f"Error: {error}", err=True)
        return UNHEALTHY
    if as_json:
        click.echo(json.dumps({"url": server.base, "error": None, "explanation": explanation, **diagnosis}))
    else:
        click.echo(explanation, nl=not explanation.endswith("\n"))
    return 0
