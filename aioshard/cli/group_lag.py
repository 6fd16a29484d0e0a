"""`aioshard group lag`: how far a group is behind, since when it stands still, and a guess at why."""

import asyncio
import datetime as dt
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from aioshard.cli import options
from aioshard.cli.group_causes import Movement, cause_of, cause_of_group, commonest
from aioshard.cli.group_looking import Look, Place, group_argument, look, place_as_object, there_is_none
from aioshard.cli.sides import run, settings_of
from aioshard.cli.tables import as_text, duration_as_text, print_table
from aioshard.kafka.groups import Coordinator, GroupBrokers
from aioshard.kafka.history import GroupMember
from aioshard.records import TopicPartition
from aioshard.settings import Settings

__all__ = ["command"]


class _Standing:
    """Since when partitions stand still and the group is in its state, as far as looks one after the other can tell."""

    def __init__(self) -> None:
        self._seen: dict[TopicPartition, tuple[tuple[int, int], float]] = {}
        """Offset and finished beyond it, and when that was seen first."""
        self._before: dict[TopicPartition, tuple[int, int, float]] = {}
        """Offset, end of the log, and when, of the look before."""
        self._state: tuple[str, float] = "", 0.0
        self._moved_at: float | None = None

    def since(self, one: TopicPartition, place: Place, now: float) -> float | None:
        """When a partition with a lag was first seen where it is; None where nothing tells that it stands."""
        where = place.offset, place.finished
        before, at = self._seen.get(one, (None, now))
        if before != where or not place.lag:
            self._seen[one] = where, now
            return None
        return at

    def moved(self, one: TopicPartition, place: Place, now: float) -> Movement | None:
        """How a partition has moved since the look before."""
        if place.bounds is None or place.committed is None:
            return None
        before = self._before.get(one)
        self._before[one] = place.offset, place.bounds.stable, now
        if before is None or place.offset < before[0]:  # it was reset
            return None
        return Movement(now - before[2], place.offset - before[0], place.bounds.stable - before[1])

    def state_since(self, state: str, now: float) -> float:
        """When the group was first seen in the state that it is in."""
        if self._state[0] != state:
            self._state = state, now
        return self._state[1]

    def nothing_since(self, moved: Mapping[TopicPartition, Movement | None], now: float) -> float | None:
        """When something of the group was last seen to move; None where only one look was taken."""
        known = [one for one in moved.values() if one is not None]
        if self._moved_at is None or any(one.committed for one in known):
            self._moved_at = now
        return self._moved_at if known else None


class _Told(NamedTuple):
    """What is told of a partition beside where it is."""

    since: float | None
    moved: Movement | None
    written: float | None
    """About when the record that comes next was written."""
    cause: str | None


class _Watched(NamedTuple):
    """One look, compared with those before."""

    group_id: str
    now: float
    coordinator: Coordinator
    found: Look
    places: Mapping[TopicPartition, Place]
    told: Mapping[TopicPartition, _Told]
    state_since: float
    nothing_since: float | None

    @property
    def lag(self) -> int:
        """Of all partitions."""
        return sum(place.lag or 0 for place in self.places.values())

    @property
    def sentence(self) -> str | None:
        """What is wrong with the group as a whole; None where nothing is, as far as can be seen."""
        if not self.lag:
            return None
        cause = cause_of_group(self.found.group)
        if cause is not None and self.now > self.state_since:
            cause += f" (seen so for {self.now - self.state_since:.0f} s)"
        if self.nothing_since is None or self.now <= self.nothing_since:
            return cause
        arrived = sum(one.moved.arrived for one in self.told.values() if one.moved is not None)
        grows = ", and the lag grows" if arrived else ""
        cause = cause or commonest(one.cause for one in self.told.values()) or "nothing tells why"
        return f"nothing was committed for {self.now - self.nothing_since:.0f} s{grows}: {cause}"


@click.command("lag")
@group_argument
@click.option("--topic", "-t", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option(
    "--watch",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Look again every SECONDS, until interrupted: rates, and since when a partition stands still.",
)
@click.option("--looks", type=click.IntRange(1), help="End after so many looks.")
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("each look")
def command(
    group: str,
    *,
    topics: tuple[str, ...],
    watch: float | None,
    looks: int | None,
    bootstrap_servers: str | None,
    as_json: bool,
) -> None:
    """Show how far GROUP is behind, partition by partition, and why.

    The lag counts offsets up to the last one that may be read, from the committed one. What is noted as finished beyond
    that is still in it, and in a column of its own. The record that comes next was written as long ago as "next" says:
    its partition stands still for no longer than that. For how long it does, and so whether it does, only a second
    look can tell: --watch. The cause is a guess from what the brokers know; they do not tell of heartbeats, so a member
    that has died counts until its session is over.
    """
    if looks is not None and looks > 1 and watch is None:
        raise click.UsageError("--looks needs --watch: how long to wait between two looks")
    most = looks if watch is not None else 1
    run(_watch(settings_of(bootstrap_servers), group, frozenset(topics), watch or 0.0, most, as_json=as_json))


async def _watch(
    settings: Settings, group_id: str, topics: frozenset[str], pause: float, most: int | None, *, as_json: bool
) -> None:
    standing = _Standing()
    looked = 0
    async with GroupBrokers(settings) as brokers:
        while True:
            watched = await _look(brokers, group_id, topics, standing)
            if as_json:
                click.echo(json.dumps(_as_object(watched)))
            else:
                _print(watched, again=looked > 0)
            looked += 1
            if most is not None and looked >= most:
                return
            await asyncio.sleep(pause)


async def _look(brokers: GroupBrokers, group_id: str, topics: frozenset[str], standing: _Standing) -> _Watched:
    coordinator = await brokers.coordinator(group_id)
    found = await look(brokers, group_id)
    places = {one: place for one, place in found.places.items() if not topics or one.topic in topics}
    now = time.time()
    behind = {
        one: max(place.offset, place.bounds.start)
        for one, place in places.items()
        if place.lag and place.bounds is not None
    }
    written = await brokers.written(behind, now)
    moved = {one: standing.moved(one, place, now) for one, place in places.items()}
    told = {}
    for one, place in places.items():
        since = standing.since(one, place, now)
        stands = None if since is None else now - since
        cause = cause_of(found.group, place, moved[one], stands)
        told[one] = _Told(since, moved[one], written.get(one), cause)
    state_since = standing.state_since(found.group.state, now)
    nothing_since = standing.nothing_since(moved, now)
    return _Watched(group_id, now, coordinator, found, places, told, state_since, nothing_since)


# For programs and for people ---------------------------------------------------------------


def _as_object(watched: _Watched) -> dict[str, Any]:
    partitions = []
    for one, place in watched.places.items():
        told = watched.told[one]
        moved = told.moved if told.moved is not None and told.moved.seconds > 0 else None
        partitions.append(
            place_as_object(one, place)
            | {
                "stands_since": told.since,
                "next_written": told.written,
                "committed_per_second": None if moved is None else moved.committed / moved.seconds,
                "arriving_per_second": None if moved is None else moved.arrived / moved.seconds,
                "cause": told.cause,
            }
        )
    return {
        "group": watched.group_id,
        "at": watched.now,
        "state": watched.found.group.state,
        "coordinator": watched.coordinator._asdict(),
        "members": len(watched.found.group.members),
        "lag": watched.lag,
        "cause": watched.sentence,
        "partitions": partitions,
    }


def _print(watched: _Watched, *, again: bool) -> None:
    group, at = watched.found.group, watched.coordinator
    when = f"\n{dt.datetime.fromtimestamp(watched.now, dt.UTC).astimezone():%H:%M:%S}: " if again else ""
    if (none := there_is_none(watched.group_id, watched.found)) is not None:
        click.echo(f"{when}{none}")
        return
    click.echo(
        f"{when}group {watched.group_id!r} is {group.state} with {len(group.members)} member(s), and "
        f"{watched.lag:,} offset(s) behind; coordinated by broker {at.broker} at {at.host}:{at.port}"
    )
    if (sentence := watched.sentence) is not None:
        click.echo(sentence)
    if not watched.places:
        return
    rows = [_cells(one, place, watched) for one, place in watched.places.items()]
    rates = ("committed/s", "arriving/s") if again else ()
    headings = (
        "partition",
        "committed",
        "end",
        "lag",
        "finished beyond",
        *rates,
        "next",
        "member",
        "stands still",
        "why",
    )
    print_table(headings, [_without_rates(row) if not again else row for row in rows])


_RATES = slice(5, 7)


def _without_rates(row: tuple[str, ...]) -> tuple[str, ...]:
    return (*row[: _RATES.start], *row[_RATES.stop :])


def _cells(one: TopicPartition, place: Place, watched: _Watched) -> tuple[str, ...]:
    told = watched.told[one]
    moved = told.moved if told.moved is not None and told.moved.seconds > 0 else None
    return (
        str(one),
        "-" if place.committed is None else str(place.offset),
        "gone" if place.bounds is None else str(place.bounds.stable),
        "-" if place.lag is None else f"{place.lag:,}",
        str(place.finished),
        "-" if moved is None else f"{moved.committed / moved.seconds:,.1f}",
        "-" if moved is None else f"{moved.arrived / moved.seconds:,.1f}",
        "-" if told.written is None else f"{duration_as_text(watched.now - told.written)} ago",
        _owner(place.member),
        "-" if told.since is None else f"for {watched.now - told.since:.0f} s",
        told.cause or "-",
    )


def _owner(member: GroupMember | None) -> str:
    if member is None:
        return "-"
    return as_text(member.instance_id or f"{member.client_id}@{member.host.lstrip('/')}")
