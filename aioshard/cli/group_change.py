"""`aioshard group reset` and `aioshard group leave`: what is changed of a group from outside."""

import datetime as dt
import json
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import click

from aioshard.cli import options
from aioshard.cli.group_looking import bounds_of, group_argument
from aioshard.cli.moments import moment
from aioshard.cli.sides import run, settings_of
from aioshard.cli.tables import print_table
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.errors import CommitRefusedError, GroupBusyError, LeasedError
from aioshard.kafka.groups import GroupBrokers
from aioshard.kafka.history import LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings

__all__ = ["leave", "reset"]

_other_than_offset = moment("earliest", "latest")


def _to(context: click.Context, parameter: click.Parameter, value: str) -> Any:
    return int(value) if value.isascii() and value.isdigit() else _other_than_offset(context, parameter, value)


class _Wanted(NamedTuple):
    """Where which partitions are to be."""

    to: Any
    topics: tuple[str, ...]
    partitions: frozenset[int]

    def includes(self, one: TopicPartition) -> bool:
        return (not self.topics or one.topic in self.topics) and (
            not self.partitions or one.partition in self.partitions
        )


class _Change(NamedTuple):
    """Of one partition."""

    one: TopicPartition
    before: Committed | None
    after: int

    def asdict(self) -> dict[str, Any]:
        return {
            "topic": self.one.topic,
            "partition": self.one.partition,
            "committed": None if self.before is None else self.before.offset,
            "to": self.after,
        }


@click.command()
@group_argument
@click.option(
    "--to",
    required=True,
    callback=_to,
    metavar="earliest|latest|OFFSET|TIME|FILE",
    help="The oldest record, the end, an offset, the first record not older than a time, or offsets in a file.",
)
@click.option("--topic", "-t", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option(
    "--partition",
    "-p",
    "partitions",
    type=click.IntRange(0),
    multiple=True,
    help="Only this partition of the one --topic; may be repeated.",
)
@click.option("--yes", is_flag=True, help="Reset; without it, only say what would be changed.")
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("what was changed, or would be,")
def reset(
    group: str,
    *,
    to: Any,
    topics: tuple[str, ...],
    partitions: tuple[int, ...],
    yes: bool,
    bootstrap_servers: str | None,
    as_json: bool,
) -> None:
    """Have GROUP, which nobody is a member of, go on elsewhere.

    Without --topic, on all partitions that it has committed; of a topic that is named, on all that there are. What is
    noted as finished beyond the old offsets is not taken along. A running app is told with App.seek instead.
    """
    if partitions and len(set(topics)) != 1:
        raise click.UsageError("--partition needs exactly one --topic: partitions are counted in each")
    wanted = _Wanted(to, tuple(dict.fromkeys(topics)), frozenset(partitions))
    found, members = run(_reset(settings_of(bootstrap_servers), group, wanted, yes=yes))
    if as_json:
        body = {"group": group, "reset": yes, "members": members, "partitions": [one.asdict() for one in found]}
        click.echo(json.dumps(body))
        return
    if not found:
        click.echo(f"There is nothing to change: group {group!r} is there already.")
        return
    rows = [(str(one.one), "-" if one.before is None else str(one.before.offset), str(one.after)) for one in found]
    print_table(("partition", "committed", "to"), rows)
    if yes:
        click.echo(f"{len(found)} partition(s) of group {group!r} were reset.")
        return
    if members:
        click.echo(f"The group has members, and would be refused: {', '.join(members)}")
    click.echo("Nothing was changed: --yes resets.")


async def _reset(
    settings: Settings, group_id: str, wanted: _Wanted, *, yes: bool
) -> tuple[list[_Change], tuple[str, ...]]:
    async with GroupBrokers(settings) as brokers:
        commits = await brokers.all_commits(group_id)
        names = await _chosen(brokers, group_id, wanted, commits)
        _refuse_leased(group_id, {one: commits[one] for one in names if one in commits})
        bounds = await bounds_of(brokers, names)
        gone = sorted(set(names) - bounds.keys())
        if gone:
            raise click.UsageError(f"{gone[0]} does not exist any more: name the --topic that is to be reset")
        targets = await _targets(brokers, wanted.to, bounds)
        changes = [
            _Change(one, commits.get(one), offset)
            for one, offset in sorted(targets.items())
            if commits.get(one) != Committed(offset, "")
        ]
        if not yes:
            return changes, tuple(str(one.member) for one in (await brokers.group(group_id)).members)
        if changes:
            try:
                await brokers.commit_without_member(group_id, {one.one: Committed(one.after, "") for one in changes})
            except CommitRefusedError:
                members = (await brokers.group(group_id)).members
                raise GroupBusyError(group_id, (str(one.member) for one in members), 0.0) from None
        return changes, ()


async def _chosen(
    brokers: GroupBrokers, group_id: str, wanted: _Wanted, commits: Collection[TopicPartition]
) -> list[TopicPartition]:
    """Which partitions the command is about.

    Raises:
        UsageError: There are none, or one that was named does not exist.
    """
    if isinstance(wanted.to, dict | list):
        found = list(_in_file(wanted.to))
    elif wanted.topics:
        found = [TopicPartition(topic, number) for topic in wanted.topics for number in await brokers.partitions(topic)]
    else:
        found = list(commits)
        if not found:
            raise click.UsageError(f"group {group_id!r} has committed nothing: name the --topic that is to be set")
    chosen = sorted(one for one in found if wanted.includes(one))
    missing = wanted.partitions - {one.partition for one in chosen}
    if missing or not chosen:
        what = f"partition {min(missing)}" if missing else "partition"
        raise click.UsageError(f"there is no {what} of {', '.join(wanted.topics) or 'that file'} to reset")
    return chosen


def _in_file(content: Any) -> dict[TopicPartition, int]:
    """The offsets of a file.

    Raises:
        UsageError: There are none in it.
    """
    try:
        found = {TopicPartition(topic, int(n)): at for topic, offsets in content.items() for n, at in offsets.items()}
    except (AttributeError, ValueError):
        found = {}
    if not found or not all(type(at) is int for at in found.values()):
        raise click.UsageError('the file of --to has no offsets: {"orders": {"0": 41}} was expected')
    return found


def _refuse_leased(group_id: str, commits: Mapping[TopicPartition, Committed]) -> None:
    for one, committed in sorted(commits.items()):
        lease = CommitMetadata.read(committed.metadata, committed.offset).lease
        if lease is not None and lease.until > time.time():
            raise LeasedError(group_id, one, *lease)


async def _targets(
    brokers: GroupBrokers, to: Any, bounds: Mapping[TopicPartition, LogBounds]
) -> dict[TopicPartition, int]:
    """The offset of each partition.

    Raises:
        UsageError: One is outside its log.
    """
    match to:
        case "earliest":
            return {one: log.start for one, log in bounds.items()}
        case "latest":
            return {one: log.stable for one, log in bounds.items()}
        case dt.datetime():
            found = await brokers.offsets_at(tuple(bounds), max(to.timestamp(), 0.0), "read_committed")
            return {one: bounds[one].stable if offset is None else offset for one, offset in found.items()}
        case int():
            targets = dict.fromkeys(bounds, to)
        case _:
            in_file = _in_file(to)
            targets = {one: in_file[one] for one in bounds}
    for one, offset in sorted(targets.items()):
        log = bounds[one]
        if not log.start <= offset <= log.stable:
            raise click.UsageError(f"offset {offset} is outside {one}: its log is from {log.start} to {log.stable}")
    return targets


# leave -------------------------------------------------------------------------------------


@click.command()
@group_argument
@click.argument("instance_id", metavar="INSTANCE_ID")
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("who has left")
def leave(group: str, instance_id: str, *, bootstrap_servers: str | None, as_json: bool) -> None:
    """Have the static member INSTANCE_ID leave GROUP for good.

    For a member that does not come back: the others get its partitions at once, and not when its session has timed
    out. One that still runs is fenced by that, and ends with an error.
    """
    run(_leave(settings_of(bootstrap_servers), group, instance_id))
    if as_json:
        click.echo(json.dumps({"group": group, "left": instance_id}))
        return
    click.echo(f"{instance_id!r} has left group {group!r}.")


async def _leave(settings: Settings, group_id: str, instance_id: str) -> None:
    async with GroupBrokers(settings) as brokers:
        await brokers.remove_static_member(group_id, instance_id)
