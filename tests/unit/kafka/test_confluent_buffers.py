"""The buffers between the client and the engine: what is read, held, dropped and fetched again."""

from typing import Any

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from aioshard.errors import OffsetOutOfRangeError, StateError
from aioshard.kafka.confluent.buffers import Buffers
from aioshard.kafka.confluent.consumer import Change
from aioshard.ports import Allowance, Fault, FetchedBatch, Oversized
from aioshard.records import TopicPartition

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
SIZE = 500 + 10
"""Of a record with a value of ten bytes."""


class Sent:
    """A message as the client hands it out."""

    def __init__(self, at: TopicPartition, offset: int, error: int | None = None, size: int = 10) -> None:
        self._at = at
        self._offset = offset
        self._error = None if error is None else KafkaError(error)
        self._size = size

    def topic(self) -> str:
        return self._at.topic

    def partition(self) -> int:
        return self._at.partition

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return self._error

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return bytes(self._size)

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return (1, 5_000)


def sent(at: TopicPartition, *offsets: int) -> list[Any]:
    return [Sent(at, offset) for offset in offsets]


def everything(_: TopicPartition) -> Allowance:
    return Allowance(1_000, 1 << 30)


def reading(*names: TopicPartition, share: int = 1 << 20) -> Buffers:
    """Buffers of a client that reads *names*, from 0."""
    buffers = Buffers(share)
    buffers.add(names)
    for name in names:
        buffers.seek(name, 0)
    buffers.resume(names)
    assert sorted(buffers.changes(0.0)) == sorted(Change(name, 0) for name in names)
    return buffers


def offsets(found: Any) -> list[int]:
    return [record.offset for batch in found.new if isinstance(batch, FetchedBatch) for record in batch.records]


def test_nothing_is_fetched_before_the_engine_has_seeked_and_resumed() -> None:
    buffers = Buffers(1 << 20)
    buffers.add([ONE])

    assert buffers.changes(0.0) == []
    assert buffers.position(ONE) is None
    with pytest.raises(StateError, match="before it was seeked"):
        buffers.resume([ONE])
    buffers.seek(ONE, 7)
    assert buffers.changes(0.0) == []
    buffers.resume([ONE])
    assert buffers.changes(0.0) == [Change(ONE, 7)]


def test_records_read_before_a_seek_took_effect_are_dropped() -> None:
    buffers = reading(ONE)
    buffers.accept(sent(ONE, 0, 1), 0.0)
    buffers.seek(ONE, 40)
    buffers.accept(sent(ONE, 2, 41), 0.0)

    assert buffers.take(everything).new == []
    assert buffers.changes(0.0) == [Change(ONE, 40)]
    buffers.accept(sent(ONE, 40, 41), 0.0)
    assert offsets(buffers.take(everything)) == [40, 41]


def test_a_failed_change_is_retried() -> None:
    buffers = reading(ONE)
    buffers.not_changed(Change(ONE, 0))

    buffers.accept(sent(ONE, 5), 0.0)
    assert buffers.take(everything).new == []
    assert buffers.changes(0.0) == [Change(ONE, 0)]


def test_kept_partitions_resume_at_once_and_keep_their_buffers() -> None:
    """The client fetches nothing of it until the rebalance is over, and is slow to begin again unless it is sent."""
    buffers = reading(ONE, TWO)
    buffers.accept(sent(ONE, 0, 1), 0.0)
    buffers.remove([TWO])
    assert buffers.changes(0.0) == [Change(ONE, 2)]

    buffers.add([TWO])
    assert buffers.changes(0.0) == [Change(ONE, 2)]
    buffers.accept(sent(ONE, 2), 0.0)
    assert offsets(buffers.take(everything)) == [0, 1, 2]
    assert buffers.changes(0.0) == []


def test_a_paused_partition_keeps_its_buffer_and_resumes_after_it() -> None:
    buffers = reading(ONE)
    buffers.accept(sent(ONE, 0, 1, 2), 0.0)
    buffers.pause([ONE])
    assert buffers.take(everything).new == []
    assert buffers.changes(0.0) == [Change(ONE, None)]

    buffers.resume([ONE])
    assert buffers.changes(0.0) == [Change(ONE, 3)]
    assert offsets(buffers.take(everything)) == [0, 1, 2]
    assert buffers.position(ONE) == 3


def test_a_full_buffer_soon_stops_only_its_partition() -> None:
    buffers = reading(ONE, TWO, share=3 * SIZE)
    buffers.accept(sent(ONE, 0, 1, 2) + sent(TWO, 0), 1.0)

    assert buffers.crowded(1.0) > 0.1, "the engine may be about to take it"
    assert buffers.changes(1.1) == []
    assert buffers.crowded(2.0) == 0
    assert buffers.changes(2.0) == [Change(ONE, None)]
    assert buffers.crowded(2.0) == 0, "one that is not fetched keeps nobody waiting"


def test_a_full_buffer_hardly_delays_an_empty_partition() -> None:
    buffers = reading(ONE, TWO, share=3 * SIZE)
    buffers.accept(sent(ONE, 0, 1, 2), 1.0)

    assert buffers.crowded(1.03) == 0
    assert buffers.changes(1.03) == [Change(ONE, None)]


def test_a_partition_is_fetched_again_when_half_of_its_share_is_free() -> None:
    buffers = reading(ONE, share=4 * SIZE)
    buffers.accept(sent(ONE, 0, 1, 2, 3), 1.0)
    assert buffers.changes(2.0) == [Change(ONE, None)]

    assert offsets(buffers.take(lambda _: Allowance(2, 1 << 20))) == [0, 1]
    assert buffers.changes(2.0) == []
    assert offsets(buffers.take(lambda _: Allowance(1, 1 << 20))) == [2]
    assert buffers.changes(2.0) == [Change(ONE, 4)]


def test_the_end_of_the_log_moves_a_position_over_holes() -> None:
    buffers = reading(ONE)
    buffers.accept([*sent(ONE, 0), Sent(ONE, 9, KafkaError._PARTITION_EOF)], 0.0)

    [batch] = buffers.take(everything).new
    assert isinstance(batch, FetchedBatch)
    assert batch.next_offset == 9
    buffers.accept([Sent(ONE, 12, KafkaError._PARTITION_EOF)], 0.0)
    assert buffers.take(everything).new == [FetchedBatch(ONE, (), (), 12)]
    assert (buffers.position(ONE), buffers.end_offset(ONE)) == (12, 12)


def test_the_end_of_the_log_moves_no_position_back() -> None:
    """The records before the position were handed out."""
    buffers = reading(ONE)
    buffers.accept([*sent(ONE, 0, 1, 2), Sent(ONE, 1, KafkaError._PARTITION_EOF)], 0.0)

    [batch] = buffers.take(everything).new
    assert isinstance(batch, FetchedBatch)
    assert batch.next_offset == 3
    assert buffers.take(everything).new == []
    assert (buffers.position(ONE), buffers.end_offset(ONE)) == (3, 3)


def test_an_unreadable_partition_is_reported_once_and_retried_later() -> None:
    buffers = reading(ONE)
    buffers.accept([*sent(ONE, 0), Sent(ONE, 1, KafkaError.OFFSET_OUT_OF_RANGE)], 1.0)

    assert offsets(buffers.take(everything)) == [0]
    [fault] = buffers.take(everything).new
    assert isinstance(fault, Fault)
    assert isinstance(fault.error, OffsetOutOfRangeError)
    assert fault.error.position == 1
    assert buffers.take(everything).new == []
    assert buffers.changes(1.5) == [Change(ONE, None)]
    assert buffers.changes(2.1) == [Change(ONE, 1, reassign=True)], "the client has given up on it"


def test_the_end_of_the_log_does_not_move_a_faulted_position() -> None:
    """The end is reported after records that the fault kept from being handed out."""
    buffers = reading(ONE)
    fault = Sent(ONE, 11, KafkaError._VALUE_DESERIALIZATION)
    buffers.accept([*sent(ONE, 9, 10), fault, *sent(ONE, 11, 12), Sent(ONE, 13, KafkaError._PARTITION_EOF)], 1.0)

    assert offsets(buffers.take(everything)) == [9, 10]
    assert [type(found) for found in buffers.take(everything).new] == [Fault]
    assert buffers.position(ONE) == 11
    assert buffers.changes(1.5) == [Change(ONE, None)]
    assert buffers.changes(2.1) == [Change(ONE, 11)]
    buffers.accept(sent(ONE, 11, 12), 2.2)
    assert offsets(buffers.take(everything)) == [11, 12]


def test_a_partition_that_delivers_nothing_of_its_log_for_ten_seconds_is_reassigned() -> None:
    buffers = reading(ONE, TWO)
    buffers.note_end(ONE, 1)
    buffers.note_end(TWO, 0)

    assert buffers.changes(9.9) == []
    assert buffers.changes(10.0) == [Change(ONE, 0, reassign=True)], "the other one is at its end"
    assert buffers.changes(19.9) == []

    buffers.accept(sent(ONE, 0), 15.0)
    buffers.note_end(ONE, 2)
    assert offsets(buffers.take(everything)) == [0]
    assert buffers.changes(24.9) == []
    assert buffers.changes(25.0) == [Change(ONE, 1, reassign=True)]


def test_an_abandoned_partition_is_reassigned_after_another_fault() -> None:
    """A seek alone would be lost on it."""
    buffers = reading(ONE)
    gone, refused = Sent(ONE, 0, KafkaError.OFFSET_OUT_OF_RANGE), Sent(ONE, 0, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    buffers.accept([gone, refused], 1.0)

    assert buffers.changes(2.1) == [Change(ONE, 0, reassign=True)]


def test_a_record_that_does_not_fit_counts_as_new_once() -> None:
    buffers = reading(ONE)
    buffers.accept([Sent(ONE, 0, size=1_000)], 0.0)

    found = buffers.take(lambda _: Allowance(5, 700))
    again = buffers.take(lambda _: Allowance(5, 700))
    alone = buffers.take(lambda _: Allowance(5, 700, alone=True))

    assert (found.new, found.repeated) == ([Oversized(ONE, 1_500)], [])
    assert (again.new, again.repeated) == ([], [Oversized(ONE, 1_500)])
    assert offsets(alone) == [0]


def test_errors_of_foreign_partitions_are_returned() -> None:
    buffers = reading(ONE)
    other = Sent(TWO, 0, KafkaError.UNKNOWN_TOPIC_OR_PART)

    assert buffers.accept([other, *sent(TWO, 0), *sent(ONE, 0)], 0.0) == [other]
    assert offsets(buffers.take(everything)) == [0]


def test_records_before_the_position_are_skipped() -> None:
    """A broker returns whole batches."""
    buffers = reading(ONE)
    buffers.seek(ONE, 5)
    buffers.changes(0.0)

    buffers.accept(sent(ONE, 3, 4, 5, 6), 0.0)

    assert offsets(buffers.take(everything)) == [5, 6]


def test_a_revoked_partition_returns_nothing() -> None:
    buffers = reading(ONE, TWO)
    buffers.accept(sent(ONE, 0, 1) + sent(TWO, 0), 0.0)

    buffers.remove([ONE])

    assert [batch.topic_partition for batch in buffers.take(everything).new] == [TWO]


names = st.sampled_from([ONE, TWO])
operations = st.one_of(
    st.tuples(st.just("accept"), st.lists(st.tuples(names, st.integers(0, 1500)), max_size=12)),
    st.tuples(st.just("take"), st.tuples(st.integers(0, 5), st.integers(0, 3000))),
    st.tuples(st.just("seek"), st.tuples(names, st.integers(0, 30))),
    st.tuples(st.just("fail"), names),
    st.tuples(st.just("reassign"), names),
    st.tuples(st.just("pause"), names),
)


@given(st.lists(operations, max_size=25))
def test_a_buffer_is_full_when_the_sizes_of_its_records_add_up_to_its_share(steps: Any) -> None:
    buffers = reading(ONE, TWO, share=2000)
    next_offsets = {ONE: 0, TWO: 0}
    for now, (operation, arguments) in enumerate(steps):
        if operation == "accept":
            messages = []
            for name, size in arguments:
                messages.append(Sent(name, next_offsets[name], size=size))
                next_offsets[name] += 1
            buffers.accept(messages, float(now))
        elif operation == "take":
            records, size = arguments
            buffers.take(lambda _, records=records, size=size: Allowance(records, size))  # type: ignore[misc]
        elif operation == "seek":
            name, offset = arguments
            buffers.seek(name, offset)
            next_offsets[name] = offset
        elif operation == "fail":
            buffers.accept([Sent(arguments, next_offsets[arguments], KafkaError._ALL_BROKERS_DOWN)], float(now))
        elif operation == "reassign":
            buffers.remove([arguments])
            buffers.add([arguments])
            buffers.seek(arguments, 0)
            buffers.resume([arguments])
            next_offsets[arguments] = 0
        elif operation == "pause":
            buffers.pause([arguments])
            buffers.resume([arguments])
        buffers.changes(float(now))
        for partition in buffers._partitions.values():
            assert partition.bytes == sum(partition.sizes)
            assert len(partition.sizes) == len(partition.records)
