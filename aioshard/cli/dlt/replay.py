"""`aioshard dlt replay`: send dead letters back to their topics, or run the handlers of an app on them."""

import asyncio
from pathlib import Path

import click

from aioshard.cli import options
from aioshard.cli.brokers import settings_of
from aioshard.cli.dlt import arguments
from aioshard.cli.dlt.plans import Selection
from aioshard.cli.dlt.runs import run_on
from aioshard.cli.loading import load_function
from aioshard.dead_letters.edits import Transform, with_value
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.processing import RunHandlers
from aioshard.dead_letters.replaying import Action
from aioshard.dead_letters.sending import SendBack


@click.command("replay")
@options.topic_argument
@options.filters
@options.at
@click.option(
    "--app",
    "target",
    metavar="MODULE:APP",
    help="Run the handlers of this app on them in this process, instead of sending them back.",
)
@arguments.transform
@click.option("--value", metavar="VALUE", help="New value of the one dead letter that is selected.")
@click.option(
    "--value-file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="PATH",
    help="File with the new value of the one dead letter that is selected.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Process at most N records.")
@arguments.again
@click.option(
    "--timestamp",
    type=click.Choice(["now", "original"]),
    default="now",
    show_default=True,
    help="Time of the records that are sent back. A topic may delete old ones before a consumer reads them.",
)
@click.option("--dry-run", is_flag=True, help="Only show how many would be replayed.")
@arguments.yes
@options.app_dir
@arguments.log_level
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS, or the setting of the app")
@options.as_json("the result")
def command(
    topic: str,
    *,
    filters: Filters,
    target: str | None,
    transform: str | None,
    value: str | None,
    value_file: str | None,
    limit: int | None,
    again: bool,
    timestamp: str,
    dry_run: bool,
    yes: bool,
    app_dir: str,
    log_level: str,
    bootstrap_servers: str | None,
    as_json: bool,
) -> int:
    """Send the dead letters of TOPIC back, or process them with --app.

    First asks for confirmation, with their number. The records and the progress are written in one transaction, so
    no record is sent twice. A record that is sent back arrives behind newer ones of its key, and in every group that
    reads its topic. A first Ctrl-C ends the run after the transaction in progress. Exits with 3 if some failed, and
    with 4 if another run has taken over.
    """
    arguments.check_at(filters, topic)
    stop = asyncio.Event()
    action: Action
    if target is None:
        settings = settings_of(bootstrap_servers)
        action = SendBack(keep_time=timestamp == "original")
    else:
        app = arguments.app_to_run(target, app_dir, bootstrap_servers, log_level, filters)
        settings = app.settings
        filters = filters._replace(group=app.group_id)
        action = RunHandlers(app, stop)
    return run_on(
        settings,
        Selection(topic, filters, limit, again=again),
        action,
        stop=stop,
        transform=_transform_of(transform, app_dir, value, value_file),
        has_value=value is not None or value_file is not None,
        dry_run=dry_run,
        yes=yes,
        as_json=as_json,
    )


def _transform_of(function: str | None, app_dir: str, value: str | None, value_file: str | None) -> Transform | None:
    if sum(given is not None for given in (function, value, value_file)) > 1:
        raise click.UsageError("--transform, --value and --value-file exclude each other: give one of them")
    if function is not None:
        return load_function(function, app_dir)
    if value is not None:
        return with_value(value.encode("utf-8", "surrogateescape"))
    if value_file is not None:
        return with_value(Path(value_file).read_bytes())
    return None
