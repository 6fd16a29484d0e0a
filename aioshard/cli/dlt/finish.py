"""`aioshard dlt finish`: mark dead letters as done."""

import asyncio

import click

from aioshard.cli import options
from aioshard.cli.brokers import settings_of
from aioshard.cli.dlt import arguments
from aioshard.cli.dlt.plans import Selection
from aioshard.cli.dlt.runs import run_on
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.finishing import Finish


@click.command("finish")
@options.topic_argument
@options.filters
@options.at
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Mark at most N records.")
@click.option("--dry-run", is_flag=True, help="Only show how many would be marked.")
@arguments.yes
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("the result")
def command(
    topic: str,
    *,
    filters: Filters,
    limit: int | None,
    dry_run: bool,
    yes: bool,
    bootstrap_servers: str | None,
    as_json: bool,
) -> int:
    """Mark the dead letters of TOPIC as done.

    Their records are neither sent back nor processed: they are given up, or were fixed elsewhere. First asks for
    confirmation, with their number. Nothing is deleted: `dlt replay --again` includes them. Exits with 4 if another run
    has taken over.
    """
    arguments.check_at(filters, topic)
    settings = settings_of(bootstrap_servers)
    selection = Selection(topic, filters, limit)
    return run_on(settings, selection, Finish(), stop=asyncio.Event(), dry_run=dry_run, yes=yes, as_json=as_json)
