"""Encoding messages into batches: numbers and flags, room, and messages that cannot be encoded."""

from typing import Any

import pytest
from aiokafka.record.default_records import (
    DefaultRecordBatch,
    DefaultRecordBatchBuilder,
    _DefaultRecordBatchBuilderPy,
)

from aioshard.errors import SettingsError
from aioshard.kafka import batches
from aioshard.kafka.batches import CODECS, BatchBuilder, Identity, codec_number, timestamp_ms
from aioshard.ports import Message

GOOD = Message("orders", b"good", b"key", (("trace", b"1"), ("empty", None)))
LARGE = Message("orders", bytes(100_000))
IDENTITY = Identity(7, 3)


def read(data: bytes) -> tuple[DefaultRecordBatch, list[Any]]:
    batch = DefaultRecordBatch(bytearray(data))
    assert batch.validate_crc()
    return batch, list(batch)


@pytest.mark.parametrize("is_transactional", [False, True])
@pytest.mark.parametrize("codec", [CODECS["none"], CODECS["gzip"]])
def test_a_batch_has_its_messages_and_the_numbers_of_its_producer(codec: int, is_transactional: bool) -> None:
    builder = BatchBuilder(IDENTITY, 12, codec, is_transactional=is_transactional)
    assert builder.count == 0
    assert builder.add(GOOD, 1_000)
    assert builder.add(GOOD._replace(value=None, key=None, headers=()), 900)
    assert builder.count == 2

    batch, records = read(builder.build())

    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (7, 3, 12)
    assert (batch.is_transactional, batch.compression_type) == (is_transactional, codec)
    assert [(record.offset, record.timestamp, record.key, record.value) for record in records] == [
        (0, 1_000, b"key", b"good"),
        (1, 900, None, None),
    ]
    assert records[0].headers == [("trace", b"1"), ("empty", None)]


def test_only_the_first_message_may_be_larger_than_a_batch() -> None:
    builder = BatchBuilder(IDENTITY, 0)
    assert builder.add(GOOD, 0)
    assert not builder.add(LARGE, 0)
    assert builder.count == 1
    assert builder.add(GOOD, 0), "there is room for a smaller one"

    builder = BatchBuilder(IDENTITY, 0)
    assert builder.add(LARGE, 0)
    assert not builder.add(GOOD, 0)
    assert [record.value for record in read(builder.build())[1]] == [LARGE.value]


def test_a_full_batch_takes_no_more() -> None:
    builder = BatchBuilder(IDENTITY, 0)
    while builder.add(Message("orders", bytes(1_000)), 0):
        pass
    assert 60 <= builder.count <= 65
    assert len(builder.build()) <= 64 * 1024


@pytest.mark.parametrize(
    "bad",
    [
        GOOD._replace(key="key"),  # type: ignore[arg-type]
        GOOD._replace(value=1),  # type: ignore[arg-type]
        GOOD._replace(headers=(("trace", b"1"), (b"trace", b"1"))),  # type: ignore[arg-type]
        GOOD._replace(headers=(("trace", b"1"), ("trace", "1"))),  # type: ignore[arg-type]
        GOOD._replace(headers=(("trace", b"1"), ("\ud800", b"1"))),
        GOOD._replace(headers=(("trace",),)),  # type: ignore[arg-type]
    ],
    ids=["key", "value", "header name", "header value", "surrogate", "header pair"],
)
@pytest.mark.parametrize("before", [[], [GOOD], [GOOD, GOOD]], ids=len)
@pytest.mark.parametrize("after", [GOOD, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("encoder", [DefaultRecordBatchBuilder, _DefaultRecordBatchBuilderPy], ids=["C", "Python"])
def test_a_message_that_cannot_be_encoded_leaves_nothing_behind(
    before: list[Message], bad: Message, after: Message, encoder: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without aiokafka's extensions: there, a failed first message counts as the first one."""
    monkeypatch.setattr(batches, "DefaultRecordBatchBuilder", encoder)
    builder = BatchBuilder(IDENTITY, 12)
    for message in before:
        assert builder.add(message, 1_000)

    with pytest.raises(Exception):  # noqa: B017, PT011 - the encoder has many
        builder.add(bad, 5_000)

    assert builder.count == len(before)
    has_room = builder.add(after, 1_000)
    assert has_room == (after is GOOD or not before)
    expected = [*before, after] if has_room else before
    batch, records = read(builder.build())
    assert [(record.offset, record.timestamp, record.value) for record in records] == [
        (number, 1_000, message.value) for number, message in enumerate(expected)
    ]
    assert (batch.base_sequence, batch.max_timestamp) == (12, 1_000)


def test_a_message_has_its_own_timestamp_or_that_of_its_acceptance() -> None:
    assert timestamp_ms(GOOD, 12.3456) == 12_345
    assert timestamp_ms(GOOD._replace(timestamp=0.0), 12.3456) == 0
    assert timestamp_ms(GOOD._replace(timestamp=1.9996), 12.3456) == 2_000


def test_the_longest_timestamp_can_be_encoded() -> None:
    longest = timestamp_ms(GOOD._replace(timestamp=(2**63 - 1) / 1000), 0.0)
    builder = BatchBuilder(IDENTITY, 0)
    assert builder.add(GOOD, longest)
    assert read(builder.build())[1][0].timestamp == 2**63 - 1


def test_a_codec_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codec_number("lz4") == 3
    monkeypatch.setitem(batches._HAS_CODEC, "lz4", lambda: False)
    with pytest.raises(SettingsError, match="lz4"):
        codec_number("lz4")
