"""`aioshard group show`: a group, its members and what it has committed."""

import json
import time
from collections.abc import Iterable
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.group_looking import Look, Place, group_argument, look, place_as_object, there_is_none
from aioshard.cli.sides import run, settings_of
from aioshard.cli.tables import as_text, cut, moment_as_text, print_table
from aioshard.core.finished_offsets import runs_of
from aioshard.kafka.groups import Coordinator, GroupBrokers
from aioshard.records import TopicPartition
from aioshard.settings import Settings

__all__ = ["show"]


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
    if (none := there_is_none(group, found)) is not None:
        click.echo(none)
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
        "partitions": [place_as_object(one, place) for one, place in found.places.items()],
    }
