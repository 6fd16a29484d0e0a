"""The meaning of answers about a partition: every error code, positions that left the log, answers that come late."""

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.errors import AuthorizationError, CorruptRecordError
from aioshard.kafka.wire.epochs import EpochStart, Position
from aioshard.kafka.wire.fetch_answers import (
    Deliver,
    Diverged,
    Faulted,
    FetchDecision,
    InFlight,
    LeaderHint,
    OutOfRange,
    Redirect,
    Retry,
    Standstill,
    Step,
    belongs,
    decide_fetch,
)
from aioshard.kafka.wire.fetch_session import PartitionRequest
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import FETCH
from aioshard.records import TopicPartition

HERE = TopicPartition("topic", 3)
ID = uuid.UUID(int=1)
LEADER, FOLLOWER, OTHER, UNSEEN = 1, 2, 3, 9
BROKERS = [LEADER, FOLLOWER, OTHER]
ALL_CODES = [*range(-1, 134), 999, 32_767]


def encoded(api: Api, version: int, response: Any) -> Any:
    """Send a response as bytes, and decode it as a client does."""
    out = bytearray()
    api._responses.codec(version, flexible=True).encode(out, response)
    return api.decode(version, bytes(out))


def part(error: int = 0, **values: Any) -> Any:
    """The part of a partition in a Fetch response."""
    fields = {
        "partition": 3,
        "error": error,
        "high_watermark": -1 if error else 100,
        "stable_end": -1 if error else 90,
        "log_start": -1 if error else 10,
        "diverging": None,
        "leader": None,
        "aborted": None,
        "preferred": -1,
        "records": None,
    }
    topic = {"id": ID, "partitions": [{**fields, **values}]}
    response = encoded(FETCH, 17, {"throttle_ms": 0, "error": 0, "session": 0, "topics": [topic], "endpoints": None})
    return response.topics[0].partitions[0]


def decided(answer: Any, *, node: int = LEADER, fetched_epoch: int = -1, leader_epoch: int = 5) -> FetchDecision:
    request = PartitionRequest(ID, 50, leader_epoch, fetched_epoch)
    return decide_fetch(HERE, answer, request, node=node, leader=LEADER, brokers=BROKERS)


# Codes of Fetch ---------------------------------------------------------------------------

METADATA = {3, 5, 6, 9, 56, 74, 100, 103}
FAULTS = {2, 29, 76}
WITH_NEW_LEADER = {6, 74}


@pytest.mark.parametrize("node", [LEADER, FOLLOWER])
@pytest.mark.parametrize("fetched_epoch", [-1, 4])
@pytest.mark.parametrize("code", ALL_CODES)
def test_every_code_of_a_fetch(code: int, fetched_epoch: int, node: int) -> None:
    decision = decided(part(code), node=node, fetched_epoch=fetched_epoch)

    if code == 0:
        assert decision == Deliver(b"", (), 100, 90, 10, node == LEADER)
    elif code == 1 and node == FOLLOWER:
        assert decision == Retry(Step.LEADER, 1), "a follower that is behind says the same"
    elif code == 1 and fetched_epoch >= 0:
        assert decision == Retry(Step.WITHOUT_EPOCH, 1), "a leader that does not know the epoch says the same"
    elif code == 1:
        assert decision == OutOfRange(50)
    elif code in FAULTS:
        assert isinstance(decision, Faulted)
        assert decision.code == code
        assert isinstance(decision.error, AuthorizationError if code == 29 else CorruptRecordError)
        assert ("'topic'" if code == 29 else "offset 50 of topic/3") in str(decision.error)
    elif code in METADATA:
        assert decision == Retry(Step.METADATA, code)
    else:
        assert decision == Retry(Step.WAIT, code)


@pytest.mark.parametrize(
    ("node", "epoch", "is_newer"),
    [(OTHER, 6, True), (UNSEEN, 6, True), (OTHER, 5, False), (OTHER, 4, False), (-1, 6, False)],
)
def test_a_newer_leader_in_an_error_is_taken(node: int, epoch: int, *, is_newer: bool) -> None:
    for code in ALL_CODES:
        decision = decided(part(code, leader={"node": node, "epoch": epoch}))
        hint = LeaderHint(node, epoch) if is_newer and code in WITH_NEW_LEADER else None
        assert getattr(decision, "leader", None) == hint


def test_any_leader_is_newer_than_one_without_an_epoch() -> None:
    answer = part(6, leader={"node": OTHER, "epoch": 0})
    assert decided(answer, leader_epoch=-1) == Retry(Step.METADATA, 6, LeaderHint(OTHER, 0))


@pytest.mark.parametrize(("version", "code"), [(11, 6), (12, 0)])
def test_answers_of_older_versions_are_understood(version: int, code: int) -> None:
    old = {
        "partition": 3,
        "error": code,
        "high_watermark": 100,
        "stable_end": 90,
        "log_start": 10,
        "diverging": None,
        "leader": None,
        "aborted": [{"producer": 7, "first": 20}],
        "preferred": -1,
        "records": b"records",
    }
    out = bytearray()
    flexible = FETCH.is_flexible(version)
    topic = {"topic": "topic", "partitions": [old]}
    response = {"throttle_ms": 0, "error": 0, "session": 0, "topics": [topic]}
    FETCH._responses.codec(version, flexible=flexible).encode(out, response)
    answer = FETCH.decode(version, bytes(out)).topics[0].partitions[0]
    if code:
        assert decided(answer) == Retry(Step.METADATA, 6)
    else:
        assert decided(answer) == Deliver(b"records", [(7, 20)], 100, 90, 10, True)  # noqa: FBT003


# Success ----------------------------------------------------------------------------------


def test_ends_that_are_unknown_are_no_offsets() -> None:
    answer = part(high_watermark=-1, stable_end=-1, log_start=-1)
    assert decided(answer) == Deliver(b"", (), None, None, None, True)  # noqa: FBT003


def test_a_nearer_replica_is_used_if_we_know_it() -> None:
    assert decided(part(preferred=FOLLOWER)) == Redirect(FOLLOWER)
    assert decided(part(preferred=UNSEEN)) == Retry(Step.METADATA, 0), "else nobody would fetch the partition"
    assert isinstance(decided(part(preferred=LEADER)), Deliver), "it is the one that answered"
    assert isinstance(decided(part(preferred=-1), node=FOLLOWER), Deliver), "the follower goes on"


def test_a_diverging_epoch_moves_the_position() -> None:
    answer = part(diverging={"epoch": 4, "end": 30})
    assert decided(answer, fetched_epoch=4) == Diverged(Position(30, 4), 50, proven=True)
    assert isinstance(decided(answer, fetched_epoch=-1), Deliver), "nothing was compared"


def test_a_follower_that_is_behind_has_not_lost_anything() -> None:
    answer = part(diverging={"epoch": 4, "end": 30})
    assert decided(answer, fetched_epoch=4, node=FOLLOWER) == Retry(Step.LEADER, 0)


def test_an_older_epoch_moves_the_epoch_of_the_position() -> None:
    """Otherwise the broker would report the same for ever, although it has the offset."""
    answer = part(diverging={"epoch": 3, "end": 80})
    assert decided(answer, fetched_epoch=4) == Diverged(Position(50, 3), 50, proven=False)


def test_what_was_read_of_epochs_that_the_leader_lacks_is_read_again() -> None:
    answer = part(diverging={"epoch": 3, "end": 80})
    request = PartitionRequest(ID, 50, 5, 4)
    read = [EpochStart(0, 2), EpochStart(20, 3), EpochStart(40, 4)]
    decision = decide_fetch(HERE, answer, request, node=LEADER, leader=LEADER, brokers=BROKERS, read=read)
    assert decision == Diverged(Position(40, 3), 40, proven=False)


@pytest.mark.parametrize(("epoch", "end"), [(-1, 30), (4, -1), (-1, -1), (4, 50), (4, 60), (5, 30)])
def test_a_diverging_epoch_that_says_nothing_is_not_asked_for_again(epoch: int, end: int) -> None:
    answer = part(diverging={"epoch": epoch, "end": end})
    assert decided(answer, fetched_epoch=4) == Retry(Step.WITHOUT_EPOCH, 0)


@given(
    epoch=st.integers(-2, 8),
    end=st.integers(-2, 120),
    offset=st.integers(0, 100),
    fetched_epoch=st.integers(0, 6),
    starts=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 6)), max_size=4),
)
def test_a_diverging_epoch_always_leads_elsewhere_and_never_forward(
    epoch: int, end: int, offset: int, fetched_epoch: int, starts: list[tuple[int, int]]
) -> None:
    answer = part(diverging={"epoch": epoch, "end": end})
    request = PartitionRequest(ID, offset, 7, fetched_epoch)
    read = [EpochStart(*start) for start in sorted(starts)]
    decision = decide_fetch(HERE, answer, request, node=LEADER, leader=LEADER, brokers=BROKERS, read=read)
    if isinstance(decision, Diverged):
        assert decision.position < (offset, fetched_epoch)
        assert decision.position.offset <= min(offset, end)
        assert decision.position.epoch <= fetched_epoch
        assert decision.position.offset >= 0
        assert decision.lost_until == (offset if end < offset else decision.position.offset)
    else:
        assert decision == Retry(Step.WITHOUT_EPOCH, 0)


# Late answers -----------------------------------------------------------------------------

SENT = InFlight(ownership=3, offset=50, fetched_epoch=4, leader_epoch=5, session=2)


@pytest.mark.parametrize("changed", InFlight._fields)
def test_an_answer_does_not_belong_to_a_partition_that_has_changed(changed: str) -> None:
    now = SENT._replace(**{changed: getattr(SENT, changed) + 1})
    assert not belongs(SENT, now)
    assert not belongs(now, SENT)
    assert not belongs(SENT, None)
    assert belongs(SENT, InFlight(*SENT))


# Standstill -------------------------------------------------------------------------------


def test_the_third_answer_that_moves_nothing_is_reported() -> None:
    standstill = Standstill()
    waited = Retry(Step.WAIT, 0)
    assert standstill.note(HERE, 50, 1000, moved=False) == waited
    assert standstill.note(HERE, 50, 1000, moved=False) == waited
    third = standstill.note(HERE, 50, 1000, moved=False)
    assert isinstance(third, Faulted)
    assert "offset 50 of topic/3" in str(third.error)
    assert "3 answers in a row" in str(third.error)
    assert isinstance(standstill.note(HERE, 50, 1000, moved=False), Faulted), "as long as it lasts"

    assert standstill.note(HERE, 51, 1000, moved=True) is None
    assert standstill.note(HERE, 51, 1000, moved=False) == waited


def test_answers_without_data_do_not_count() -> None:
    standstill = Standstill()
    waited = Retry(Step.WAIT, 0)
    for _ in range(5):
        assert standstill.note(HERE, 50, 0, moved=False) is None
    assert standstill.note(HERE, 50, 10, moved=False) == waited
    assert standstill.note(HERE, 50, 0, moved=False) is None
    assert standstill.note(HERE, 50, 10, moved=False) == waited
    assert isinstance(standstill.note(HERE, 50, 10, moved=False), Faulted)
