"""The guesses at why a group does not advance."""

import pytest

from aioshard.cli.group import Position, Snapshot, cause_of, cause_of_group
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.kafka.aiokafka.admin import Coordinator, Group, GroupMember, LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition

ONE = TopicPartition("orders", 0)
COORDINATOR = Coordinator(1, "localhost", 9092)
MEMBER = GroupMember("m-1", "billing-1", "/10.0.0.7", None, (TopicPartition("orders", 0),))


def group(state: str = "stable", *, members: bool = True) -> Group:
    found = (MEMBER,) if members else ()
    return Group(state, "classic", "sticky", found)


def place(
    committed: int | None = 10,
    start: int = 0,
    end: int = 100,
    *,
    owned: bool = True,
    noted: CommitMetadata | None = None,
) -> Position:
    commit = None if committed is None else Committed(committed, (noted or CommitMetadata()).text(committed))
    return Position(ONE, commit, LogBounds(start, end, end), MEMBER if owned else None)


@pytest.mark.parametrize(
    ("state", "members", "sentence"),
    [
        ("stable", True, None),
        ("preparingrebalance", True, "the group is rebalancing: it waits for every member"),
        ("completingrebalance", True, "the group is rebalancing: it waits for the member that assigns"),
        ("reconciling", True, "the group is rebalancing: members release"),
        ("empty", False, "the group has no members"),
        ("dead", False, "the group has no members"),
    ],
)
def test_the_state_of_a_group_is_a_cause(state: str, sentence: str | None, *, members: bool) -> None:
    cause = cause_of_group(group(state, members=members))

    assert cause is None if sentence is None else str(cause).startswith(sentence)


FINISHED = CommitMetadata(finished=(Run(12, 15),))


@pytest.mark.parametrize(
    ("found", "at", "rates", "stuck", "cause"),
    [
        (group(), place(100), None, None, None),
        (group(), place(None), None, None, None),
        (group(), place(5, start=20), None, None, "records from 5 to 19 were deleted before they were read"),
        (group(), place(None)._replace(bounds=None), None, None, "the partition is gone"),
        (group("empty", members=False), place(), None, None, "the group has no members"),
        (group("assigning"), place(), None, 5.0, "the group is rebalancing"),
        (group(), place(owned=False), None, None, "no member owns it"),
        (group(), place(), (4.0, 1.0), None, "catching up, in about 30 s"),
        (group(), place(end=100_000), (4.0, 1.0), None, "catching up, in about 9 h"),
        (group(), place(), (1.0, 4.0), None, "records arrive as fast as they are committed, or faster"),
        (group(), place(), (1.0, 1.0), None, "records arrive as fast as they are committed, or faster"),
        (group(), place(noted=FINISHED), None, None, "record 10 is not finished, 3 beyond it are"),
        (group(), place(noted=FINISHED), (0.0, 5.0), 1.0, "record 10 is not finished, 3 beyond it are"),
        (group(), place(), (0.0, 5.0), 1.0, "its member commits nothing"),
        (group(), place(), None, None, None),
    ],
)
def test_a_partition_has_the_first_cause_that_fits(
    found: Group, at: Position, rates: tuple[float, float] | None, stuck: float | None, cause: str | None
) -> None:
    committed_rate, arriving_rate = rates or (None, None)
    position = at._replace(committed_rate=committed_rate, arriving_rate=arriving_rate, stuck_since=stuck)
    guessed = cause_of(found, position)

    assert guessed is None if cause is None else str(guessed).startswith(cause)


def snapshots(*places: Position, state: str = "stable") -> Snapshot:
    """The last of several snapshots of a partition, one every ten seconds from 100 s on."""
    found = [
        Snapshot(at, COORDINATOR, group(state), [one], at) for at, one in zip(range(100, 200, 10), places, strict=False)
    ]
    last = found[0]
    for one in found[1:]:
        last = one.compared(last)
    return last


def test_a_partition_is_stuck_since_the_first_snapshot_that_found_it_there() -> None:
    assert snapshots(place(10)).positions[0].stuck_since is None
    assert snapshots(place(10), place(10), place(10)).positions[0].stuck_since == 100
    assert snapshots(place(10), place(12), place(12)).positions[0].stuck_since == 110
    assert snapshots(place(10), place(12)).positions[0].stuck_since is None
    assert snapshots(place(100), place(100)).positions[0].stuck_since is None, "it has no lag"
    assert snapshots(place(10), place(10, noted=FINISHED)).positions[0].stuck_since is None, "records beyond finished"
    assert snapshots(place(10), place(5)).positions[0].committed_rate is None, "it was reset"


def test_the_group_is_stuck_since_its_last_commit() -> None:
    assert snapshots(place(10)).cause is None
    assert snapshots(place(10), place(10), place(10)).cause == (
        "nothing was committed for 20 s: its member commits nothing: it hangs, is paused or halted (run aioshard "
        "explain), or has just died"
    )
    assert str(snapshots(place(10), place(12), place(12, end=200)).cause).startswith(
        "nothing was committed for 10 s, and the lag grows: "
    )
    assert snapshots(place(10), place(12)).cause is None
    assert str(snapshots(place(10), place(12), state="assigning").cause).startswith("the group is rebalancing")
