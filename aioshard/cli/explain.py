"""`aioshard explain`: why the partitions of a running app do not advance."""

import json
from typing import Any

import click

from aioshard.cli import asking, options
from aioshard.cli.asking import UNHEALTHY, HealthServer, NoAnswerError

__all__ = ["command"]

_STUCK_AFTER = 60.0


@click.command()
@asking.url
@click.option(
    "--stuck-after",
    type=click.FloatRange(min=0),
    default=_STUCK_AFTER,
    show_default=True,
    help="With --json: seconds after which a partition whose oldest record is incomplete counts as stuck.",
)
@asking.timeout
@options.as_json("the explanation and the partitions that are stuck")
def command(url: str, *, stuck_after: float, timeout: float, as_json: bool) -> int:
    """Say why the partitions of a running app do not advance.

    URL is the base of its health server, such as http://127.0.0.1:8080. For every partition that does not advance:
    which record, which limit, since when, and what to do. Exits with 3 when nobody answers.
    """
    server = HealthServer(url, timeout=timeout)
    try:
        explanation = server.ask("explain").text
        statistics = server.ask("statistics.json").json(f"{server.base}/statistics.json") if as_json else {}
    except NoAnswerError as error:
        if as_json:
            click.echo(json.dumps({"url": server.base, "error": str(error)}))
        click.echo(f"Error: {error}", err=True)
        return UNHEALTHY
    if as_json:
        click.echo(json.dumps(_as_json(server.base, explanation, statistics, stuck_after)))
    else:
        click.echo(explanation, nl=not explanation.endswith("\n"))
    return 0


def _as_json(base: str, explanation: str, statistics: dict[str, Any], stuck_after: float) -> dict[str, Any]:
    return {
        "url": base,
        "error": None,
        "state": statistics.get("state"),
        "trouble": statistics.get("trouble"),
        "stuck": [one for one in statistics.get("partitions", ()) if _is_stuck(one, stuck_after)],
        "explanation": explanation,
    }


def _is_stuck(partition: dict[str, Any], stuck_after: float) -> bool:
    age = partition.get("oldest_incomplete_age")
    return partition.get("paused") is not None or (age is not None and age >= stuck_after)
