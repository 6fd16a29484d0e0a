"""`aioshard group`: the consumer group of an app, as the brokers see it."""

import asyncio
import datetime as dt
import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import click

from aioshard.cli import options
from aioshard.cli.groups import InOrder
from aioshard.cli.moments import moment
from aioshard.cli.sides import run, settings_of
from aioshard.cli.tables import as_text, cut, duration_as_text, moment_as_text, print_table
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import runs_of
from aioshard.errors import CommitRefusedError, GroupBusyError, LeasedError
from aioshard.kafka.groups import Coordinator, Group, GroupBrokers
from aioshard.kafka.history import GroupMember, LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings

__all__ = [
    "Look",
    "Movement",
    "Place",
    "bounds_of",
    "cause_of",
    "cause_of_group",
    "command",
    "commonest",
    "group_argument",
    "lag",
    "leave",
    "look",
    "place_as_object",
    "reset",
    "show",
    "there_is_none",
]

group_argument = click.argument("group", metavar="GROUP")


class Place(NamedTuple):
    """Where a group is on a partition."""

    committed: Committed | None
    bounds: LogBounds | None
    """None where there is no such partition any more."""
    member: GroupMember | None
    """Who has it now."""

    @property
    def noted(self) -> CommitMetadata:
        """What is noted with the offset."""
        return CommitMetadata() if self.committed is None else CommitMetadata.read(self.committed.metadata, self.offset)

    @property
    def offset(self) -> int:
        """The committed offset; -1 without one."""
        return -1 if self.committed is None else self.committed.offset

    @property
    def finished(self) -> int:
        """How many offsets beyond the committed one are noted as finished."""
        return sum(run.end - run.start for run in self.noted.finished)

    @property
    def lag(self) -> int | None:
        """How many offsets are not committed; None where nothing is, or the partition is gone."""
        if self.bounds is None or self.committed is None:
            return None
        return max(self.bounds.stable - max(self.offset, self.bounds.start), 0)


class Look(NamedTuple):
    """A group at one moment."""

    group: Group
    places: Mapping[TopicPartition, Place]
    """By partition, in order: all that it has committed or one of its members has."""


async def look(brokers: GroupBrokers, group_id: str) -> Look:
    """Look at a group now.

    Raises:
        TransportError: The brokers did not tell.
    """
    group, commits = await asyncio.gather(brokers.group(group_id), brokers.all_commits(group_id))
    owners = group.owners
    names = sorted({*commits, *owners})
    bounds = await bounds_of(brokers, names)
    places = {one: Place(commits.get(one), bounds.get(one), owners.get(one)) for one in names}
    return Look(group, places)


def there_is_none(group_id: str, found: Look) -> str | None:
    """A sentence where the brokers know no such group: mostly its name is misspelt. None where they know it."""
    if found.group.state != "dead" or found.places:
        return None
    return (
        f"there is no group {group_id!r}: it has no members and has committed nothing; check its name, which is the "
        "first argument of App"
    )


async def bounds_of(brokers: GroupBrokers, names: Collection[TopicPartition]) -> dict[TopicPartition, LogBounds]:
    """The bounds of those partitions that there are: a group may have commits of topics that were deleted."""
    there = await brokers.topics()
    known = {topic: await brokers.partitions(topic) for topic in {one.topic for one in names} & there}
    asked = [one for one in names if one.partition in known.get(one.topic, ())]
    return await brokers.bounds(asked) if asked else {}


def place_as_object(one: TopicPartition, place: Place) -> dict[str, Any]:
    """A place, for JSON."""
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


_REBALANCING = {
    "preparingrebalance": "the group is rebalancing: it waits until every member has given back and joined again",
    "completingrebalance": "the group is rebalancing: it waits for the member that assigns",
    "assigning": "the group is rebalancing: its coordinator works out who gets what",
    "reconciling": "the group is rebalancing: members give back what goes to others",
}


class Movement(NamedTuple):
    """How a partition has moved between two looks."""

    seconds: float
    committed: int
    """Offsets by which the group has advanced."""
    arrived: int
    """Offsets by which the log has grown."""


def cause_of_group(group: Group) -> str | None:
    """What keeps the whole group from advancing, as its state tells; None where it is stable."""
    if group.state in _REBALANCING:
        return _REBALANCING[group.state]
    if group.members:
        return None
    return "nobody is in the group, unless partitions are given by hand: the brokers do not see who reads those"


def cause_of(group: Group, place: Place, moved: Movement | None, stands: float | None) -> str | None:
    """Why a partition is behind, and how long it may stay so; None where nothing tells, or it is not.

    Args:
        group: As it was described.
        place: Where the group is on the partition.
        moved: Since the look before; None at the first one.
        stands: For how many seconds it was seen where it is; None where it moves, or was not seen before.
    """
    if place.bounds is None:
        return "the partition is gone"
    if place.committed is not None and place.offset < place.bounds.start:
        return (
            f"from {place.offset} on records were deleted before they were read: the log begins at {place.bounds.start}"
        )
    if not place.lag:
        return None
    return next((one for one in (*_outside(group, place), *_inside(place, moved, stands))), None)


def _outside(group: Group, place: Place) -> Iterator[str]:
    """Causes for which no member can do anything."""
    lease = place.noted.lease
    if lease is not None and lease.until > time.time():
        yield f"leased to run {as_text(lease.plan)}"
    if (whole := cause_of_group(group)) is not None:
        yield whole.partition(":")[0].partition(",")[0]
    if place.member is None:
        yield "no member has it"


def _inside(place: Place, moved: Movement | None, stands: float | None) -> Iterator[str]:
    """Causes that the member has."""
    if moved is not None and moved.committed > 0:
        yield _pace(place.lag or 0, moved)
    if place.finished:
        yield f"record {place.offset} is not finished, {place.finished} beyond it are: ask its member, aioshard explain"
    if stands is not None:
        yield "its member commits nothing: it hangs, is paused or halted (aioshard explain), or has just died"


def _pace(lag: int, moved: Movement) -> str:
    net = moved.committed - moved.arrived
    if net <= 0:
        return "more comes in than is committed" if net < 0 else "as much comes in as is committed"
    return f"it catches up, in about {duration_as_text(max(lag * moved.seconds / net, 1.0))}"


def commonest(causes: Iterable[str | None]) -> str | None:
    """The cause that most partitions have; None where none has any."""
    counted = Counter(one for one in causes if one is not None)
    return counted.most_common(1)[0][0] if counted else None


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
def lag(
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


@click.group(cls=InOrder)
def command() -> None:
    """Inspect, reset and manage consumer groups."""


for _command in (show, lag, reset, leave):
    command.add_command(_command)
