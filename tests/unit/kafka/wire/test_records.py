"""Chunks of a fetch: which records they deliver, how far the position moves, and at what they stop."""

import gzip
import random
import struct
import tracemalloc
import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import cramjam
import pytest
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from hypothesis import assume, given
from hypothesis import strategies as st

from aioshard.errors import CorruptRecordError
from aioshard.kafka.wire.epochs import EpochStart, epoch_before
from aioshard.kafka.wire.records import Chunk
from aioshard.ports import record_size
from aioshard.records import Record, TopicPartition
from tests.support.batches import (
    ATTRIBUTES_AT,
    COUNT_AT,
    CRC_AT,
    HEAD_SIZE,
    LAST_DELTA_AT,
    TIMESTAMP,
    Content,
    batch,
    control,
    emptied,
    with_checksum,
)
from tests.support.misnamed import batch_of

HERE = TopicPartition("topic", 3)
CODECS = [0, 1, 2, 3, 4]
ROOM = 1 << 40


def values(*texts: bytes) -> list[Content]:
    return [(None, text, []) for text in texts]


def take_all(chunk: Chunk) -> list[Record]:
    records, _ = chunk.take(1_000_000, ROOM, alone=False)
    return records


def offsets(records: Sequence[Record]) -> list[int]:
    return [record.offset for record in records]


# Any log ----------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A batch in a log, and what a reader must make of it."""

    raw: bytes
    base: int
    end: int
    epoch: int
    visible: tuple[Record, ...]


class Aborted(NamedTuple):
    producer: int
    first: int
    marker: int


Step = tuple[Literal["data", "abort", "commit"], list[Content], int, bool, int, int, int]
"""Kind, contents, producer, whether transactional, gap, codec, by how much the leader epoch rises."""


def log_of(steps: Sequence[Step]) -> tuple[list[Stored], list[Aborted]]:
    """Write a log. Transactions that are open at its end are aborted."""
    stored: list[Stored] = []
    aborted: list[Aborted] = []
    open_transactions: dict[int, tuple[int, list[int]]] = {}
    offset = epoch = 0

    def end_transaction(producer: int, kind: Literal["abort", "commit"]) -> None:
        nonlocal offset
        first, numbers = open_transactions.pop(producer)
        if kind == "abort":
            aborted.append(Aborted(producer, first, offset))
            for number in numbers:
                stored[number] = stored[number]._replace(visible=())
        stored.append(Stored(control(offset, producer, kind, epoch=epoch), offset, offset + 1, epoch, ()))
        offset += 1

    for kind, contents, producer, transactional, gap, codec, rise in steps:
        epoch += rise
        if kind != "data":
            if producer in open_transactions:
                end_transaction(producer, kind)
            continue
        if transactional:
            open_transactions.setdefault(producer, (offset, []))[1].append(len(stored))
        raw = batch(offset, contents, codec=codec, producer=producer, transactional=transactional, gap=gap, epoch=epoch)
        visible = tuple(
            Record(*HERE, offset + number, key, value, tuple(headers), (TIMESTAMP + number) / 1000)
            for number, (key, value, headers) in enumerate(contents)
        )
        end = offset + len(contents) + gap
        stored.append(Stored(raw, offset, end, epoch, visible))
        offset = end
    for producer in list(open_transactions):
        end_transaction(producer, "abort")
    return stored, aborted


optional_bytes = st.none() | st.binary(max_size=40)
contents_strategy: Any = st.lists(
    st.tuples(optional_bytes, optional_bytes, st.lists(st.tuples(st.text(max_size=5), optional_bytes), max_size=2)),
    min_size=1,
    max_size=6,
)
steps_strategy: Any = st.lists(
    st.tuples(
        st.sampled_from(["data", "data", "abort", "commit"]),
        contents_strategy,
        st.integers(1, 3),
        st.booleans(),
        st.integers(0, 2),
        st.sampled_from(CODECS),
        st.sampled_from([0, 0, 1, 3]),
    ),
    max_size=12,
)


@given(
    steps=steps_strategy,
    bounds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2000)), max_size=5),
    start=st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_any_log_gives_each_committed_record_once_in_order(
    steps: Sequence[Step], bounds: Sequence[tuple[int, int]], start: int, seed: int
) -> None:
    stored, aborted = log_of(steps)
    # A broker returns the batches from the one with the position on, and the transactions that end after it.
    answer = [each for each in stored if each.end > start]
    assume(answer)
    entries = [(each.producer, each.first) for each in aborted if each.marker >= start]
    random.Random(seed).shuffle(entries)
    expected = [record for each in answer for record in each.visible if record.offset >= start]
    chunk = Chunk(HERE, b"".join(each.raw for each in answer), start, aborted=entries)

    found: list[Record] = []
    number = 0
    while not chunk.drained:
        limit, room = bounds[number % len(bounds)] if number % 2 and bounds else (7, ROOM)
        number += 1
        before = chunk.next_offset
        records, sizes = chunk.take(limit, room, alone=False)
        assert chunk.error is None
        assert len(records) <= limit
        assert sum(sizes) <= room
        assert sizes == [record_size(record.key, record.value, record.headers) for record in records]
        assert all(before <= offset < chunk.next_offset for offset in offsets(records))
        assert chunk.next_offset >= before
        assert bool(chunk.oversized) <= (not records)
        if chunk.next_offset > max(start, answer[0].base):
            assert chunk.leader_epoch == next(each.epoch for each in answer if each.end >= chunk.next_offset)
        found += records

    assert found == expected
    assert chunk.next_offset == max(start, answer[-1].end)
    assert chunk.unpacked_bytes == 0
    for record in found:
        of_record = next(each.epoch for each in answer if each.base <= record.offset < each.end)
        assert epoch_before(chunk.epoch_starts, record.offset + 1) == of_record


@given(
    steps=steps_strategy,
    damages=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=3),
    mended=st.booleans(),
)
def test_damage_anywhere_neither_raises_nor_repeats_nor_rewinds(
    steps: Sequence[Step], damages: Sequence[tuple[int, int]], *, mended: bool
) -> None:
    """Also where the checksum covers nothing (offsets, lengths, epochs), and where it was computed over the damage."""
    stored, _ = log_of(steps)
    assume(stored)
    position = stored[0].base
    data = b""
    for number, each in enumerate(stored):
        raw = bytearray(each.raw)
        for at, flip in damages:
            if at % len(stored) == number:
                raw[at % len(raw)] ^= flip
        data += with_checksum(raw) if mended else bytes(raw)
    chunk = Chunk(HERE, data, position, unpack_limit=1 << 20)

    last = position - 1
    while not chunk.drained and chunk.error is None:
        before = chunk.next_offset
        for record in chunk.take(3, ROOM, alone=True)[0]:
            assert record.offset > last
            last = record.offset
        assert chunk.next_offset >= max(before, last + 1)
    assert chunk.take(3, ROOM, alone=True) == ([], [])


# What does not fit ------------------------------------------------------------------------


def test_a_record_that_does_not_fit_stays_at_the_position() -> None:
    raw = batch(10, values(bytes(10), bytes(1000), bytes(10)), epoch=4)
    chunk = Chunk(HERE, raw, 10)

    first, _ = chunk.take(10, 600, alone=False)
    assert (offsets(first), chunk.oversized, chunk.next_offset) == ([10], 0, 11)
    for _ in range(1000):  # however often it is asked for
        again, _ = chunk.take(10, 600, alone=False)
        assert (again, chunk.oversized, chunk.next_offset) == ([], 1500, 11)
    alone, _ = chunk.take(10, 600, alone=True)
    assert (offsets(alone), chunk.next_offset) == ([11], 12), "nothing else with it"
    last, _ = chunk.take(10, 600, alone=False)
    assert (offsets(last), chunk.next_offset, chunk.drained) == ([12], 13, True)


def test_alone_admits_one_large_record_or_fills_the_room() -> None:
    chunk = Chunk(HERE, batch(0, values(*[bytes(10)] * 5)), 0)
    taken, _ = chunk.take(10, 1600, alone=True)
    assert len(taken) == 3


def test_a_drained_chunk_gives_nothing_more() -> None:
    chunk = Chunk(HERE, batch(0, values(b"only")), 0)
    assert len(take_all(chunk)) == 1
    assert chunk.drained
    assert take_all(chunk) == []


# Old formats ------------------------------------------------------------------------------


def messages(magic: int, codec: int, numbers: Sequence[int]) -> bytes:
    """Messages with these offsets; compressed ones inside a wrapper."""
    builder = LegacyRecordBatchBuilder(magic, codec, 1 << 16)
    for number in numbers:
        builder.append(number, TIMESTAMP + number, b"k", b"%d" % number)
    return bytes(builder.build())


def at_offset(wrapper: bytes, offset: int, *, append_time: int | None = None) -> bytes:
    """A wrapper as a broker keeps it: with the offset of its last message, and its own time if it has one."""
    raw = bytearray(wrapper)
    struct.pack_into(">q", raw, 0, offset)
    if append_time is not None:
        raw[17] |= 8
        struct.pack_into(">q", raw, 18, append_time)
    struct.pack_into(">I", raw, 12, zlib.crc32(raw[16:]))
    return bytes(raw)


@pytest.mark.parametrize("magic", [0, 1])
def test_single_messages_from_before_kafka_0_11(magic: int) -> None:
    chunk = Chunk(HERE, messages(magic, 0, [5, 6, 9]), 6)

    records = take_all(chunk)

    time = -0.001 if magic == 0 else TIMESTAMP / 1000
    assert [(record.offset, record.value, record.headers) for record in records] == [(6, b"6", ()), (9, b"9", ())]
    assert records[0].timestamp == (time if magic == 0 else time + 0.006)
    assert (chunk.error, chunk.next_offset, chunk.leader_epoch) == (None, 10, -1)


@pytest.mark.parametrize(("magic", "codec"), [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)])
@pytest.mark.parametrize("start", [100, 101, 103])
def test_wrapped_messages_from_any_of_their_offsets(magic: int, codec: int, start: int) -> None:
    """Inside a wrapper, the offsets of magic 0 are absolute and those of magic 1 count from the first message."""
    numbers = [100, 101, 103] if magic == 0 else [0, 1, 3]
    raw = at_offset(messages(magic, codec, numbers), 103)
    raw += batch(104, values(b"new"), epoch=2)
    chunk = Chunk(HERE, raw, start)

    first, _ = chunk.take(1, ROOM, alone=False)
    if not chunk.drained and start < 103:
        assert chunk.unpacked_bytes == len(messages(magic, 0, numbers))
    records = first + take_all(chunk)

    assert offsets(records) == [offset for offset in (100, 101, 103, 104) if offset >= start]
    assert (chunk.error, chunk.next_offset, chunk.leader_epoch) == (None, 105, 2)


def test_all_formats_in_one_response() -> None:
    """The log of a topic that is older than its brokers; aiokafka alone reads every batch in the first one's format."""
    raws = {
        0: lambda offset: messages(0, 0, [offset]),
        1: lambda offset: at_offset(messages(1, 1, [0]), offset),
        2: lambda offset: batch(offset, values(b"%d" % offset), codec=offset % 5),
    }
    formats = [0, 0, 1, 1, 2, 2, 0, 2, 1, 0, 1, 2]
    chunk = Chunk(HERE, b"".join(raws[magic](offset) for offset, magic in enumerate(formats)), 0)
    records = take_all(chunk)
    assert chunk.error is None
    assert offsets(records) == list(range(len(formats)))
    assert [record.timestamp < 0 for record in records] == [magic == 0 for magic in formats]


def test_the_time_of_a_wrapper_counts_if_the_broker_set_it() -> None:
    chunk = Chunk(HERE, at_offset(messages(1, 1, [0, 1]), 7, append_time=5000), 0)
    assert [(record.offset, record.timestamp) for record in take_all(chunk)] == [(6, 5.0), (7, 5.0)]


def test_a_wrapper_below_the_position_is_not_unpacked() -> None:
    damaged = bytearray(at_offset(messages(1, 1, [0, 1]), 7))
    damaged[40:50] = bytes(10)
    chunk = Chunk(HERE, at_offset(bytes(damaged), 7), 8)
    assert take_all(chunk) == []
    assert chunk.stalled


def test_a_damaged_old_message_stops_the_decoding() -> None:
    raw = bytearray(messages(1, 0, [5, 6]))
    raw[-1] ^= 1
    chunk = Chunk(HERE, bytes(raw), 5)
    assert offsets(take_all(chunk)) == [5]
    assert "checksum" in str(chunk.error)


def test_timestamps_that_producers_left_out() -> None:
    raw = bytearray(batch(0, values(b"v")))
    struct.pack_into(">qq", raw, 27, -1, -1)
    (record,) = take_all(Chunk(HERE, with_checksum(raw), 0))
    assert record.timestamp == -0.001


# Header names -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("limit", [1, 100])
def test_a_record_whose_header_name_is_not_utf_8_is_decoded_and_marked(codec: int, limit: int) -> None:
    headers = [(b"a", b"1"), (b"\xff\xfe", None), (b"b\xff", b"2")]
    raw = batch_of([(b"0", [(b"a", b"1")]), (b"1", headers), (b"2", []), (b"3", [(b"\xff", b"")])], codec=codec)
    raw += batch(4, [(None, b"4", [("b", b"2")])])
    chunk = Chunk(HERE, raw, 0)

    records: list[Record] = []
    while not chunk.drained:
        records += chunk.take(limit, ROOM, alone=False)[0]

    assert [record.value for record in records] == [b"0", b"1", b"2", b"3", b"4"]
    assert [record.timestamp for record in records[:2]] == [1_700_000_000.0, 1_700_000_000.001]
    assert records[1].headers == (("a", b"1"), ("\udcff\udcfe", None), ("b\udcff", b"2"))
    assert (chunk.error, chunk.next_offset, sorted(chunk.undecodable)) == (None, 5, [1, 3])


def test_such_a_record_may_have_the_time_of_the_broker() -> None:
    raw = bytearray(batch_of([(b"0", [(b"\xff", b"1")])]))
    struct.pack_into(">h", raw, ATTRIBUTES_AT, 8)
    struct.pack_into(">q", raw, 35, 5000)
    (record,) = take_all(Chunk(HERE, with_checksum(raw), 0))
    assert record.timestamp == 5.0


def test_such_a_record_that_does_not_fit_comes_later() -> None:
    raw = batch_of([(b"0", []), (b"1", [(b"\xff", b"")]), (b"2", [])])
    chunk = Chunk(HERE, raw, 0)
    assert offsets(chunk.take(9, 501, alone=False)[0]) == [0]
    assert (chunk.take(9, 501, alone=False)[0], chunk.oversized, chunk.next_offset) == ([], 502, 1)
    assert offsets(take_all(chunk)) == [1, 2]
    assert sorted(chunk.undecodable) == [1]


@pytest.mark.parametrize("change", ["header count", "too long", "too short", "no name", "cut off", "count"])
def test_damage_behind_such_a_name_is_found(change: str) -> None:
    raw = bytearray(batch_of([(b"0", [(b"\xff", b"1")]), (b"1", [(b"name", b"2")])]))
    if change == "header count":
        raw[raw.index(b"name") - 2] = 40
    elif change == "too long":
        raw[raw.index(b"name") - 9] += 2
    elif change == "too short":
        raw[raw.index(b"name") - 9] -= 2
    elif change == "no name":
        raw[raw.index(b"name") - 1] = 1
    elif change == "cut off":
        del raw[-1:]
        struct.pack_into(">i", raw, 8, len(raw) - 12)
    else:
        struct.pack_into(">i", raw, COUNT_AT, 1)
    chunk = Chunk(HERE, with_checksum(raw), 0)

    assert offsets(take_all(chunk)) == [0]

    assert isinstance(chunk.error, CorruptRecordError)
    assert ("has no name" in str(chunk.error)) == (change == "no name")
    assert not chunk.drained


# Damage -----------------------------------------------------------------------------------


def test_decoding_stops_before_a_damaged_batch() -> None:
    bad = bytearray(batch(3, values(b"bad", b"bad", b"bad"), epoch=6))
    bad[-1] ^= 1
    chunk = Chunk(
        HERE, batch(0, values(b"good", b"good", b"good"), epoch=5) + bytes(bad) + batch(6, values(b"later")), 0
    )

    taken = take_all(chunk)

    assert [record.value for record in taken] == [b"good"] * 3
    assert (chunk.next_offset, chunk.leader_epoch, chunk.drained) == (3, 5, False)
    assert "the batch at offset 3 of topic/3 cannot be read (its checksum is wrong)" in str(chunk.error)
    assert (take_all(chunk), chunk.next_offset) == ([], 3)


@pytest.mark.parametrize("count", [-(2**31), -1, 0, 1, 3, 2**31 - 1])
@pytest.mark.parametrize("codec", [0, 4])
def test_the_number_of_records_in_the_head_is_not_believed(count: int, codec: int) -> None:
    raw = bytearray(batch(0, values(b"one", b"two"), codec=codec))
    struct.pack_into(">i", raw, COUNT_AT, count)
    chunk = Chunk(HERE, with_checksum(raw), 0)

    tracemalloc.start()
    try:
        taken = take_all(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert offsets(taken) == [0, 1][: max(count, 0)]
    assert isinstance(chunk.error, CorruptRecordError)
    assert (chunk.next_offset, chunk.unpacked_bytes) == (len(taken), 0)
    assert peak < 1 << 20


@pytest.mark.parametrize("length", [-(2**31), -13, -12, -1, 0, 13])
def test_a_length_that_cannot_be_is_an_error(length: int) -> None:
    raw = bytearray(batch(3, values(b"v")))
    struct.pack_into(">i", raw, 8, length)
    chunk = Chunk(HERE, batch(0, values(b"0", b"1", b"2")) + bytes(raw) + bytes(100), 0)
    assert len(take_all(chunk)) == 3
    assert f"its length is {length}" in str(chunk.error)


def test_a_batch_shorter_than_its_head_is_an_error() -> None:
    raw = bytearray(batch(0, values(b"v"))[: HEAD_SIZE - 1])
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    chunk = Chunk(HERE, bytes(raw), 0)
    assert take_all(chunk) == []
    assert "60 bytes" in str(chunk.error)


def test_an_unknown_format_is_named() -> None:
    raw = bytearray(batch(0, values(b"v")))
    raw[16] = 3
    chunk = Chunk(HERE, bytes(raw), 0)
    assert take_all(chunk) == []
    assert "its format 3 is unknown" in str(chunk.error)


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_an_unknown_codec_is_named(codec: int) -> None:
    raw = bytearray(batch(5, values(b"v")))
    struct.pack_into(">h", raw, ATTRIBUTES_AT, codec)
    chunk = Chunk(HERE, with_checksum(raw), 5)

    assert chunk.take(1, ROOM, alone=False) == ([], [])

    assert isinstance(chunk.error, CorruptRecordError)
    assert f"offset 5 of topic/3 cannot be decompressed (its compression codec {codec} is unknown)" in str(chunk.error)
    assert chunk.next_offset == 5


@pytest.mark.parametrize(("codec", "name"), [(1, "gzip"), (2, "snappy"), (3, "lz4"), (4, "zstd")])
def test_damaged_compressed_content_is_an_error(codec: int, name: str) -> None:
    raw = bytearray(batch(5, values(bytes(1000)), codec=codec))
    raw[HEAD_SIZE : HEAD_SIZE + 4] = b"\xff" * 4
    chunk = Chunk(HERE, with_checksum(raw), 5)
    assert take_all(chunk) == []
    assert f"its {name} content is damaged" in str(chunk.error)


# Sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_batch_may_unpack_to_the_limit_and_no_further(codec: int) -> None:
    contents = values(*[b"%01000d" % number for number in range(300)])
    unpacked = len(batch(0, contents)) - HEAD_SIZE
    raw = batch(0, contents, codec=codec)
    assert unpacked > 16 * (len(raw) - HEAD_SIZE) or codec == 2, "the first guess of the size must be too small"

    chunk = Chunk(HERE, raw, 0, unpack_limit=unpacked)
    assert len(chunk.take(1, ROOM, alone=False)[0]) == 1
    assert chunk.unpacked_bytes == unpacked + HEAD_SIZE
    assert len(take_all(chunk)) == 299
    assert (chunk.error, chunk.unpacked_bytes) == (None, 0)

    chunk = Chunk(HERE, raw, 0, unpack_limit=unpacked - 1)
    assert take_all(chunk) == []
    assert f"unpacks to more than {unpacked - 1:,} bytes): raise max_buffered_bytes" in str(chunk.error)
    assert (chunk.next_offset, chunk.unpacked_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("codec", "content"),
    [
        (1, gzip.compress(bytes(100_000_000))),
        (2, bytes(cramjam.snappy.compress_raw(bytes(100_000_000)))),
        (3, bytes(cramjam.lz4.compress(bytes(100_000_000)))),
        (4, bytes(cramjam.zstd.compress(bytes(100_000_000)))),
    ],
)
def test_a_batch_that_unpacks_to_far_more_takes_little_memory(codec: int, content: bytes) -> None:
    raw = bytearray(batch(0, values(b"v"))[:HEAD_SIZE] + content)
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    struct.pack_into(">h", raw, ATTRIBUTES_AT, codec)
    chunk = Chunk(HERE, with_checksum(raw), 0, unpack_limit=1 << 20)

    tracemalloc.start()
    try:
        assert take_all(chunk) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert "1,048,576 bytes" in str(chunk.error)
    assert peak < 4 << 20


def test_an_old_wrapper_is_limited_too() -> None:
    raw = at_offset(messages(1, 1, range(1000)), 999)
    assert len(take_all(Chunk(HERE, raw, 0))) == 1000
    chunk = Chunk(HERE, raw, 0, unpack_limit=10_000)
    assert take_all(chunk) == []
    assert "raise max_buffered_bytes" in str(chunk.error)


def test_snappy_in_one_piece_and_gzip_in_several() -> None:
    """aiokafka writes snappy in blocks, as Java does; librdkafka writes it in one piece."""
    plain = batch(0, values(b"one", b"two" * 100))
    head, content = plain[:HEAD_SIZE], plain[HEAD_SIZE:]
    for codec, packed in (
        (2, bytes(cramjam.snappy.compress_raw(content))),
        (1, gzip.compress(content[:50]) + gzip.compress(content[50:])),
    ):
        raw = bytearray(head + packed)
        struct.pack_into(">i", raw, 8, len(raw) - 12)
        struct.pack_into(">h", raw, ATTRIBUTES_AT, codec)
        chunk = Chunk(HERE, with_checksum(raw), 0)
        assert [record.value for record in take_all(chunk)] == [b"one", b"two" * 100]


def test_only_one_batch_is_unpacked_at_a_time() -> None:
    raw = b"".join(batch(10 * number, values(*[bytes(10_000)] * 10), codec=4) for number in range(5))
    chunk = Chunk(HERE, raw, 0)
    while not chunk.drained:
        chunk.take(3, ROOM, alone=False)
        assert chunk.unpacked_bytes < 110_000


def test_a_batch_of_which_nothing_is_for_us_is_not_unpacked() -> None:
    damaged = bytearray(batch(0, values(bytes(1000)), codec=4, producer=7, transactional=True))
    damaged[HEAD_SIZE : HEAD_SIZE + 4] = b"\xff" * 4
    raw = with_checksum(damaged) + control(1, 7, "abort") + batch(2, values(b"v"))
    chunk = Chunk(HERE, raw, 0, aborted=[(7, 0)])
    assert offsets(take_all(chunk)) == [2]
    assert chunk.error is None


# Progress ---------------------------------------------------------------------------------


def test_a_cut_off_batch_ends_the_data_except_the_first() -> None:
    raws = [batch(0, values(b"0", b"1"), epoch=1), batch(2, values(b"2"), epoch=1), batch(3, values(b"3"), epoch=1)]
    data = b"".join(raws)
    ends = [(len(raws[0]), 2), (len(raws[0] + raws[1]), 3), (len(data), 4)]
    for size in range(len(data) + 1):
        complete = [end for end_size, end in ends if end_size <= size]
        chunk = Chunk(HERE, data[:size], 0)
        records = take_all(chunk)
        if complete:
            assert (len(records), chunk.next_offset, chunk.drained) == (complete[-1], complete[-1], True)
            assert chunk.error is None
        elif size:
            assert (records, chunk.next_offset, chunk.drained) == ([], 0, False)
            assert f"only {size} bytes of it were returned" in str(chunk.error)
        else:
            assert (records, chunk.drained, chunk.error) == ([], True, None)


def test_empty_compacted_batches_move_the_position() -> None:
    packed = emptied(batch(3, values(b"3", b"4"), codec=4, epoch=2))
    raw = emptied(batch(0, values(b"0", b"1", b"2"), epoch=1)) + packed
    chunk = Chunk(HERE, raw, 1)
    assert take_all(chunk) == []
    assert (chunk.error, chunk.next_offset, chunk.leader_epoch, chunk.stalled) == (None, 5, 2, False)


def test_megabytes_of_aborted_batches_move_the_position() -> None:
    one = batch(0, values(bytes(1_000_000)), producer=7, transactional=True)
    raws = []
    for number in range(20):
        raw = bytearray(one)
        struct.pack_into(">q", raw, 0, number)
        raws.append(bytes(raw))
    chunk = Chunk(HERE, b"".join(raws), 0, aborted=[(7, 0)])
    assert take_all(chunk) == []
    assert (chunk.error, chunk.next_offset, chunk.drained, chunk.stalled) == (None, 20, True, False)


def test_batches_below_the_position_do_not_move_it_back() -> None:
    raw = batch(0, values(b"0", b"1"), epoch=1)
    chunk = Chunk(HERE, raw, 5)
    assert take_all(chunk) == []
    assert (chunk.next_offset, chunk.stalled, chunk.leader_epoch) == (5, True, -1)

    chunk = Chunk(HERE, raw + batch(5, values(b"5"), epoch=3), 5)
    assert offsets(take_all(chunk)) == [5]
    assert (chunk.stalled, chunk.epoch_starts) == (False, [EpochStart(5, 3)])


def test_no_data_is_not_stalled() -> None:
    chunk = Chunk(HERE, b"", 5)
    assert take_all(chunk) == []
    assert (chunk.drained, chunk.stalled) == (True, False)


def test_offsets_beyond_the_last_one_of_the_head_do_not_come_again() -> None:
    raw = bytearray(batch(0, values(b"0", b"1", b"2")))
    struct.pack_into(">i", raw, LAST_DELTA_AT, 0)
    chunk = Chunk(HERE, with_checksum(raw) + batch(1, values(b"other")), 0)
    assert offsets(take_all(chunk)) == [0, 1, 2]
    assert chunk.next_offset == 3


# Leader epochs ----------------------------------------------------------------------------


def test_the_leader_epoch_follows_the_position() -> None:
    raw = batch(10, values(b"0", b"1"), epoch=3) + batch(12, values(b"2"), epoch=3) + control(13, 7, "commit", epoch=5)
    chunk = Chunk(HERE, raw + batch(14, values(b"4"), epoch=6), 11)

    assert chunk.leader_epoch == -1, "nothing was read yet"
    seen = []
    while not chunk.drained:
        chunk.take(1, ROOM, alone=False)
        seen.append((chunk.next_offset, chunk.leader_epoch))

    # The marker belongs to the position behind it: the end of epoch 3 is before that.
    assert seen == [(12, 3), (13, 3), (15, 6), (15, 6)]
    assert chunk.epoch_starts == [EpochStart(11, 3), EpochStart(13, 5), EpochStart(14, 6)]
    assert [epoch_before(chunk.epoch_starts, offset) for offset in (12, 13, 14, 15)] == [3, 3, 5, 6]


def test_a_batch_of_which_nothing_fits_does_not_give_its_epoch() -> None:
    chunk = Chunk(HERE, batch(0, values(b"0"), epoch=3) + batch(1, values(bytes(1000)), epoch=5), 0)
    assert offsets(chunk.take(9, 600, alone=False)[0]) == [0]
    assert (chunk.next_offset, chunk.leader_epoch) == (1, 3)


# Read committed ---------------------------------------------------------------------------


def transactional(base: int, producer: int, *texts: bytes) -> bytes:
    return batch(base, values(*texts), producer=producer, transactional=True)


def test_a_marker_ends_one_transaction_of_its_producer() -> None:
    raw = b"".join(
        [
            transactional(0, 7, b"aborted"),
            control(1, 7, "abort"),
            transactional(2, 7, b"committed"),
            control(3, 7, "commit"),
            transactional(4, 7, b"aborted too"),
            transactional(5, 8, b"of another"),
            control(6, 7, "abort"),
            transactional(7, 7, b"committed too"),
            control(8, 8, "commit"),
            control(9, 7, "commit"),
        ]
    )
    # Redpanda does not sort them.
    chunk = Chunk(HERE, raw, 0, aborted=[(7, 4), (7, 0)])
    assert [record.value for record in take_all(chunk)] == [b"committed", b"of another", b"committed too"]
    assert chunk.next_offset == 10


def test_only_transactional_batches_are_dropped() -> None:
    raw = transactional(0, 7, b"aborted") + batch(1, values(b"kept"), producer=7) + control(2, 7, "abort")
    chunk = Chunk(HERE, raw, 0, aborted=[(7, 0)])
    assert [record.value for record in take_all(chunk)] == [b"kept"]


def test_a_transaction_that_began_before_the_position_is_dropped() -> None:
    chunk = Chunk(HERE, transactional(20, 7, b"aborted") + control(21, 7, "abort"), 20, aborted=[(7, 5)])
    assert take_all(chunk) == []
    assert chunk.next_offset == 22


@pytest.mark.parametrize("other", ["commit", "unknown", "empty"])
def test_only_an_abort_marker_ends_an_aborted_transaction(other: str) -> None:
    if other == "empty":
        marker = emptied(control(1, 7, "abort"))
    else:
        key = struct.pack(">hh", 0, 1 if other == "commit" else 5)
        marker = control(1, 7, "commit", key=key)
    raw = transactional(0, 7, b"aborted") + marker + transactional(2, 7, b"aborted") + control(3, 7, "abort")
    chunk = Chunk(HERE, raw + transactional(4, 7, b"kept"), 0, aborted=[(7, 0)])
    assert [record.value for record in take_all(chunk)] == [b"kept"]


def test_the_first_record_of_a_control_batch_decides() -> None:
    abort = struct.pack(">hh", 0, 0)
    raw = bytearray(batch(1, [(abort, b"", []), (b"\0\0\0\1", b"", [])], producer=7, transactional=True))
    struct.pack_into(">h", raw, ATTRIBUTES_AT, 0x30)
    data = transactional(0, 7, b"aborted") + with_checksum(raw) + transactional(3, 7, b"kept")
    assert [record.value for record in take_all(Chunk(HERE, data, 0, aborted=[(7, 0)]))] == [b"kept"]


def test_an_abort_marker_of_a_later_version_counts() -> None:
    data = transactional(0, 7, b"aborted") + control(1, 7, "abort", key=struct.pack(">hhi", 1, 0, 9))
    data += transactional(2, 7, b"kept")
    assert [record.value for record in take_all(Chunk(HERE, data, 0, aborted=[(7, 0)]))] == [b"kept"]


@pytest.mark.parametrize("key", [None, b"\0"])
def test_a_marker_without_a_type_is_an_error(key: bytes | None) -> None:
    raw = bytearray(batch(1, [(key, b"", [])], producer=7, transactional=True))
    struct.pack_into(">h", raw, ATTRIBUTES_AT, 0x30)
    chunk = Chunk(HERE, transactional(0, 7, b"aborted") + with_checksum(raw), 0, aborted=[(7, 0)])
    assert take_all(chunk) == []
    assert isinstance(chunk.error, CorruptRecordError)
    assert chunk.next_offset == 1


def test_read_uncommitted_delivers_everything_but_markers() -> None:
    chunk = Chunk(HERE, transactional(0, 7, b"open") + control(1, 7, "abort") + batch(2, values(b"plain")), 0)
    assert [record.value for record in take_all(chunk)] == [b"open", b"plain"]


def test_a_damaged_aborted_batch_is_an_error_too() -> None:
    """Its head would decide how far the position moves."""
    raw = bytearray(transactional(0, 7, b"aborted"))
    raw[CRC_AT] ^= 1
    chunk = Chunk(HERE, bytes(raw), 0, aborted=[(7, 0)])
    assert take_all(chunk) == []
    assert (chunk.next_offset, "checksum" in str(chunk.error)) == (0, True)
