"""`aioshard dlt drop`: dead letters are deleted, from the start of a partition up to an offset."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

from aioshard.cli import options
from aioshard.cli.letters import DeadLetters
from aioshard.cli.progress import Progress
from aioshard.cli.selection import Selection
from aioshard.cli.sides import SideTopic, opened, run, settings_of, topic_argument
from aioshard.errors import AuthorizationError
from aioshard.settings import Settings

__all__ = ["drop"]

F = TypeVar("F", bound=Callable[..., Any])


def _refuse(_: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            f"{parameter.opts[0]} cannot choose what is deleted: Kafka deletes from the start of a partition up to an "
            "offset, and nothing in between. Replay what you want to keep, then give --replayed, --all, or --partition "
            "with --before-offset"
        )


def _refusing_filters(command: F) -> F:
    """The filters of the other commands, to say why they are none of this one."""
    for name in ("handler", "group", "error", "topic", "key", "record", "since", "until"):
        command = click.option(f"--{name}", f"refused_{name}", hidden=True, expose_value=False, callback=_refuse)(
            command
        )
    return command


class _Wanted(NamedTuple):
    """Up to where is to be deleted."""

    partitions: frozenset[int]
    before_offset: int | None
    everything: bool
    replayed: bool

    def ends(self, side: SideTopic, letters: DeadLetters) -> dict[int, int]:
        """The offset of each partition below which all is deleted; only where there is anything.

        Raises:
            UsageError: An offset is outside its partition.
        """
        found = {}
        for number, bounds in side.reader.ranges.items():
            end = bounds.end if self.everything else letters.notes[number].start
            if self.before_offset is not None:
                end = self.before_offset
                if not bounds.start <= end <= bounds.end:
                    raise click.UsageError(
                        f"--before-offset {end} is outside {side.name}/{number}: it holds the offsets from "
                        f"{bounds.start} to below {bounds.end}"
                    )
            if end > bounds.start:
                found[number] = min(end, bounds.end)
        return found


class _Dropped(NamedTuple):
    """What goes, of one partition."""

    partition: int
    before_offset: int
    dead_letters: int
    not_replayed: int | None
    """None where that is not known."""


@click.command()
@topic_argument
@_refusing_filters
@click.option(
    "--partition", "partitions", type=click.IntRange(0), multiple=True, help="Only of this partition; may be repeated."
)
@click.option(
    "--before-offset", type=click.IntRange(0), metavar="OFFSET", help="Below this offset of the one --partition."
)
@click.option("--replayed", is_flag=True, help="Up to the first that was neither sent back nor processed.")
@click.option("--all", "everything", is_flag=True, help="Up to the end that the partition has now.")
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would be deleted.")
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("what was deleted, or would be,")
def drop(
    topic: str,
    *,
    partitions: tuple[int, ...],
    before_offset: int | None,
    replayed: bool,
    everything: bool,
    yes: bool,
    bootstrap_servers: str | None,
    as_json: bool,
) -> None:
    """Delete the dead letters of TOPIC, for good.

    Kafka deletes from the start of a partition up to an offset. Say up to which: --replayed, --all, or --partition
    with --before-offset.
    """
    if (before_offset is not None) + replayed + everything != 1:
        raise click.UsageError("say up to where: one of --replayed, --all, or --partition with --before-offset")
    if before_offset is not None and len(set(partitions)) != 1:
        raise click.UsageError("--before-offset needs exactly one --partition: offsets are counted in each")
    wanted = _Wanted(frozenset(partitions), before_offset, everything, replayed)
    found = run(_drop(settings_of(bootstrap_servers), topic, wanted, yes=yes))
    if as_json:
        body = {"topic": topic, "deleted": yes, "partitions": [one._asdict() for one in found]}
        click.echo(json.dumps(body))
        return
    for one in found:
        click.echo(_told(topic, one, yes=yes))
    if not found:
        click.echo(f"There is nothing to delete in {topic}.")
    elif not yes:
        click.echo("Nothing was deleted: --yes deletes, for good.")


async def _drop(settings: Settings, topic: str, wanted: _Wanted, *, yes: bool) -> list[_Dropped]:
    async with opened(settings, topic, wanted.partitions) as side:
        letters = DeadLetters(side, Selection())
        known = True
        try:
            await letters.look_up_notes()
        except AuthorizationError as error:
            if wanted.replayed:
                raise
            known = False
            click.echo(f"What was sent back already is not known: {error}", err=True)
        ends = wanted.ends(side, letters)
        found = await _count(side, letters, ends, known=known)
        if yes and ends:
            await side.administration.delete_before(topic, ends)
        return found


async def _count(side: SideTopic, letters: DeadLetters, ends: Mapping[int, int], *, known: bool) -> list[_Dropped]:
    side.reader.narrow(ends)
    counts = dict.fromkeys(ends, 0)
    open_counts = dict.fromkeys(ends, 0)
    async with Progress(f"reading {side.name}", lambda: letters.read, note=lambda: letters.share):
        async for letter in letters.letters():
            counts[letter.at.partition] += 1
            open_counts[letter.at.partition] += not letter.done
    return [
        _Dropped(number, end, counts[number], open_counts[number] if known else None)
        for number, end in sorted(ends.items())
    ]


def _told(topic: str, dropped: _Dropped, *, yes: bool) -> str:
    what = "were deleted" if yes else "would be deleted"
    below = f"below offset {dropped.before_offset}"
    told = f"{topic}/{dropped.partition}: {dropped.dead_letters} dead letter(s) {below} {what}"
    if dropped.not_replayed:
        told += f"; {dropped.not_replayed} of them were neither sent back nor processed"
    return told
