"""`aioshard park`: parked records, shown, released and dropped."""

import sys
from collections.abc import Callable
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.brokers import audit_log, os_user, run, settings_of
from aioshard.cli.output import UNHEALTHY, cut, moment_as_text, part_as_text, print_result, progress, table
from aioshard.core.parking import NEVER
from aioshard.core.text import as_text, bytes_as_text
from aioshard.dead_letters.filters import EVERYTHING, Filters
from aioshard.dead_letters.parked import ParkedKey, ParkedTopic, drop_records, key_as_object, release_keys
from aioshard.kafka.publisher import Publisher
from aioshard.kafka.side_topics import opened_topic
from aioshard.records import counted
from aioshard.settings import Settings


async def _read(settings: Settings, topic: str, filters: Filters) -> ParkedTopic:
    """Read a side topic from its start to its end.

    Raises:
        TransportError: It cannot be read.
    """
    parked = ParkedTopic(filters)
    async with (
        opened_topic(settings, topic, filters.partitions) as (_, reader),
        progress(f"reading {topic}", lambda: parked.read),
    ):
        await parked.read_from(reader)
    return parked


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Show, release and drop parked records."""


# list ---------------------------------------------------------------------------------


@command.command("list")
@options.topic_argument
@options.filters
@click.option(
    "--limit",
    type=click.IntRange(0),
    metavar="N",
    help=f"Show at most N keys; by default {options.ROWS}, and with --json all.",
)
@options.bootstrap_servers()
@options.as_json("the keys")
def show(topic: str, *, filters: Filters, limit: int | None, bootstrap_servers: str | None, as_json: bool) -> None:
    """List the keys whose records are parked in TOPIC.

    The key that has waited longest comes first. A key is listed if one of its records matches the filters.
    """
    parked = run(_read(settings_of(bootstrap_servers), topic, filters))
    keys = parked.keys()
    records = sum(map(len, keys))
    content = {
        "topic": topic,
        "keys": len(keys),
        "records": records,
        "parked": [key_as_object(parked, key) for key in keys[:limit]],
    }
    listed = part_as_text(records, len(parked.records), "parked record")
    lines = [f"{listed} of {counted(len(keys), 'key')} in {topic}"]
    if shown := keys[: options.ROWS if limit is None else limit]:
        lines += ["", *table(_HEADINGS, [_cells(parked, key) for key in shown])]
        if len(shown) < len(keys):
            lines.append(f"\n{counted(len(keys) - len(shown), 'more key')} not shown: --limit shows more")
    print_result(content, lines, as_json=as_json)


_HEADINGS = ("key", "first record", "records", "failed", "next retry", "retries", "handler", "error")


def _cells(parked: ParkedTopic, key: ParkedKey) -> tuple[object, ...]:
    first = key[0]
    due = "when released" if first.due >= NEVER else moment_as_text(first.due)
    return (
        cut(bytes_as_text(first.original.key)),
        first.coordinates,
        len(key),
        moment_as_text(first.failure.failed_at),
        "release requested" if parked.is_requested(key) else due,
        first.retries,
        as_text(first.failure.handler),
        cut(as_text(f"{first.failure.error}: {first.failure.message}")),
    )


# release and drop ---------------------------------------------------------------------


def _selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select parked records."""
    return options.filters(click.option("--all", "everything", is_flag=True, help="All parked records.")(command))


def _check(filters: Filters, *, everything: bool) -> None:
    filtered = filters._replace(partitions=()) != EVERYTHING
    if everything and filtered:
        raise click.UsageError("--all and a filter were both given: leave one of them out")
    if not everything and not filtered:
        raise click.UsageError("select records with --key, --record or another filter, or with --all")


def _exit_code(topic: str, matches: int, *, everything: bool) -> int:
    if matches or everything:
        return 0
    click.echo(f"Error: no parked record in {topic} matches; `aioshard park list` shows all of them", err=True)
    return UNHEALTHY


@command.command("release")
@options.topic_argument
@_selecting
@options.bootstrap_servers()
@options.as_json("the keys")
def release_(topic: str, *, filters: Filters, everything: bool, bootstrap_servers: str | None, as_json: bool) -> int:
    """Request that parked keys of TOPIC are retried now.

    --record selects the whole key of that record. The app does the work; while it does not run, the request waits in
    TOPIC. Exits with 3 if nothing matches.
    """
    _check(filters, everything=everything)

    async def work() -> list[ParkedKey]:
        settings = settings_of(bootstrap_servers)
        keys = (await _read(settings, topic, filters)).keys()
        async with Publisher(settings) as publisher, progress(f"writing to {topic}", lambda: publisher.acknowledged):
            await release_keys(publisher, topic, keys, who=os_user())
        return keys

    with audit_log():
        keys = run(work())
    records = sum(map(len, keys))
    content = {
        "topic": topic,
        "keys": len(keys),
        "records": records,
        "requested": [str(key[0].coordinates) for key in keys],
    }
    groups = ", ".join(sorted({repr(key[0].failure.group) for key in keys}))
    line = (
        f"Requested the release of {counted(len(keys), 'key')} with {counted(records, 'parked record')}; "
        f"the members of {groups} will retry them"
    )
    print_result(content, [line] if keys else [], as_json=as_json)
    return _exit_code(topic, len(keys), everything=everything)


@command.command()
@options.topic_argument
@_selecting
@click.option("--yes", is_flag=True, help="Drop without asking; without it and a terminal, only show.")
@options.bootstrap_servers()
@options.as_json("the records")
def drop(
    topic: str,
    *,
    filters: Filters,
    everything: bool,
    yes: bool,
    bootstrap_servers: str | None,
    as_json: bool,
) -> int:
    """Discard parked records of TOPIC: they will never be processed.

    --record selects only that record: later ones of its key continue without it. Exits with 3 if nothing matches.
    """
    _check(filters, everything=everything)

    settings = settings_of(bootstrap_servers)
    parked = run(_read(settings, topic, filters))
    records = [str(record.coordinates) for record in parked.selected()]
    if records and not yes and sys.stdin.isatty():
        yes = click.confirm(f"Drop {counted(len(records), 'parked record')} of {topic} for good?", err=True)

    async def work() -> None:
        async with Publisher(settings) as publisher, progress(f"writing to {topic}", lambda: publisher.acknowledged):
            await drop_records(publisher, parked, topic, who=os_user())

    if yes:
        with audit_log():
            run(work())
    lines = []
    if yes and records:
        lines = [f"Dropped {counted(len(records), 'parked record')}"]
    elif records:
        listed = ", ".join(records[:10]) + (", …" if len(records) > 10 else "")  # noqa: PLR2004
        lines = [
            f"Would drop {counted(len(records), 'parked record')}: {listed}",
            "Nothing was dropped: --yes drops, for good.",
        ]
    print_result({"topic": topic, "dropped": bool(yes and records), "records": records}, lines, as_json=as_json)
    return _exit_code(topic, len(records), everything=everything)
