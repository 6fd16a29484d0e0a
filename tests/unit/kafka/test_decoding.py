"""Our decoding of a fetch against aiokafka's own: the same records and positions, under any bounds."""

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka.codec import has_lz4, has_snappy, has_zstd
from aiokafka.consumer.fetcher import FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition as TheirTopicPartition
from hypothesis import assume, given
from hypothesis import strategies as st

from aioshard.errors import CorruptRecordError
from aioshard.kafka.aiokafka.answers import corrupt_record
from aioshard.kafka.aiokafka.decoder import Chunk
from aioshard.ports import record_size
from aioshard.records import Record, TopicPartition
from tests.support.batches import ATTRIBUTES_AT, batch, control, with_checksum
from tests.support.misnamed import batch_of

HERE = TopicPartition("topic", 3)

READ_COMMITTED = 1


def partition_records(raw: bytes, start: int, aborted: Sequence[tuple[int, int]]) -> Any:
    records = MemoryRecords(raw)
    check_crcs = True
    return PartitionRecords(
        TheirTopicPartition(*HERE), records, list(aborted), start, None, None, check_crcs, READ_COMMITTED
    )


def chunk(raw: bytes, start: int = 0, aborted: Sequence[tuple[int, int]] = ()) -> Chunk:
    result = FetchResult(
        TheirTopicPartition(*HERE), assignment=None, partition_records=partition_records(raw, start, aborted), backoff=0
    )
    return Chunk(HERE, result, raw)


def expected(raw: bytes, start: int = 0, aborted: Sequence[tuple[int, int]] = ()) -> tuple[list[Record], int]:
    theirs = partition_records(raw, start, aborted)
    records = [
        Record(
            r.topic,
            r.partition,
            r.offset,
            r.key,
            r.value,
            tuple(r.headers),
            (-1 if r.timestamp is None else r.timestamp) / 1000,
        )
        for r in theirs
    ]
    return records, theirs.next_fetch_offset


def drain(part: Chunk, bounds: Sequence[tuple[int, int]]) -> list[Record]:
    """Take everything, under each of *bounds* in turn and without any in between; check every step."""
    found: list[Record] = []
    number = 0
    while not part.drained and part.error is None:
        limit, room = bounds[number % len(bounds)] if number % 2 and bounds else (7, 1 << 40)
        number += 1
        before = part.next_offset
        records, sizes = part.take(limit, room, alone=False)
        assert len(records) <= limit
        assert sum(sizes) <= room
        assert sizes == [record_size(r.key, r.value, r.headers) for r in records]
        assert all(before <= r.offset < part.next_offset for r in records)
        assert bool(part.oversized) <= (not records)
        found += records
    return found


texts = st.none() | st.binary(max_size=40)
contents = st.lists(
    st.tuples(texts, texts, st.lists(st.tuples(st.text(max_size=5), texts), max_size=2)), min_size=1, max_size=6
)
bounds = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2000)), max_size=5)


@given(
    data=st.lists(
        st.tuples(
            contents,
            st.sampled_from([-1, 1, 2]),
            st.sampled_from(["plain", "commit", "abort"]),
            st.integers(0, 3),
            st.sampled_from([0, 1, 2, 3, 4]),
        ),
        max_size=6,
    ),
    bounds=bounds,
    start=st.integers(0, 6),
)
def test_any_log_decodes_like_aiokafka(data: Any, bounds: Any, start: int) -> None:
    raw, offset, aborted = b"", 0, []
    for inside, producer, kind, gap, codec in data:
        transactional = producer >= 0 and kind != "plain"
        raw += batch(offset, inside, codec=codec, producer=producer, transactional=transactional, gap=gap)
        if transactional and kind == "abort":
            aborted.append((producer, offset))
        offset += len(inside) + gap
        if transactional:
            raw += control(offset, producer, kind)
            offset += 1
    if data:
        assume(start < len(data[0][0]) + data[0][3])  # a broker leaves out what ends before the position
    records, end = expected(raw, start, aborted)
    part = chunk(raw, start, aborted)

    assert drain(part, bounds) == records
    assert part.error is None
    assert part.next_offset == end


def test_batches_from_before_kafka_0_11_decode_too() -> None:
    raw = b""
    for offset in range(4):
        builder = LegacyRecordBatchBuilder(1, 0, 1 << 16)
        builder.append(offset, 1_700_000_000_000, b"k", b"%d" % offset)
        raw += bytes(builder.build())
    records, end = expected(raw)
    part = chunk(raw)
    assert drain(part, [(1, 600)]) == records
    assert [record.offset for record in records] == [0, 1, 2, 3]
    assert part.next_offset == end == 4


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("bounds", [[], [(1, 600)]])
def test_a_record_whose_header_name_is_not_utf_8_is_decoded_and_marked(codec: int, bounds: Any) -> None:
    headers = [(b"a", b"1"), (b"\xff\xfe", None), (b"b\xff", b"2")]
    raw = batch_of([(b"0", [(b"a", b"1")]), (b"1", headers), (b"2", []), (b"3", [(b"\xff", b"")])], codec=codec)
    raw += batch(4, [(None, b"4", [("b", b"2")])])
    part = chunk(raw, 0)

    records = drain(part, bounds)

    assert [record.value for record in records] == [b"0", b"1", b"2", b"3", b"4"]
    assert [record.timestamp for record in records[:2]] == [1_700_000_000.0, 1_700_000_000.001]
    assert records[1].headers == (("a", b"1"), ("\udcff\udcfe", None), ("b\udcff", b"2"))
    assert (part.error, part.next_offset, sorted(part.undecodable)) == (None, 5, [1, 3])


def test_a_header_name_that_is_not_utf_8_stops_the_decoding_if_the_bytes_are_unknown() -> None:
    raw = batch_of([(b"0", []), (b"1", [(b"\xff", b"")])])
    result = FetchResult(
        TheirTopicPartition(*HERE), assignment=None, partition_records=partition_records(raw, 0, ()), backoff=0
    )
    part = Chunk(HERE, result, data=raw[:-1])

    records, _ = part.take(10, 1 << 20, alone=False)

    assert [record.value for record in records] == [b"0"]
    assert (type(part.error), part.next_offset) == (UnicodeDecodeError, 1)


def test_every_codec_is_installed() -> None:
    assert has_snappy()
    assert has_lz4()
    assert has_zstd()


def test_a_record_that_does_not_fit_stays_at_the_position() -> None:
    part = chunk(batch(10, [(None, bytes(10), []), (None, bytes(1000), []), (None, bytes(10), [])]), start=10)

    first, _ = part.take(10, 600, alone=False)
    assert ([r.offset for r in first], part.oversized, part.next_offset) == ([10], 0, 11)
    for _ in range(1000):  # however often it is asked for
        again, _ = part.take(10, 600, alone=False)
        assert (again, part.oversized, part.next_offset) == ([], 1500, 11)
    alone, _ = part.take(10, 600, alone=True)
    assert ([r.offset for r in alone], part.next_offset) == ([11], 12), "nothing else with it"
    last, _ = part.take(10, 600, alone=False)
    assert ([r.offset for r in last], part.next_offset, part.drained) == ([12], 13, True)


def test_alone_admits_one_large_record_or_fills_the_room() -> None:
    part = chunk(batch(0, [(None, bytes(10), [])] * 5))
    taken, _ = part.take(10, 1600, alone=True)
    assert len(taken) == 3


def test_decoding_stops_before_a_damaged_batch() -> None:
    good = batch(0, [(None, b"good", [])] * 3)
    bad = bytearray(batch(3, [(None, b"bad", [])] * 3))
    bad[-1] ^= 1
    part = chunk(good + bytes(bad) + batch(6, [(None, b"later", [])]))

    taken, _ = part.take(100, 1 << 20, alone=False)

    assert [r.value for r in taken] == [b"good"] * 3
    assert part.next_offset == 3
    assert isinstance(part.error, CorruptRecordException)
    assert not part.drained


def test_a_batch_damaged_midway_keeps_the_records_before() -> None:
    raw = bytearray(batch(0, [(None, b"one", []), (None, b"two", [])]))
    struct.pack_into(">i", raw, 57, 5)  # it says to hold five records
    part = chunk(with_checksum(raw))

    taken, _ = part.take(100, 1 << 20, alone=False)

    assert [r.value for r in taken] == [b"one", b"two"]
    assert part.next_offset == 2
    assert isinstance(part.error, CorruptRecordException)


def test_a_missing_codec_is_named_with_a_fix() -> None:
    raw = bytearray(batch(5, [(None, b"v", [])]))
    struct.pack_into(">h", raw, ATTRIBUTES_AT, 7)
    part = chunk(with_checksum(raw), start=5)

    assert part.take(1, 1 << 20, alone=False) == ([], [])

    assert isinstance(part.error, UnsupportedCodecError)
    error = corrupt_record(part.error, HERE, part.next_offset)
    assert isinstance(error, CorruptRecordError)
    assert "offset 5 of topic/3" in str(error)
    assert "pip install" in str(error)
