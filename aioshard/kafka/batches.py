"""Batches of messages in Kafka's record format."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from aiokafka import codec
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from aioshard.errors import SettingsError
from aioshard.ports import RECORD_OVERHEAD, Message, record_size

Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]

CODECS: Mapping[Compression, int] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
"""Kafka's numbers of the codecs."""
_HAS_CODEC: Mapping[Compression, Callable[[], bool]] = {
    "none": lambda: True,
    "gzip": codec.has_gzip,
    "snappy": codec.has_snappy,
    "lz4": codec.has_lz4,
    "zstd": codec.has_zstd,
}
_FORMAT = 2
"""The version of the record format."""
_BATCH_BYTES = 64 * 1024
_LONGEST_TIMESTAMP = 2**63 - 1
"""Milliseconds; a float of seconds may round up to one more."""


class Identity(NamedTuple):
    """The name under which a producer writes; a broker refuses its older epochs."""

    producer_id: int
    epoch: int


class BatchBuilder:
    """Encodes messages into a batch."""

    __slots__ = ("_arguments", "_encoder", "count")

    def __init__(self, identity: Identity, sequence: int, codec: int = 0, *, is_transactional: bool = False) -> None:
        """Begin an empty batch.

        Args:
            identity: The producer.
            sequence: The sequence number of the first message.
            codec: One of `CODECS`.
            is_transactional: Whether the batch is part of a transaction.
        """
        producer_id, epoch = identity
        self.count = 0
        """Number of messages."""
        self._arguments = (_FORMAT, codec, int(is_transactional), producer_id, epoch, sequence, _BATCH_BYTES)
        self._encoder = DefaultRecordBatchBuilder(*self._arguments)

    def add(self, message: Message, timestamp_ms: int) -> bool:
        """Add a message; return False if the batch has no room for it. The first one may be of any size.

        Args:
            message: The message.
            timestamp_ms: See `timestamp_ms`.

        Raises:
            Exception: The message cannot be encoded, for any reason that the encoder has. The batch is unchanged.
        """
        try:
            added = self._encoder.append(self.count, timestamp_ms, message.key, message.value, list(message.headers))
        except Exception:
            if not self.count:
                self._encoder = DefaultRecordBatchBuilder(*self._arguments)  # only a new one has a first message
            raise
        if added is None:
            return False
        self.count += 1
        return True

    def build(self) -> bytes:
        """Return the batch; nothing can be added afterwards."""
        return bytes(self._encoder.build())


def timestamp_ms(message: Message, accepted: float) -> int:
    """Return the timestamp of a message in milliseconds since the epoch.

    Args:
        message: The message.
        accepted: When it was accepted, in seconds since the epoch. This counts if the message names no timestamp.

    Raises:
        Exception: The named timestamp is not a number, for example.
    """
    if message.timestamp is None:
        return int(accepted * 1000)
    return min(round(message.timestamp * 1000), _LONGEST_TIMESTAMP)


def message_size(message: Message) -> int:
    """Return roughly the size of a message in bytes, as brokers count it.

    Raises:
        TypeError: A part of the message has no length.
        ValueError: Likewise.
    """
    return record_size(message.key, message.value, message.headers) - RECORD_OVERHEAD


def codec_number(compression: Compression) -> int:
    """Return Kafka's number of a codec.

    Raises:
        SettingsError: The codec is not installed.
    """
    if not _HAS_CODEC[compression]():
        raise SettingsError(
            f"compression={compression!r} needs a package that is not installed: install it with  "
            "pip install 'aiokafka[all]'"
        )
    return CODECS[compression]
