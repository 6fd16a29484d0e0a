"""`aioshard spark plan`: what a run over history is going to do."""

import json
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.loading import load_app
from aioshard.cli.moments import moment
from aioshard.cli.sides import run
from aioshard.cli.tables import print_table
from aioshard.spark.planning.planning import plan as make_plan
from aioshard.spark.runs.plan import Plan

__all__ = ["plan"]

_SHOWN = 20
"""Partitions in the table."""


@click.command()
@options.target
@click.option("--out", "directory", required=True, metavar="DIR", help="Directory of the run, new.")
@click.option(
    "--start",
    callback=moment("committed", "earliest"),
    default="committed",
    show_default=True,
    metavar="committed|earliest|TIME|FILE",
    help="Where to begin: where the group is, the oldest record, the first one not older than a time, or offsets.",
)
@click.option(
    "--end",
    callback=moment("latest"),
    default="latest",
    show_default=True,
    metavar="latest|TIME|FILE",
    help="Where to end, frozen now.",
)
@click.option("--group", help="Whose place the run takes, instead of the app's group.")
@click.option("--tasks", type=click.IntRange(1), help="Tasks of a micro-batch at most.")
@click.option(
    "--max-rows-per-batch",
    type=click.IntRange(1),
    default=500_000,
    show_default=True,
    help="Records of a micro-batch: what a crash can repeat.",
)
@click.option(
    "--total-concurrency", type=click.IntRange(1), help="Handlers that run at the same time in the whole job."
)
@click.option("--on-failure", metavar="skip|dead-letter:TOPIC", help="Instead of the handlers' own policies.")
@click.option("--shuffle", is_flag=True, help="Bring the records of a key together across partitions and topics.")
@click.option("--lease", type=click.FloatRange(0), metavar="SECONDS", help="Have apps of the group keep off so long.")
@options.bootstrap_servers("the app's setting")
@options.app_dir
@options.as_json("the plan")
def plan(
    target: str,
    *,
    directory: str,
    app_dir: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Plan a run of MODULE:APP over history, in a new DIR.

    Start, end, settings and the app's version are frozen with it: a drain does what its plan says.
    """
    load_app(target, app_dir)
    told: list[str] = []
    made = run(make_plan(target, directory=directory, tell=told.append, **chosen))
    for sentence in told:
        click.echo(sentence, err=True)
    if as_json:
        click.echo(json.dumps(json.loads(made.to_json()), indent=2))
        return
    _show(made)
    click.echo(f"\nNext: aioshard spark drain {directory}")


def _show(made: Plan) -> None:
    left = [one for one in made.ranges if one.end > one.start]
    click.echo(f"{made.records:,} offset(s) of {len(left)} partition(s) for {made.app}, in place of {made.group_id!r}")
    for handler in made.handlers:
        policy = made.on_failure or handler.on_failure
        click.echo(f"  {handler.name}: {', '.join(handler.topics)}; order by {handler.shard_by}; on failure {policy}")
    if left:
        click.echo()
        rows = [
            (one.topic, str(one.partition), str(one.start), str(one.end), f"{one.end - one.start:,}") for one in left
        ]
        print_table(("topic", "partition", "start", "end", "offsets"), rows[:_SHOWN])
        if len(rows) > _SHOWN:
            click.echo(f"and {len(rows) - _SHOWN} more partition(s)")
