"""The guesses at why a group does not advance."""

import time

import pytest

from aioshard.cli.group import Movement, Place, cause_of, cause_of_group, commonest
from aioshard.core.commit_metadata import CommitMetadata, Lease
from aioshard.core.finished_offsets import Run
from aioshard.kafka.groups import Group, MemberOfGroup
from aioshard.kafka.history import GroupMember, LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition

MEMBER = GroupMember("m-1", "billing-1", "/10.0.0.7", None)


def group(state: str = "stable", *, members: bool = True) -> Group:
    found = (MemberOfGroup(MEMBER, (TopicPartition("orders", 0),)),) if members else ()
    return Group(state, "classic", "sticky", found)


def place(
    committed: int | None = 10,
    start: int = 0,
    end: int = 100,
    *,
    owned: bool = True,
    noted: CommitMetadata | None = None,
) -> Place:
    commit = None if committed is None else Committed(committed, (noted or CommitMetadata()).text(committed))
    return Place(commit, LogBounds(start, end, end), MEMBER if owned else None)


@pytest.mark.parametrize(
    ("state", "members", "sentence"),
    [
        ("stable", True, None),
        ("preparingrebalance", True, "the group is rebalancing: it waits until every member"),
        ("completingrebalance", True, "the group is rebalancing: it waits for the member that assigns"),
        ("reconciling", True, "the group is rebalancing: members give back"),
        ("empty", False, "nobody is in the group"),
        ("dead", False, "nobody is in the group"),
    ],
)
def test_the_state_of_a_group_is_a_cause(state: str, sentence: str | None, *, members: bool) -> None:
    cause = cause_of_group(group(state, members=members))

    assert cause is None if sentence is None else str(cause).startswith(sentence)


FINISHED = CommitMetadata(finished=(Run(12, 15),))
LEASED = CommitMetadata(lease=Lease("run7", round(time.time()) + 3600))


@pytest.mark.parametrize(
    ("found", "at", "moved", "stands", "cause"),
    [
        (group(), place(100), None, None, None),
        (group(), place(None), None, None, None),
        (group(), place(5, start=20), None, None, "from 5 on records were deleted before they were read"),
        (group(), place(None)._replace(bounds=None), None, None, "the partition is gone"),
        (group(members=False), place(noted=LEASED), None, None, "leased to run run7"),
        (group("empty", members=False), place(), None, None, "nobody is in the group"),
        (group("assigning"), place(), None, 5.0, "the group is rebalancing"),
        (group(), place(owned=False), None, None, "no member has it"),
        (group(), place(), Movement(10.0, 40, 10), None, "it catches up, in about 30 s"),
        (group(), place(end=100_000), Movement(10.0, 40, 10), None, "it catches up, in about 9 h"),
        (group(), place(), Movement(10.0, 10, 40), None, "more comes in than is committed"),
        (group(), place(), Movement(10.0, 10, 10), None, "as much comes in as is committed"),
        (group(), place(noted=FINISHED), None, None, "record 10 is not finished, 3 beyond it are"),
        (group(), place(noted=FINISHED), Movement(1.0, 0, 5), 1.0, "record 10 is not finished, 3 beyond it are"),
        (group(), place(), Movement(1.0, 0, 5), 1.0, "its member commits nothing"),
        (group(), place(), None, None, None),
    ],
)
def test_a_partition_has_the_first_cause_that_fits(
    found: Group, at: Place, moved: Movement | None, stands: float | None, cause: str | None
) -> None:
    guessed = cause_of(found, at, moved, stands)

    assert guessed is None if cause is None else str(guessed).startswith(cause)


def test_the_commonest_cause_is_that_of_the_group() -> None:
    assert commonest(["a", None, "b", "b", None, None]) == "b"
    assert commonest([None]) is None
