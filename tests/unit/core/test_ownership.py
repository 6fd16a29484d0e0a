"""The start position of an assigned partition."""

from typing import NamedTuple

import pytest

from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.core.ownership import (
    Claim,
    Origin,
    knows_topic,
    origin_of,
    reason_to_end,
)

CLAIM = Claim("member-1", generation=7, acknowledged=40, position=55)


class Evidence(NamedTuple):
    """The state of the brokers and of the new assignment."""

    member_id: str = "member-1"
    generation: int = 8
    committed: int | None = 40
    log: tuple[int, int] = (0, 100)


EVIDENCE = Evidence()


def test_an_unchanged_partition_continues() -> None:
    assert reason_to_end(CLAIM, *EVIDENCE) is None


def test_a_partition_that_never_committed_continues() -> None:
    assert reason_to_end(CLAIM._replace(acknowledged=None), *EVIDENCE._replace(committed=None)) is None


@pytest.mark.parametrize("position", [0, 100])
def test_both_ends_of_the_log_are_valid_positions(position: int) -> None:
    assert reason_to_end(CLAIM._replace(position=position), *EVIDENCE) is None


@pytest.mark.parametrize(
    ("claim", "evidence", "reason"),
    [
        (None, EVIDENCE, "not in the assignment before"),
        (CLAIM, EVIDENCE._replace(member_id="member-2"), "another member id"),
        (CLAIM._replace(member_id=""), EVIDENCE._replace(member_id=""), "another member id"),
        (CLAIM, EVIDENCE._replace(generation=9), "generation went from 7 to 9"),
        (CLAIM, EVIDENCE._replace(generation=7), "generation went from 7 to 7"),
        (CLAIM, EVIDENCE._replace(committed=41), "committed offset is 41"),
        (CLAIM, EVIDENCE._replace(committed=39), "committed offset is 39"),
        (CLAIM, EVIDENCE._replace(committed=None), "committed offset is None"),
        (CLAIM._replace(acknowledged=None), EVIDENCE, "ours was None"),
        (CLAIM, EVIDENCE._replace(log=(56, 100)), "outside the log"),
        (CLAIM, EVIDENCE._replace(log=(0, 54)), "outside the log"),
    ],
)
def test_each_condition_alone_ends_the_epoch(claim: Claim | None, evidence: Evidence, reason: str) -> None:
    assert reason in str(reason_to_end(claim, *evidence))


@pytest.mark.parametrize("policy", ["earliest", "latest", "error", None])
def test_a_committed_offset_in_the_log_wins_over_every_policy(policy: str | None) -> None:
    assert origin_of(9, (5, 20), policy, group_knows_topic=True) == Origin(9, resolved=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["earliest", "latest", None])
@pytest.mark.parametrize("committed", [4, 21])
def test_a_committed_offset_outside_the_log_restarts_at_the_log_start(committed: int, policy: str | None) -> None:
    """The records after the group's first position must not be lost, so never at its end (I3)."""
    origin = origin_of(committed, (5, 20), policy, group_knows_topic=True)  # type: ignore[arg-type]
    assert origin == Origin(5, resolved=True)


def test_under_error_a_committed_offset_outside_the_log_is_left_to_the_user() -> None:
    assert origin_of(4, (5, 20), "error", group_knows_topic=True) is None


@pytest.mark.parametrize(("policy", "offset"), [("earliest", 5), ("latest", 20)])
def test_a_new_group_starts_by_policy_and_commits_that_first(policy: str, offset: int) -> None:
    origin = origin_of(None, (5, 20), policy, group_knows_topic=False)  # type: ignore[arg-type]
    assert origin == Origin(offset, resolved=True)


@pytest.mark.parametrize("policy", ["error", None])
def test_a_new_group_without_a_policy_does_not_start(policy: str | None) -> None:
    assert origin_of(None, (5, 20), policy, group_knows_topic=False) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["earliest", "latest", "error", None])
def test_a_partition_created_later_starts_at_its_beginning(policy: str | None) -> None:
    origin = origin_of(None, (0, 20), policy, group_knows_topic=True)  # type: ignore[arg-type]
    assert origin == Origin(0, resolved=True)


BORN = 1_750_000_000.0
MARK = FirstCommit(partitions=4, at=int(BORN))


@pytest.mark.parametrize(
    ("markers", "partition", "seconds", "knows"),
    [
        ([], 3, 1.0, False),
        ([MARK], 3, 1.0, False),
        ([MARK], 4, 1.0, True),
        ([MARK], 3, 3600.0, True),
        ([MARK, None], 3, 1.0, True),
    ],
    ids=["nobody-committed", "at-the-same-time", "a-partition-that-was-not-there-then", "long-after", "without-mark"],
)
def test_a_group_knows_a_topic_when_it_had_commits_before_it_was_resolved(
    markers: list[FirstCommit | None], partition: int, seconds: float, *, knows: bool
) -> None:
    assert knows_topic(markers, partition, BORN + seconds) == knows


def test_the_first_commit_marker_survives_the_broker() -> None:
    metadata = CommitMetadata(first=MARK)

    assert CommitMetadata.read(metadata.text(7), 7) == metadata
