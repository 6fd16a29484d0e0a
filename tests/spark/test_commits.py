"""What a hand-over and a lease write beside the offsets, at the borders of the format."""

import dataclasses

import pytest

from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata, Lease, utf16_units
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.spark.planning.commits import after, leased, moved, noted
from aioshard.spark.runs.plan import CommittedThen

LEASED = "aioshard/1 lease=7f3a@1767225600 done=r:4:Ich4:AQICAw"
"""5, 6 and 9 to 11 are finished."""

PARALLEL_CONSUMER = "bgABAAIAAgAD"
"""The same by another program."""


def test_a_hand_over_ends_a_lease_that_was_there_when_the_plan_was_made() -> None:
    done = after(CommittedThen("orders", 0, 4, LEASED), 10)

    assert noted(done).lease is None
    assert noted(done).finished == ((10, 12),)


@pytest.mark.parametrize(("end", "left"), [(11, ((11, 12),)), (12, ()), (13, ())])
def test_what_was_finished_before_the_end_is_not_noted_again(end: int, left: tuple[tuple[int, int], ...]) -> None:
    assert noted(after(CommittedThen("orders", 0, 4, LEASED), end)).finished == left
    assert after(CommittedThen("orders", 0, 4, PARALLEL_CONSUMER), end) == after(
        CommittedThen("orders", 0, 4, LEASED), end
    )


@pytest.mark.parametrize(
    "text", ["worker-7", "aioshard/2 more=1", "aioshard/1 lease=x", "aioshard/1 done=q:4:AAAA:AQI", PARALLEL_CONSUMER]
)
def test_a_lease_hides_nothing_that_it_cannot_read(text: str) -> None:
    assert leased(Committed(4, text), Lease("7f3a", 1_767_225_600)) is None


def test_a_lease_and_its_end_keep_all_else() -> None:
    plain = Committed(4, "aioshard/1 first=3 done=r:4:oIeW:AQI")
    now = leased(plain, Lease("7f3a", 1_767_225_600))
    assert now is not None
    assert noted(now).finished == ((5, 7),)
    one, then = TopicPartition("orders", 0), CommittedThen("orders", 0, *plain)

    assert list(moved({one: then}, {one: now})) == []
    assert list(moved({one: then}, {one: now._replace(offset=5)})) == ["orders/0: then 4, now 5"]
    assert list(moved({one: then}, {one: None})) == ["orders/0: then 4, now no commit"]
    assert leased(now, None) == plain


def test_no_text_is_longer_than_a_broker_stores() -> None:
    """Where there is hardly room any more beside what another program noted."""
    both = CommitMetadata.read("aioshard/1 done=r:420:KHVV:AQMGAQ", 420)
    most = 0
    for length in range(MOST_UNITS - 80, MOST_UNITS - 20):
        metadata = dataclasses.replace(both, foreign="x" * length)
        most = max(most, utf16_units(metadata.text(420)))

    assert most == MOST_UNITS
