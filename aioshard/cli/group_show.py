"""`aioshard group show` and `aioshard group lag`: a group, its members and where it is."""

import asyncio
import datetime as dt
import json
import time
from collections.abc import Iterable
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.group_looking import Look, Place, group_argument, look
from aioshard.cli.sides import run, settings_of
from aioshard.cli.tables import as_text, cut, moment_as_text, print_table
from aioshard.core.finished_offsets import runs_of
from aioshard.kafka.groups import Coordinator, GroupBrokers
from aioshard.kafka.history import GroupMember
from aioshard.records import TopicPartition
from aioshard.settings import Settings

__all__ = ["lag", "show"]


# show --------------------------------------------------------------------------------------


@click.command()
@group_argument
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("the group")
def show(group: str, *, bootstrap_servers: str | None, as_json: bool) -> None:
    """Show GROUP: its state, who coordinates it, its members, and what it has committed.

    Of each offset it shows what aioshard has noted with it: records beyond it that are finished, and leases.
    """
    coordinator, found = run(_show(settings_of(bootstrap_servers), group))
    if as_json:
        click.echo(json.dumps(_group_as_object(group, coordinator, found)))
        return
    described = f"group {group!r} is {found.group.state}, protocol {found.group.protocol}"
    click.echo(described + (f" with assignor {found.group.assignor!r}" if found.group.assignor else ""))
    number = coordinator.offsets_partition
    place = "" if number is None else f", as the leader of __consumer_offsets/{number}"
    click.echo(f"coordinated by broker {coordinator.broker} at {coordinator.host}:{coordinator.port}{place}\n")
    if found.group.members:
        rows = [
            (
                as_text(one.member.member_id),
                as_text(one.member.instance_id or "-"),
                as_text(one.member.client_id),
                as_text(one.member.host.lstrip("/")),
                _in_short(one.partitions),
            )
            for one in found.group.members
        ]
        print_table(("member", "instance id", "client", "host", "partitions"), rows)
    else:
        click.echo("It has no members.")
    click.echo()
    if not found.places:
        click.echo("It has committed nothing.")
        return
    rows_of_places = [(str(one), *_place_as_cells(place)) for one, place in found.places.items()]
    print_table(("partition", "committed", "log", "finished beyond", "noted"), rows_of_places)


def _in_short(partitions: Iterable[TopicPartition]) -> str:
    """`orders/0-3,7 payments/0`."""
    numbers: dict[str, list[int]] = {}
    for one in partitions:
        numbers.setdefault(one.topic, []).append(one.partition)
    told = []
    for topic, theirs in numbers.items():
        runs = (str(run.start) if run.end == run.start + 1 else f"{run.start}-{run.end - 1}" for run in runs_of(theirs))
        told.append(f"{topic}/{','.join(runs)}")
    return " ".join(told) or "-"


async def _show(settings: Settings, group_id: str) -> tuple[Coordinator, Look]:
    async with GroupBrokers(settings) as brokers:
        return await brokers.coordinator(group_id), await look(brokers, group_id)


def _place_as_cells(place: Place) -> tuple[str, str, str, str]:
    log = "gone" if place.bounds is None else f"{place.bounds.start} to {place.bounds.stable}"
    return "-" if place.committed is None else str(place.offset), log, str(place.finished), _noted(place) or "-"


def _noted(place: Place) -> str:
    """What stands beside the offset, in a few words."""
    noted = place.noted
    told = []
    if noted.lease is not None:
        over = "was leased" if noted.lease.until <= time.time() else "leased"
        told.append(f"{over} to run {as_text(noted.lease.plan)} until {moment_as_text(noted.lease.until)}")
    if noted.foreign is not None:
        told.append(f"by another program: {as_text(cut(noted.foreign, 40))}")
    told += noted.ignored
    return "; ".join(told)


def _group_as_object(group_id: str, coordinator: Coordinator, found: Look) -> dict[str, Any]:
    return {
        "group": group_id,
        "state": found.group.state,
        "protocol": found.group.protocol,
        "assignor": found.group.assignor or None,
        "coordinator": coordinator._asdict(),
        "members": [
            one.member._asdict() | {"partitions": [list(each) for each in one.partitions]}
            for one in found.group.members
        ],
        "partitions": [_place_as_object(one, place) for one, place in found.places.items()],
    }


def _place_as_object(one: TopicPartition, place: Place) -> dict[str, Any]:
    noted = place.noted
    return {
        "topic": one.topic,
        "partition": one.partition,
        "committed": None if place.committed is None else place.offset,
        "log_start": None if place.bounds is None else place.bounds.start,
        "end": None if place.bounds is None else place.bounds.stable,
        "lag": place.lag,
        "member": None if place.member is None else place.member.member_id,
        "finished_beyond": [list(each) for each in noted.finished],
        "lease": None if noted.lease is None else noted.lease._asdict(),
        "foreign": noted.foreign,
        "ignored": list(noted.ignored),
    }


# lag ---------------------------------------------------------------------------------------


class _Standing:
    """Since when partitions stand still, as far as looks one after the other can tell."""

    def __init__(self) -> None:
        self._seen: dict[TopicPartition, tuple[tuple[int, int], float]] = {}
        """Offset and finished beyond it, and when that was seen first."""

    def since(self, one: TopicPartition, place: Place, now: float) -> float | None:
        """When a partition with a lag was first seen where it is; None where nothing tells that it stands."""
        where = place.offset, place.finished
        before, at = self._seen.get(one, (None, now))
        if before != where or not place.lag:
            self._seen[one] = where, now
            return None
        return at


@click.command()
@group_argument
@click.option("--topic", "-t", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option(
    "--watch",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Look again every SECONDS, until interrupted, and say since when a partition stands still.",
)
@click.option("--looks", type=click.IntRange(1), help="End after so many looks.")
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("each look")
def lag(
    group: str,
    *,
    topics: tuple[str, ...],
    watch: float | None,
    looks: int | None,
    bootstrap_servers: str | None,
    as_json: bool,
) -> None:
    """Show how far GROUP is behind, partition by partition.

    The lag counts offsets up to the last one that may be read, from the committed one. What is noted as finished
    beyond that is still in it, and in a column of its own.
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
            found = await look(brokers, group_id)
            places = {one: place for one, place in found.places.items() if not topics or one.topic in topics}
            now = time.time()
            since = {one: standing.since(one, place, now) for one, place in places.items()}
            if as_json:
                _print_look_as_json(group_id, now, found, places, since)
            else:
                _print_look(group_id, now, found, places, since, watched=looked > 0)
            looked += 1
            if most is not None and looked >= most:
                return
            await asyncio.sleep(pause)


def _print_look_as_json(
    group_id: str,
    now: float,
    found: Look,
    places: dict[TopicPartition, Place],
    since: dict[TopicPartition, float | None],
) -> None:
    body = {
        "group": group_id,
        "at": now,
        "state": found.group.state,
        "lag": sum(place.lag or 0 for place in places.values()),
        "partitions": [_place_as_object(one, place) | {"stands_since": since[one]} for one, place in places.items()],
    }
    click.echo(json.dumps(body))


def _print_look(
    group_id: str,
    now: float,
    found: Look,
    places: dict[TopicPartition, Place],
    since: dict[TopicPartition, float | None],
    *,
    watched: bool,
) -> None:
    total = sum(place.lag or 0 for place in places.values())
    when = f"\n{dt.datetime.fromtimestamp(now, dt.UTC).astimezone():%H:%M:%S}: " if watched else ""
    click.echo(f"{when}group {group_id!r} is {found.group.state} and {total:,} offset(s) behind")
    if not places:
        return
    rows = [
        (
            str(one),
            "-" if place.committed is None else str(place.offset),
            "gone" if place.bounds is None else str(place.bounds.stable),
            "-" if place.lag is None else f"{place.lag:,}",
            str(place.finished),
            _owner(place.member),
            "-" if (at := since[one]) is None else f"for {now - at:.0f} s",
        )
        for one, place in places.items()
    ]
    print_table(("partition", "committed", "end", "lag", "finished beyond", "member", "stands still"), rows)


def _owner(member: GroupMember | None) -> str:
    if member is None:
        return "-"
    return as_text(member.instance_id or f"{member.client_id}@{member.host.lstrip('/')}")
