"""Likely causes for a group that does not advance."""

import pytest

from aioshard.cli.group import Position, cause_of, cause_of_group
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.kafka.admin import LogBounds
from aioshard.kafka.groups import Group, GroupMember
from aioshard.ports import Committed
from aioshard.records import TopicPartition

ONE = TopicPartition("orders", 0)
MEMBER = GroupMember("m-1", "billing-1", "/10.0.0.7", None, (TopicPartition("orders", 0),))


def group(state: str = "stable", *, members: bool = True) -> Group:
    found = (MEMBER,) if members else ()
    return Group(state, "classic", "sticky", found)


def position_of(
    committed: int | None = 10,
    start: int = 0,
    end: int = 100,
    *,
    owned: bool = True,
    metadata: CommitMetadata | None = None,
) -> Position:
    commit = None if committed is None else Committed(committed, (metadata or CommitMetadata()).text(committed))
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
def test_the_group_state_can_be_the_cause(state: str, sentence: str | None, *, members: bool) -> None:
    cause = cause_of_group(group(state, members=members))

    assert cause is None if sentence is None else str(cause).startswith(sentence)


FINISHED = CommitMetadata(finished=(Run(12, 15),))


@pytest.mark.parametrize(
    ("found", "at", "cause"),
    [
        (group(), position_of(100), None),
        (group(), position_of(None), None),
        (group(), position_of(5, start=20), "records from 5 to 19 were deleted before they were read"),
        (group(), position_of(None)._replace(bounds=None), "the partition is gone"),
        (group("empty", members=False), position_of(), "the group has no members"),
        (group("empty", members=False), position_of(100), None),
        (group("assigning"), position_of(), "the group is rebalancing"),
        (group(), position_of(owned=False), "no member owns it"),
        (group(), position_of(metadata=FINISHED), "record 10 is not finished, 3 beyond it are"),
        (group(), position_of(), None),
    ],
)
def test_a_partition_has_the_first_matching_cause(found: Group, at: Position, cause: str | None) -> None:
    guessed = cause_of(found, at)

    assert guessed is None if cause is None else str(guessed).startswith(cause)
