"""`aioshard group`: consumer groups as the brokers see them."""

import asyncio
import datetime as dt
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import click

from aioshard.cli import options
from aioshard.cli.brokers import run, settings_of
from aioshard.cli.output import cut, part_as_text, print_result, table
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.tail import tail_of
from aioshard.core.text import as_text
from aioshard.errors import AuthorizationError, CommitRefusedError, GroupBusyError, StateError
from aioshard.kafka.admin import KafkaAdmin, LogBounds
from aioshard.kafka.groups import (
    HEARTBEAT_INTERVAL,
    SESSION_TIMEOUT,
    Coordinator,
    Group,
    GroupMember,
    GroupTime,
    GroupTimes,
    TimeLimits,
    words_of,
)
from aioshard.ports import Committed
from aioshard.records import TopicPartition, counted
from aioshard.settings import Settings, is_too_short

Target = str | int | dt.datetime
"""`earliest`, `latest`, an offset or a time."""

_REBALANCING = {
    "preparingrebalance": "the group is rebalancing: it waits for every member to release its partitions and rejoin",
    "completingrebalance": "the group is rebalancing: it waits for the member that assigns",
    "assigning": "the group is rebalancing: its coordinator computes the assignment",
    "reconciling": "the group is rebalancing: members release partitions that others will get",
}
_PROTOCOLS = {"classic": "classic protocol", "consumer": "consumer protocol (KIP-848)"}


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Inspect, reset and manage consumer groups."""


# A snapshot of a group ----------------------------------------------------------------


class Position(NamedTuple):
    """The position of a group on a partition."""

    partition: TopicPartition
    committed: Committed | None
    bounds: LogBounds | None
    """None if the partition no longer exists."""
    member: GroupMember | None
    """Its owner."""

    @property
    def metadata(self) -> CommitMetadata:
        """The metadata of the commit."""
        if self.committed is None:
            return CommitMetadata()
        return CommitMetadata.read(self.committed.metadata, self.committed.offset)

    @property
    def offset(self) -> int | None:
        """The committed offset; None without one."""
        return None if self.committed is None else self.committed.offset

    @property
    def finished(self) -> int:
        """Number of finished offsets beyond the committed one."""
        return sum(run.end - run.start for run in self.metadata.finished)

    @property
    def lag(self) -> int | None:
        """Number of offsets that are not committed; None without a commit or a partition."""
        if self.bounds is None or self.offset is None:
            return None
        return max(self.bounds.stable - max(self.offset, self.bounds.start), 0)

    def as_object(self) -> dict[str, Any]:
        """Return the position for JSON."""
        return {
            **self.partition._asdict(),
            "committed": self.offset,
            "log_start": None if self.bounds is None else self.bounds.start,
            "end": None if self.bounds is None else self.bounds.stable,
            "lag": self.lag,
            "member": None if self.member is None else self.member.member_id,
            "finished_beyond": [list(run) for run in self.metadata.finished],
            "foreign": self.metadata.foreign,
            "ignored": self.metadata.ignored,
        }


class Snapshot(NamedTuple):
    """A group at one moment."""

    coordinator: Coordinator
    group: Group
    positions: Sequence[Position]
    """Every partition with a commit or an owner, in order."""

    @property
    def lag(self) -> int:
        """Sum of the lags of all partitions."""
        return sum(self.lags.values())

    @property
    def lags(self) -> dict[TopicPartition, int]:
        """The lag of each partition."""
        return {position.partition: position.lag or 0 for position in self.positions}


async def take_snapshot(settings: Settings, group_id: str, topics: Collection[str] = ()) -> Snapshot:
    """Take a snapshot of a group; with *topics*, only of their partitions.

    Raises:
        TransportError: The brokers did not answer.
    """
    async with KafkaAdmin(settings) as brokers:
        return await _snapshot(brokers, group_id, topics)


async def _snapshot(brokers: KafkaAdmin, group_id: str, topics: Collection[str] = ()) -> Snapshot:
    coordinator, group, commits = await asyncio.gather(
        brokers.coordinator(group_id), brokers.group(group_id), brokers.all_commits(group_id)
    )
    owners = group.owners
    partitions = sorted(partition for partition in {*commits, *owners} if not topics or partition.topic in topics)
    bounds = await _bounds(brokers, partitions)
    positions = [
        Position(partition, commits.get(partition), bounds.get(partition), owners.get(partition))
        for partition in partitions
    ]
    return Snapshot(coordinator, group, positions)


async def _bounds(brokers: KafkaAdmin, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogBounds]:
    """Return the bounds of existing partitions: a group may have commits of deleted topics."""
    topics = {partition.topic for partition in partitions} & await brokers.topics()
    existing = {topic: await brokers.partitions(topic) for topic in topics}
    present = [partition for partition in partitions if partition.partition in existing.get(partition.topic, ())]
    return await brokers.bounds(present) if present else {}


def _heading(group_id: str, snapshot: Snapshot, sentence: str) -> str:
    """Return *sentence*, or a message if the group does not exist, usually because its name is misspelled."""
    if snapshot.group.state == "dead" and not snapshot.positions:
        return (
            f"unknown group {group_id!r}: it has no members and no commits; check its name, the first argument of App"
        )
    number, host, port = snapshot.coordinator
    return f"group {group_id!r} is {snapshot.group.state}{sentence}coordinated by broker {number} at {host}:{port}"


# show ---------------------------------------------------------------------------------


@command.command()
@options.group_argument
@options.bootstrap_servers()
@options.as_json("the group")
def show(group: str, *, bootstrap_servers: str | None, as_json: bool) -> None:
    """Show GROUP: its state, coordinator, members and commits.

    For each commit it shows the metadata that aioshard stores: records finished beyond the offset. For a group of the
    consumer protocol it also shows the session timeout and the heartbeat interval in force.
    """
    snapshot, times = run(_show(settings_of(bootstrap_servers), group))
    description = snapshot.group
    content = {
        "group": group,
        "state": description.state,
        "protocol": description.protocol,
        "assignor": description.assignor or None,
        "session_timeout": None if times is None else _time_as_object(times.session_timeout),
        "heartbeat_interval": None if times is None else _time_as_object(times.heartbeat_interval),
        "coordinator": snapshot.coordinator._asdict(),
        "members": [
            {**member._asdict(), "partitions": [list(partition) for partition in member.partitions]}
            for member in description.members
        ],
        "partitions": [position.as_object() for position in snapshot.positions],
    }
    assignor = f" and assignor {description.assignor!r}" if description.assignor else ""
    lines = [_heading(group, snapshot, f", with the {_PROTOCOLS[description.protocol]}{assignor}\n")]
    if times is not None:
        lines.append(", ".join(f"{words_of(name)} {_time_as_text(time)}" for name, time in times.by_name.items()))
    elif description.protocol == "consumer":
        lines.append("session timeout and heartbeat interval unknown: grant DESCRIBE_CONFIGS on the group to see them")
    lines += _member_lines(description)
    if snapshot.positions:
        headings = ("partition", "committed", "log", "finished beyond", "metadata")
        lines += ["", *table(headings, map(_position_row, snapshot.positions))]
    print_result(content, lines, as_json=as_json)


async def _show(settings: Settings, group_id: str) -> tuple[Snapshot, GroupTimes | None]:
    """Return a group, and its times: None if members choose their own, or if this user may not see them."""
    async with KafkaAdmin(settings) as brokers:
        snapshot = await _snapshot(brokers, group_id)
        if snapshot.group.protocol != "consumer":
            return snapshot, None
        try:
            return snapshot, await brokers.group_times(group_id)
        except AuthorizationError:
            return snapshot, None


def _time_as_object(time: GroupTime) -> dict[str, Any]:
    """Return a time for JSON."""
    return {"seconds": time.seconds, "from": "group" if time.is_own else "brokers"}


def _time_as_text(time: GroupTime) -> str:
    return f"{time.seconds:g} s ({_origin(time)})"


def _origin(time: GroupTime) -> str:
    return "set for the group" if time.is_own else "default of the brokers"


def _member_lines(group: Group) -> list[str]:
    """Return a table of the members, with their protocols while the group migrates to the consumer protocol."""
    if not group.members:
        return ["It has no members."]
    headings = ("member", "instance id", "client", "host", "partitions")
    classic = [member for member in group.members if member.protocol == "classic"]
    if group.protocol != "consumer" or not classic:
        return table(headings, map(_member_row, group.members))
    found = part_as_text(len(classic), len(group.members), "member")
    rows = [(*_member_row(member), member.protocol) for member in group.members]
    return [
        f"the classic protocol is still in use by {found}, each with the session timeout of its app",
        *table((*headings, "protocol"), rows),
    ]


def _member_row(member: GroupMember) -> tuple[str, ...]:
    names = (member.member_id, member.instance_id or "-", member.client_id, member.host.lstrip("/"))
    return (*map(as_text, names), " ".join(map(str, member.partitions)) or "-")


def _position_row(position: Position) -> tuple[object, ...]:
    foreign = position.metadata.foreign
    notes = position.metadata.ignored if foreign is None else [f"by another program: {as_text(cut(foreign, 40))}"]
    return (
        position.partition,
        position.offset,
        "gone" if position.bounds is None else f"{position.bounds.start} to {position.bounds.stable}",
        position.finished,
        "; ".join(notes) or None,
    )


# lag ----------------------------------------------------------------------------------


def cause_of_group(group: Group) -> str | None:
    """Return why the whole group does not advance, judging by its state; None if it is stable."""
    if group.state in _REBALANCING:
        return _REBALANCING[group.state]
    if not group.members:
        return "the group has no members; the brokers cannot see consumers with manual assignment"
    return None


def cause_of(group: Group, position: Position) -> str | None:
    """Return why a partition has a lag; None if unknown, or without a lag."""
    if position.bounds is None:
        return "the partition is gone"
    if position.offset is not None and position.offset < position.bounds.start:
        return f"records from {position.offset} to {position.bounds.start - 1} were deleted before they were read"
    if not position.lag:
        return None
    return _cause_of_lag(group, position)


def _cause_of_lag(group: Group, position: Position) -> str | None:
    of_group = cause_of_group(group)
    if of_group is not None:
        return of_group.partition(":")[0].partition(";")[0]  # the heading has the rest of the sentence
    if position.member is None:
        return "no member owns it"
    if position.finished:
        return f"record {position.offset} is not finished, {position.finished} beyond it are: run aioshard explain"
    return None


@command.command()
@options.group_argument
@click.option("--topic", "-t", "topics", metavar="NAME", multiple=True, help="Only this topic; repeatable.")
@click.option(
    "--over",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="Measure for this time, and estimate when the last partition will catch up.",
)
@options.bootstrap_servers()
@options.as_json("the lag")
def lag(group: str, *, topics: tuple[str, ...], over: float, bootstrap_servers: str | None, as_json: bool) -> None:
    """Show the consumer lag of GROUP for each partition, and its cause.

    The lag counts offsets from the committed one to the last stable one, including those that finished beyond it,
    which have a separate column. The cause is a guess from the brokers' view: they do not report heartbeats, so a
    dead member counts until its session expires.
    """
    settings = settings_of(bootstrap_servers)
    before: dict[TopicPartition, int] = {}
    began = time.monotonic()
    if over:
        before = run(take_snapshot(settings, group, topics)).lags
        time.sleep(over)
    snapshot = run(take_snapshot(settings, group, topics))
    left = tail_of(snapshot.lags, before, time.monotonic() - began)
    description = snapshot.group
    positions = snapshot.positions
    cause = cause_of_group(description) if snapshot.lag else None
    content = {
        "group": group,
        "state": description.state,
        "coordinator": snapshot.coordinator._asdict(),
        "members": len(description.members),
        "lag": snapshot.lag,
        "tail": {"partitions": left.heaviest, "seconds": left.seconds},
        "cause": cause,
        "partitions": [{**position.as_object(), "cause": cause_of(description, position)} for position in positions],
    }
    members = counted(len(description.members), "member")
    behind = counted(snapshot.lag, "offset")
    lines = [_heading(group, snapshot, f" with {members}, and {behind} behind; ")]
    if cause is not None:
        lines.append(cause)
    if left.lag:
        lines.append(f"{left}.")
    if positions:
        lines += table(
            ("partition", "committed", "end", "lag", "finished beyond", "member", "why"),
            [_lag_row(description, position) for position in positions],
        )
    print_result(content, lines, as_json=as_json)


def _lag_row(group: Group, position: Position) -> tuple[object, ...]:
    owner = position.member
    owner_name = None
    if owner is not None:
        owner_name = as_text(owner.instance_id or f"{owner.client_id}@{owner.host.lstrip('/')}")
    return (
        position.partition,
        position.offset,
        "gone" if position.bounds is None else position.bounds.stable,
        None if position.lag is None else f"{position.lag:,}",
        position.finished,
        owner_name,
        cause_of(group, position),
    )


# reset --------------------------------------------------------------------------------


@command.command()
@options.group_argument
@click.option(
    "--to",
    required=True,
    type=options.moment("earliest", "latest", offset=True),
    metavar="earliest|latest|OFFSET|TIME",
    help="The oldest record, the end, an offset, or the first record not older than a time.",
)
@click.option("--topic", "-t", "topics", metavar="NAME", multiple=True, help="Only this topic; repeatable.")
@click.option(
    "--partition",
    "-p",
    "partitions",
    type=click.IntRange(0),
    metavar="PARTITION",
    multiple=True,
    help="Only this partition of the one --topic; repeatable.",
)
@click.option("--yes", is_flag=True, help="Reset; without it, only show the changes.")
@options.bootstrap_servers()
@options.as_json("the changes")
def reset(
    group: str,
    *,
    to: Target,
    topics: tuple[str, ...],
    partitions: tuple[int, ...],
    yes: bool,
    bootstrap_servers: str | None,
    as_json: bool,
) -> None:
    """Reset the offsets of GROUP, which must be inactive.

    Resets all partitions with a commit; with --topic, all partitions of that topic. Records that finished beyond the
    old offsets will run again. To move a running app, use App.seek.
    """
    if partitions and len(set(topics)) != 1:
        raise click.UsageError("--partition needs exactly one --topic")
    changes = run(_reset(settings_of(bootstrap_servers), group, to, frozenset(topics), partitions, yes=yes))
    entries = [{**partition._asdict(), "committed": before, "to": after} for partition, before, after in changes]
    lines = [f"Nothing to change: group {group!r} is already there."]
    if changes:
        done = f"{counted(len(changes), 'partition')} of group {group!r} reset."
        lines = [
            *table(("partition", "committed", "to"), changes),
            done if yes else "Nothing was changed: --yes resets.",
        ]
    print_result({"group": group, "reset": yes, "partitions": entries}, lines, as_json=as_json)


async def _reset(
    settings: Settings,
    group_id: str,
    to: Target,
    topics: frozenset[str],
    partitions: tuple[int, ...],
    *,
    yes: bool,
) -> list[tuple[TopicPartition, int | None, int]]:
    """Return the changed partitions, with their old and new offsets."""
    async with KafkaAdmin(settings) as brokers:
        commits = await brokers.all_commits(group_id)
        chosen = await _chosen(brokers, topics, partitions) if topics else list(commits)
        if not chosen:
            raise click.UsageError(f"group {group_id!r} has no commits: name the --topic to reset")
        targets = await _targets(brokers, to, sorted(chosen))
        changes: list[tuple[TopicPartition, int | None, int]] = []
        for partition, offset in targets.items():
            before = commits.get(partition)
            if before != Committed(offset, ""):
                changes.append((partition, None if before is None else before.offset, offset))
        if yes and changes:
            await _commit_reset(brokers, group_id, {partition: offset for partition, _, offset in changes})
        return changes


async def _chosen(brokers: KafkaAdmin, topics: frozenset[str], partitions: tuple[int, ...]) -> list[TopicPartition]:
    """Return the given partitions of each topic; all of them if none is given."""
    chosen: list[TopicPartition] = []
    for topic in topics:
        numbers = partitions or await brokers.partitions(topic)
        chosen += [TopicPartition(topic, number) for number in numbers]
    return chosen


async def _commit_reset(brokers: KafkaAdmin, group_id: str, offsets: Mapping[TopicPartition, int]) -> None:
    """Commit new offsets, without records that finished beyond them.

    Raises:
        GroupBusyError: The group has members.
    """
    commits = {partition: Committed(offset, "") for partition, offset in offsets.items()}
    try:
        await brokers.commit_without_member(group_id, commits)
    except CommitRefusedError:
        raise GroupBusyError(group_id, map(str, (await brokers.group(group_id)).members), 0.0) from None


async def _targets(
    brokers: KafkaAdmin, to: Target, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return the new offset of each partition.

    Raises:
        UsageError: A partition does not exist, or an offset is outside its log.
    """
    bounds = await _bounds(brokers, partitions)
    by_time: Mapping[TopicPartition, int | None] = {}
    if isinstance(to, dt.datetime):
        by_time = await brokers.offsets_at(tuple(bounds), max(to.timestamp(), 0.0), "read_committed")
    targets: dict[TopicPartition, int] = {}
    for partition in partitions:
        if partition not in bounds:
            raise click.UsageError(f"{partition} does not exist: name the --topic and --partition to reset")
        log = bounds[partition]
        if isinstance(to, int):
            offset = to
        elif to == "earliest":
            offset = log.start
        else:
            found = by_time.get(partition)
            offset = log.stable if found is None else found
        if not log.start <= offset <= log.stable:
            raise click.UsageError(
                f"offset {offset} is outside {partition}: its log is from {log.start} to {log.stable}"
            )
        targets[partition] = offset
    return targets


# configure ----------------------------------------------------------------------------


class Configured(NamedTuple):
    """The times of a group under the consumer protocol, after a change or without one."""

    times: GroupTimes
    limits: Mapping[str, TimeLimits]
    """Empty if this user may not see them."""
    group: Group | None
    """None if this user may not see it."""

    def as_object(self, name: str) -> dict[str, Any]:
        """Return the time with this name for JSON."""
        limits = self.limits.get(name)
        return {
            **_time_as_object(self.times.by_name[name]),
            "least": None if limits is None else limits.least,
            "most": None if limits is None else limits.most,
        }

    @property
    def protocol(self) -> str | None:
        """The protocol of the group; None if it does not exist, or if this user may not see it."""
        if self.group is None or self.group.state == "dead":
            return None
        return self.group.protocol

    @property
    def rows(self) -> list[tuple[object, ...]]:
        """The rows of a table."""
        return [
            (words_of(name), f"{time.seconds:g} s", _origin(time), _limits_as_text(self.limits.get(name)))
            for name, time in self.times.by_name.items()
        ]

    @property
    def caveat(self) -> str | None:
        """Why the times have no effect yet; None if they have one, or if that is unknown."""
        if self.group is None or self.protocol == "consumer":
            return None
        if not self.group.members:
            found = "does not exist yet" if self.protocol is None else "has no members now"
            return f"The group {found}: its first member under group_protocol='consumer' will get these times."
        return (
            "They have no effect yet: the group uses the classic protocol, in which each member brings its own times. "
            "Start its members with group_protocol='consumer'."
        )


@command.command()
@options.group_argument
@click.option(
    "--session-timeout",
    type=options.seconds,
    metavar="SECONDS",
    help="Without a heartbeat for this time, a member loses its partitions.",
)
@click.option(
    "--heartbeat-interval",
    type=options.seconds,
    metavar="SECONDS",
    help="Time between two heartbeats, at most a third of the session timeout.",
)
@click.option("--reset", "is_reset", is_flag=True, help="Remove the group's own times; the brokers' defaults apply.")
@options.bootstrap_servers()
@options.as_json("the times")
def configure(
    group: str,
    *,
    session_timeout: float | None,
    heartbeat_interval: float | None,
    is_reset: bool,
    bootstrap_servers: str | None,
    as_json: bool,
) -> None:
    """Show or set the session timeout and heartbeat interval of GROUP.

    Under group_protocol="consumer" (KIP-848) these times belong to the group, and members get them from the brokers.
    Without options, the command shows those in force. You can set them before the group exists.
    """
    given = {SESSION_TIMEOUT: session_timeout, HEARTBEAT_INTERVAL: heartbeat_interval}
    wanted = {name: value for name, value in given.items() if value is not None}
    if is_reset and wanted:
        raise click.UsageError("--reset removes both times of the group: leave out the other options, or --reset")
    found = run(_configure(settings_of(bootstrap_servers), group, wanted, is_reset=is_reset))
    content = {
        "group": group,
        "protocol": found.protocol,
        "changed": is_reset or bool(wanted),
        "session_timeout": found.as_object(SESSION_TIMEOUT),
        "heartbeat_interval": found.as_object(HEARTBEAT_INTERVAL),
    }
    heading = f"times of group {group!r} under the {_PROTOCOLS['consumer']}"
    lines = [f"{heading}:", *table(("time", "in force", "source", "brokers accept"), found.rows)]
    if wanted:
        lines.append(f"{' and '.join(map(words_of, wanted)).capitalize()} set for group {group!r}.")
    if is_reset:
        lines.append(f"The brokers' defaults apply to group {group!r} now.")
    if found.caveat is not None:
        lines.append(found.caveat)
    print_result(content, lines, as_json=as_json)


def _limits_as_text(limits: TimeLimits | None) -> str | None:
    return None if limits is None else f"{limits.least:g} to {limits.most:g} s"


async def _configure(settings: Settings, group_id: str, wanted: Mapping[str, float], *, is_reset: bool) -> Configured:
    async with KafkaAdmin(settings) as brokers:
        group = await _group_under_consumer_protocol(brokers, group_id)
        times = await brokers.group_times(group_id)
        if wanted:
            check_times(wanted, times)
            times = await brokers.set_group_times(group_id, wanted)
        elif is_reset:
            times = await brokers.reset_group_times(group_id)
        return Configured(times, await brokers.time_limits(), group)


async def _group_under_consumer_protocol(brokers: KafkaAdmin, group_id: str) -> Group | None:
    """Return a group; None if this user may not see it.

    Raises:
        StateError: The brokers do not have the protocol.
    """
    try:
        if not await brokers.has_consumer_protocol(group_id):
            raise StateError(
                "the brokers accept no members of the consumer protocol (KIP-848), so they keep no times for a group: "
                "use brokers from Kafka 4.0 on which the feature group.version is 1 or higher, or set session_timeout "
                "and heartbeat_interval of the App under group_protocol='classic'"
            )
        return await brokers.group(group_id)
    except AuthorizationError:
        return None


def check_times(wanted: Mapping[str, float], times: GroupTimes) -> None:
    """Refuse a session that would have no time for three heartbeats.

    Raises:
        UsageError: It would not.
    """
    after = {name: time.seconds for name, time in times.by_name.items()} | dict(wanted)
    session = after[SESSION_TIMEOUT]
    heartbeat = after[HEARTBEAT_INTERVAL]
    if not is_too_short(session, heartbeat):
        return
    kept = "".join(f"; the {words_of(name)} is the one in force" for name in times.by_name if name not in wanted)
    raise click.UsageError(
        f"a session timeout of {session:g} s is less than 3 times a heartbeat interval of {heartbeat:g} s{kept}: one "
        f"late heartbeat would cost a member its partitions. Use --session-timeout {3 * heartbeat:g} or more, or "
        f"--heartbeat-interval {math.floor(session * 1000 / 3) / 1000:g} or less"
    )


# leave --------------------------------------------------------------------------------


@command.command()
@options.group_argument
@click.argument("instance_id", metavar="INSTANCE_ID")
@options.bootstrap_servers()
@options.as_json("the result")
def leave(group: str, instance_id: str, *, bootstrap_servers: str | None, as_json: bool) -> None:
    """Remove the static member INSTANCE_ID from GROUP for good.

    For a member that will not come back: the others get its partitions immediately, not after its session timeout.
    A member that still runs is fenced and ends with an error.
    """
    run(_leave(settings_of(bootstrap_servers), group, instance_id))
    print_result({"group": group, "left": instance_id}, [f"{instance_id!r} has left group {group!r}."], as_json=as_json)


async def _leave(settings: Settings, group_id: str, instance_id: str) -> None:
    async with KafkaAdmin(settings) as brokers:
        if not await brokers.remove_member(group_id, instance_id=instance_id):
            raise StateError(
                f"group {group_id!r} has no static member {instance_id!r}: aioshard group show {group_id} lists its "
                "members"
            )
