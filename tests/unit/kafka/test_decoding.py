"""Our decoding of a fetch against aiokafka's own: the same records and positions, under any bounds."""

import struct
from collections.abc import Sequence
from typing import Any, Literal

from aiokafka.codec import has_lz4, has_snappy, has_zstd
from aiokafka.consumer.fetcher import FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record.default_records import DefaultRecordBatchBuilder
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

HERE = TopicPartition("topic", 3)
Header = tuple[str, bytes | None]
Content = tuple[bytes | None, bytes | None, list[Header]]

READ_COMMITTED = 1
ATTRIBUTES_AT = 21
CRC_AT = 17


def batch(
    base: int,
    contents: Sequence[Content],
    *,
    codec: int = 0,
    producer: int = -1,
    transactional: bool = False,
    gap: int = 0,
) -> bytes:
    """A batch as a broker keeps it; *gap* offsets at its end hold nothing."""
    builder = DefaultRecordBatchBuilder(2, codec, int(transactional), producer, 0, 0, 1 << 20)
    for number, (key, value, headers) in enumerate(contents):
        assert builder.append(number, 1_700_000_000_000 + number, key, value, headers) is not None
    raw = bytearray(builder.build())
    struct.pack_into(">q", raw, 0, base)
    if gap:
        struct.pack_into(">i", raw, 23, len(contents) - 1 + gap)
    return with_checksum(raw)


def control(base: int, producer: int, kind: Literal["abort", "commit"]) -> bytes:
    """The marker that ends a transaction."""
    key = struct.pack(">hh", 0, 0 if kind == "abort" else 1)
    raw = bytearray(batch(base, [(key, struct.pack(">hi", 0, 0), [])], producer=producer, transactional=True))
    (attributes,) = struct.unpack_from(">h", raw, ATTRIBUTES_AT)
    struct.pack_into(">h", raw, ATTRIBUTES_AT, attributes | 0x20)
    return with_checksum(raw)


def with_checksum(raw: bytearray) -> bytes:
    from aiokafka.record.util import calc_crc32c  # noqa: PLC0415

    struct.pack_into(">I", raw, CRC_AT, calc_crc32c(bytes(raw[ATTRIBUTES_AT:])))
    return bytes(raw)


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
    return Chunk(HERE, result)


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
    told = corrupt_record(part.error, HERE, part.next_offset)
    assert isinstance(told, CorruptRecordError)
    assert "offset 5 of topic/3" in str(told)
    assert "pip install" in str(told)
