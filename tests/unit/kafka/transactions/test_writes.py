"""The batches of one transaction: what is sent again, what is refused, and what ends it."""

from collections.abc import Sequence

import pytest
from aiokafka.record.default_records import DefaultRecordBatch

from aioshard.errors import MessageRefusedError
from aioshard.kafka.batches import Identity
from aioshard.kafka.produce import NotSentError
from aioshard.kafka.transactions.identity import TransactionalId, Version
from aioshard.kafka.transactions.writes import PartitionWrites, Writes, by_leader
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import ConnectionLostError, IncompleteResponseError, WireError
from aioshard.ports import Message
from aioshard.records import TopicPartition

OUT, OTHER = TopicPartition("out", 0), TopicPartition("out", 1)
NOW = 1_000.0
LOST = ConnectionLostError("lost")


def opened(values: Sequence[bytes] = (b"a", b"b", b"c", b"d")) -> tuple[Writes, TransactionalId, PartitionWrites]:
    """Messages of one partition in an open transaction, with the first batch built."""
    transactional = TransactionalId("group:1")
    transactional.renew(Identity(7, 2), Version.SECOND)
    transactional.begin()
    writes = Writes([Message("out", value) for value in values], NOW)
    for index in range(len(values)):
        writes.assign(index, OUT)
    (part,) = writes.pending
    writes.next_batch(part, transactional)
    return writes, transactional, part


def read(data: bytes | None) -> DefaultRecordBatch:
    assert data is not None
    return DefaultRecordBatch(bytearray(data))


def values_of(data: bytes | None) -> list[bytes]:
    return [record.value for record in read(data)]


def test_a_batch_belongs_to_the_transaction() -> None:
    writes, transactional, part = opened()

    batch = read(writes.next_batch(part, transactional))

    assert batch.is_transactional
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (7, 2, 0)
    assert [record.timestamp for record in batch] == [1_000_000] * 4


def test_stored_messages_are_done() -> None:
    writes, transactional, part = opened()

    writes.apply(part, transactional, None)

    assert not writes.pending
    assert transactional.sequence(OUT) == 4
    assert not writes.is_in_doubt


@pytest.mark.parametrize(
    "error", [LOST, IncompleteResponseError("left out"), error_for(7), error_for(20), error_for(6)]
)
def test_what_may_be_stored_is_sent_again_with_the_same_bytes(error: WireError) -> None:
    writes, transactional, part = opened()
    before = writes.next_batch(part, transactional)

    writes.apply(part, transactional, error)

    assert writes.is_in_doubt
    assert writes.next_batch(part, transactional) == before
    assert writes.pending == [part]


@pytest.mark.parametrize("later", [LOST, NotSentError("closed"), error_for(51), error_for(-1), error_for(2)])
def test_a_batch_in_doubt_keeps_its_bytes_whatever_a_later_attempt_hears(later: WireError) -> None:
    writes, transactional, part = opened()
    before = writes.next_batch(part, transactional)

    for error in (LOST, later):
        writes.apply(part, transactional, error)

    assert writes.next_batch(part, transactional) == before


@pytest.mark.parametrize("error", [NotSentError("closed"), error_for(51), error_for(19), error_for(14)])
def test_what_was_certainly_not_stored_leaves_no_doubt(error: WireError) -> None:
    writes, transactional, part = opened()

    writes.apply(part, transactional, error)

    assert not writes.is_in_doubt
    assert writes.pending == [part]
    assert writes.failure is None


@pytest.mark.parametrize("code", [35, 45, 47, 48, 49, 53, 59, 90, 120])
def test_some_codes_end_the_transaction(code: int) -> None:
    writes, transactional, part = opened()

    writes.apply(part, transactional, error_for(code))

    assert writes.failure is not None
    assert writes.failure.code == code
    assert not writes.refused


@pytest.mark.parametrize("code", [-1, 2])
def test_an_error_without_a_reason_ends_it_the_second_time(code: int) -> None:
    writes, transactional, part = opened()

    writes.apply(part, transactional, error_for(code))
    assert writes.failure is None
    assert writes.is_in_doubt
    writes.apply(part, transactional, error_for(code))

    assert writes.failure is not None


@pytest.mark.parametrize("code", [10, 18, 32, 44, 87])
@pytest.mark.parametrize("poison", range(4))
def test_the_message_to_blame_is_found_by_halving(code: int, poison: int) -> None:
    """The numbers of a refused batch are free, so its parts begin with them."""
    writes, transactional, part = opened()
    bad = writes.messages[poison].value
    stored: list[bytes] = []

    while writes.pending:
        data = writes.next_batch(part, transactional)
        assert read(data).base_sequence == len(stored)
        is_refused = bad in values_of(data)
        if not is_refused:
            stored += values_of(data)
        writes.apply(part, transactional, error_for(code) if is_refused else None)

    assert set(writes.refused) == {poison}
    assert isinstance(writes.refused[poison], MessageRefusedError)
    assert stored == [message.value for message in writes.messages if message.value != bad]
    assert writes.failure is None


def test_the_broker_names_the_messages_to_blame() -> None:
    writes, transactional, part = opened()

    writes.apply(part, transactional, error_for(87), blamed=[1, 3])

    assert set(writes.refused) == {1, 3}
    assert values_of(writes.next_batch(part, transactional)) == [b"a", b"c"]


def test_a_broker_that_names_no_record_of_the_batch_is_not_believed() -> None:
    writes, transactional, part = opened([b"a"])

    writes.apply(part, transactional, error_for(87), blamed=[7])

    assert set(writes.refused) == {0}


@pytest.mark.parametrize("code", [10, 29, 87])
def test_a_refusal_after_a_doubt_blames_no_message(code: int) -> None:
    """Perhaps the first attempt is stored, and its numbers are spent: only a new epoch helps."""
    writes, transactional, part = opened()
    writes.apply(part, transactional, LOST)

    writes.apply(part, transactional, error_for(code))

    assert writes.failure is not None
    assert not writes.refused


@pytest.mark.parametrize("code", [17, 29, 31, 43, 76])
def test_some_codes_refuse_each_message_of_the_partition(code: int) -> None:
    writes, transactional, part = opened([b"a", b"b", b"x" * 70_000])

    writes.apply(part, transactional, error_for(code))

    assert set(writes.refused) == {0, 1, 2}
    assert not writes.pending


def test_a_topic_can_be_refused_as_a_whole() -> None:
    writes, _, _ = opened()

    writes.refuse_topic("out", error_for(29, "out"))

    assert set(writes.refused) == {0, 1, 2, 3}
    assert not writes.pending


def test_what_cannot_be_encoded_is_refused_alone() -> None:
    transactional = TransactionalId("group:1")
    transactional.renew(Identity(7, 2), Version.SECOND)
    writes = Writes([Message("out", 5), Message("out", b"a")], NOW)  # type: ignore[arg-type]
    for index in range(2):
        writes.assign(index, OUT)
    (part,) = writes.pending

    data = writes.next_batch(part, transactional)

    assert set(writes.refused) == {0}
    assert values_of(data) == [b"a"]


def test_partitions_go_to_their_leaders() -> None:
    writes, _, part = opened()
    writes.assign(0, OTHER)
    other = next(found for found in writes.pending if found.name == OTHER)

    assert dict(by_leader(writes.pending, {OUT: 1, OTHER: 1})) == {1: [part, other]}
    assert dict(by_leader(writes.pending, {OUT: 1, OTHER: 2})) == {1: [part], 2: [other]}
    assert dict(by_leader(writes.pending, {OTHER: 2})) == {2: [other]}
