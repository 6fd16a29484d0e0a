"""The producers of a partition as its leader knows them: which batches it takes, and which transactions are open.

Without IO and without a clock.
"""

from collections import deque
from dataclasses import dataclass, field

from aiokafka.record.default_records import DefaultRecordBatch

OK, OUT_OF_ORDER, INVALID_EPOCH = 0, 45, 47
MOST_SEQUENCE = 2**31
_CACHED = 5
"""How many batches of a producer a partition remembers."""

Identity = tuple[int, int]
"""A producer id and its epoch."""


class Batch:
    """A batch as the broker reads it."""

    def __init__(self, data: bytes) -> None:
        header = DefaultRecordBatch(bytearray(data))
        records = list(header)
        self.data = data
        self.producer_id: int = header.producer_id
        self.epoch: int = header.producer_epoch
        self.sequence: int = header.base_sequence
        self.is_transactional: bool = header.is_transactional
        self.is_marker: bool = header.is_control_batch
        self.values: list[bytes] = [record.value for record in records]
        self.timestamps: list[int] = [record.timestamp for record in records]

    @property
    def identity(self) -> Identity:
        """The producer id and its epoch."""
        return self.producer_id, self.epoch

    @property
    def last(self) -> int:
        """The number of its last record."""
        return (self.sequence + len(self.values) - 1) % MOST_SEQUENCE


@dataclass
class _Producer:
    """A producer of a partition.

    Attributes:
        epoch: The latest epoch.
        last: The number of its last record in this epoch.
        known: The first and last number and the offset of its latest batches.
        began: The first offset of its open transaction; None without one.
    """

    epoch: int
    last: int = -1
    known: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_CACHED))
    began: int | None = None

    def advance(self, epoch: int) -> None:
        """Accepts a later epoch, in which numbers begin at 0."""
        if epoch > self.epoch:
            self.epoch = epoch
            self.last = -1
            self.known.clear()


class Producers:
    """The producers of one partition. It decides as Kafka's `ProducerAppendInfo` does."""

    def __init__(self) -> None:
        self._known: dict[int, _Producer] = {}

    @property
    def first_open(self) -> int | None:
        """The first offset of all open transactions; None if there are none."""
        return min((known.began for known in self._known.values() if known.began is not None), default=None)

    def is_open(self, identity: Identity) -> bool:
        """Whether a producer has an open transaction here, in this epoch."""
        known = self._known.get(identity[0])
        return known is not None and known.began is not None and known.epoch == identity[1]

    def is_past(self, identity: Identity) -> bool:
        """Whether the producer has a later epoch here."""
        known = self._known.get(identity[0])
        return known is not None and known.epoch > identity[1]

    def accept(self, batch: Batch, end: int) -> tuple[int, int]:
        """Decides about a batch at the end of the log.

        Returns:
            The error code, and the offset: the end if the batch is to be stored, an earlier one if it was before.
        """
        known = self._known.get(batch.producer_id)
        if known is None:  # a broker accepts any number of a producer that it does not know
            known = self._known[batch.producer_id] = _Producer(batch.epoch)
        elif batch.epoch < known.epoch:
            return INVALID_EPOCH, -1
        elif batch.epoch > known.epoch:
            if batch.sequence != 0:
                return OUT_OF_ORDER, -1
            known.advance(batch.epoch)
        else:
            for first, last, offset in known.known:
                if (first, last) == (batch.sequence, batch.last):
                    return OK, offset
            if batch.sequence != (known.last + 1) % MOST_SEQUENCE:
                return OUT_OF_ORDER, -1
        known.last = batch.last
        known.known.append((batch.sequence, batch.last, end))
        if batch.is_transactional and known.began is None:
            known.began = end
        return OK, end

    def end_transaction(self, identity: Identity) -> int | None:
        """Ends the transaction of a producer, which may have a later epoch by that; returns its first offset."""
        producer_id, epoch = identity
        known = self._known.setdefault(producer_id, _Producer(epoch))
        began, known.began = known.began, None
        known.advance(epoch)
        return began
