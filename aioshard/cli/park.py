"""`aioshard park`: what is parked, and letting it go."""

import asyncio
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import click

from aioshard.cli import options
from aioshard.cli.groups import InOrder
from aioshard.cli.progress import Progress
from aioshard.cli.selection import Selection, filters
from aioshard.cli.sides import SideTopic, opened, run, settings_of, topic_argument
from aioshard.cli.tables import as_json_value, as_text, bytes_as_text, cut, moment_as_text, print_table
from aioshard.core.parking import NEVER
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ParkedRecord,
    Place,
    ReleaseEnded,
    ReleaseRequest,
    Removed,
    read_parked,
    release,
    tombstone,
)
from aioshard.settings import Settings

__all__ = ["Parked", "ParkedKey", "ParkedTopic", "command", "drop", "release_", "show"]


class Parked(NamedTuple):
    """A parked record, without its value."""

    at: Coordinates
    """Where it came from."""
    places: tuple[Place, ...]
    """Under which keys it is stored: more than one after a member was slow to notice that it had lost the partition."""
    key: bytes | None
    failure: Failure
    due: float
    replays: int


class ParkedKey(NamedTuple):
    """The parked records of one key and partition; a record without a key is alone.

    Invariants:
        * The first one of `records` comes first when the key is run again.
    """

    records: tuple[Parked, ...]
    requested: bool
    """Whether somebody has asked for its release, and nobody has answered yet."""

    @property
    def first(self) -> Parked:
        """The record that failed; the others wait behind it."""
        return self.records[0]


class ParkedTopic:
    """Reads what is parked in an open side topic. Owned by one command."""

    def __init__(self, side: SideTopic) -> None:
        self.strange = 0
        """Records that say nothing of parking."""
        self._side = side
        self._stored: dict[Coordinates, dict[Place, ParkedRecord]] = {}
        """By generation; without values."""
        self._requests: set[Coordinates] = set()
        self._read = 0

    def __len__(self) -> int:
        """How many records are parked."""
        return len(self._stored)

    async def read(self) -> None:
        """Read the topic from its start to its end.

        Raises:
            TransportError: It cannot be read.
        """
        async with Progress(f"reading {self._side.name}", lambda: self._read):
            async for records in self._side.reader.read():
                for record in records:
                    self._take(record)

    def _take(self, record: Record) -> None:
        self._read += 1
        match read_parked(record):
            case ParkedRecord() as parked:
                known = self._stored.setdefault(parked.coordinates, {})
                known[parked.place] = parked._replace(original=parked.original._replace(value=None, headers=()))
            case Removed(place):
                known = self._stored.get(place.coordinates, {})
                known.pop(place, None)
                if not known:
                    self._stored.pop(place.coordinates, None)
            case ReleaseRequest(coordinates):
                self._requests.add(coordinates)
            case ReleaseEnded(coordinates):
                self._requests.discard(coordinates)
            case None:
                self.strange += 1

    def _all(self) -> Iterator[Parked]:
        """What is parked, in order; of a record that is stored twice, as it was parked last."""
        for at, known in sorted(self._stored.items(), key=operator.itemgetter(0)):
            last = known[max(known)]
            yield Parked(at, tuple(sorted(known)), last.original.key, last.failure, last.due, last.replays)

    def keys(self, selection: Selection) -> list[ParkedKey]:
        """The keys of which a record is selected, with all their records; the one that waits longest comes first."""
        chosen = {_identity(one) for one in self._all() if _is_selected(one, selection)}
        by_key: dict[object, list[Parked]] = {}
        for one in self._all():
            identity = _identity(one)
            if identity in chosen:
                by_key.setdefault(identity, []).append(one)
        keys = [ParkedKey(tuple(records), self._is_requested(records)) for records in by_key.values()]
        return sorted(keys, key=lambda key: (key.first.failure.failed_at, key.first.at))

    def _is_requested(self, records: Iterable[Parked]) -> bool:
        return any(one.at in self._requests for one in records)

    def records(self, selection: Selection) -> Iterator[Parked]:
        """The selected records themselves, in order."""
        return (one for one in self._all() if _is_selected(one, selection))


def _identity(one: Parked) -> object:
    return one.at if one.key is None else (one.at.topic, one.at.partition, one.key)


def _is_selected(one: Parked, selection: Selection) -> bool:
    return selection.takes(Record(*one.at, one.key, None, (), 0.0), one.failure)


_ROWS = 50
_NOTHING_CHOSEN = 3
_AT_ONCE = 1000


@click.group(cls=InOrder)
def command() -> None:
    """Show, release and drop parked records."""


# Showing ------------------------------------------------------------------------------


@command.command("list")
@topic_argument
@filters
@click.option("--limit", type=click.IntRange(0), help=f"Only so many keys; by default {_ROWS}, and with --json all.")
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("the keys")
def show(topic: str, *, selection: Selection, limit: int | None, bootstrap_servers: str | None, as_json: bool) -> None:
    """Show the keys whose records are parked in TOPIC.

    The key that waits longest comes first. A key is shown when one of its records is chosen by the filters.
    """
    parked = run(_read(settings_of(bootstrap_servers), topic, selection))
    keys = parked.keys(selection)
    records = sum(len(key.records) for key in keys)
    if as_json:
        body = {
            "topic": topic,
            "keys": len(keys),
            "records": records,
            "other_records": parked.strange,
            "parked": [_object(key) for key in keys[:limit]],
        }
        click.echo(json.dumps(body))
        return
    of = f" of {len(parked)}" if records != len(parked) else ""
    click.echo(f"{records}{of} record(s) of {len(keys)} key(s) are parked in {topic}")
    if parked.strange:
        click.echo(f"{parked.strange} record(s) of {topic} are no parked records")
    shown = keys[: _ROWS if limit is None else limit]
    if shown:
        click.echo()
        print_table(_HEADINGS, [_cells(key) for key in shown])
        if len(shown) < len(keys):
            click.echo(f"\n{len(keys) - len(shown)} more key(s) are not shown: --limit shows more")


async def _read(settings: Settings, topic: str, selection: Selection) -> ParkedTopic:
    async with opened(settings, topic, selection.partitions) as side:
        parked = ParkedTopic(side)
        await parked.read()
        return parked


_HEADINGS = ("key", "first record", "records", "failed", "runs again", "replays", "handler", "error")


def _cells(key: ParkedKey) -> tuple[str, ...]:
    first = key.first
    due = "when released" if first.due >= NEVER else moment_as_text(first.due)
    return (
        cut(bytes_as_text(first.key)),
        str(first.at),
        str(len(key.records)),
        moment_as_text(first.failure.failed_at),
        "release requested" if key.requested else due,
        str(first.replays),
        as_text(first.failure.handler),
        cut(as_text(f"{first.failure.error}: {first.failure.message}")),
    )


def _object(key: ParkedKey) -> dict[str, Any]:
    first = key.first
    return {
        "key": as_json_value(first.key),
        "topic": first.at.topic,
        "partition": first.at.partition,
        "offsets": [one.at.offset for one in key.records],
        "due": None if first.due >= NEVER else first.due,
        "replays": first.replays,
        "release_requested": key.requested,
        **first.failure._asdict(),
    }


# Letting go ---------------------------------------------------------------------------


def _chosen(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which parked records are meant."""
    return filters(click.option("--all", "everything", is_flag=True, help="Everything that is parked.")(command))


def _check(selection: Selection, *, everything: bool) -> None:
    named = bool(selection._replace(partitions=frozenset()))
    if everything and named:
        raise click.UsageError("--all and a filter were both given: leave one of them out")
    if not everything and not named:
        raise click.UsageError("say which: --key, --record, another filter, or --all")


@command.command("release")
@topic_argument
@_chosen
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("which keys")
def release_(
    topic: str, *, selection: Selection, everything: bool, bootstrap_servers: str | None, as_json: bool
) -> int:
    """Ask for parked keys of TOPIC to be run again now.

    With --record, the whole key of that record. The app does it; while none of its processes runs, the request
    waits in TOPIC. Exits with 3 when nothing that was named is parked.
    """
    _check(selection, everything=everything)

    async def work() -> list[ParkedKey]:
        settings = settings_of(bootstrap_servers)
        keys = (await _read(settings, topic, selection)).keys(selection)
        await _publish(settings, topic, [release(topic, key.first.at) for key in keys])
        return keys

    keys = run(work())
    records = sum(len(key.records) for key in keys)
    if as_json:
        click.echo(json.dumps({"topic": topic, "keys": len(keys), "records": records, "requested": _named(keys)}))
    elif keys:
        groups = sorted({key.first.failure.group for key in keys})
        click.echo(
            f"The release of {len(keys)} key(s) with {records} parked record(s) was requested; the members of "
            f"{', '.join(map(repr, groups))} run them again"
        )
    return _ending(topic, len(keys), everything=everything)


@command.command()
@topic_argument
@_chosen
@click.option("--yes", is_flag=True, help="Drop; without it, only say what would be dropped.")
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("which records")
def drop(
    topic: str, *, selection: Selection, everything: bool, yes: bool, bootstrap_servers: str | None, as_json: bool
) -> int:
    """Give parked records of TOPIC up: they are never processed.

    With --record, that record alone: later ones of its key go on without it. Exits with 3 when nothing that was
    named is parked.
    """
    _check(selection, everything=everything)

    async def work() -> list[Parked]:
        settings = settings_of(bootstrap_servers)
        records = list((await _read(settings, topic, selection)).records(selection))
        if yes:
            await _publish(settings, topic, [tombstone(topic, place) for one in records for place in one.places])
        return records

    records = run(work())
    if as_json:
        click.echo(json.dumps({"topic": topic, "dropped": yes, "records": [str(one.at) for one in records]}))
    elif yes and records:
        click.echo(f"{len(records)} parked record(s) were dropped: they are never processed")
    elif records:
        click.echo(f"{len(records)} parked record(s) would be dropped, and never processed: {_some(records)}")
        click.echo("Nothing was dropped: --yes drops, for good.")
    return _ending(topic, len(records), everything=everything)


async def _publish(settings: Settings, topic: str, messages: Sequence[Message]) -> None:
    """Publish, and wait until all is acknowledged."""
    acknowledged = 0
    producer = KafkaProducer(settings)
    try:
        async with Progress(f"writing to {topic}", lambda: acknowledged):
            for begin in range(0, len(messages), _AT_ONCE):
                part = messages[begin : begin + _AT_ONCE]
                await asyncio.gather(*map(producer.publish, part))
                acknowledged += len(part)
    finally:
        await producer.close()


def _named(keys: Sequence[ParkedKey]) -> list[str]:
    return [str(key.first.at) for key in keys]


def _some(records: Sequence[Parked]) -> str:
    shown = ", ".join(str(one.at) for one in records[:10])
    return shown if len(records) <= 10 else f"{shown}, …"  # noqa: PLR2004


def _ending(topic: str, found: int, *, everything: bool) -> int:
    if found:
        return 0
    if everything:
        click.echo(f"Nothing is parked in {topic}.", err=True)
        return 0
    click.echo(f"Error: nothing that was named is parked in {topic}; `aioshard park list` shows what is", err=True)
    return _NOTHING_CHOSEN
