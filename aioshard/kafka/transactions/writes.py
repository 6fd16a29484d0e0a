"""The messages of one transaction: which batches are written next, and which of them the brokers refuse. No IO."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aioshard.errors import MessageRefusedError
from aioshard.kafka.batches import BatchBuilder, timestamp_ms
from aioshard.kafka.produce import Verdict, not_encoded, refused, verdict
from aioshard.kafka.transactions.answers import ENDS_PRODUCING
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.wire.errors import WireError
from aioshard.ports import Message
from aioshard.records import TopicPartition


@dataclass(slots=True, eq=False)
class _Batch:
    """Messages that are sent, unchanged, until the broker has stored or refused them."""

    indexes: list[int]
    """Those of its messages in the transaction."""
    data: bytes
    is_in_doubt: bool = False
    """Whether an earlier attempt may have stored it."""
    is_suspect: bool = False
    """Whether it has failed once for a reason that is probably permanent."""


@dataclass(slots=True, eq=False)
class PartitionWrites:
    """The messages of a transaction for one partition, in order; one batch at a time."""

    name: TopicPartition
    waiting: deque[int] = field(default_factory=deque)
    """The indexes of messages that are in no batch yet."""
    sizes: deque[int] = field(default_factory=deque)
    """How many messages the next batches may have, after one was refused and split."""
    batch: _Batch | None = None

    @property
    def is_done(self) -> bool:
        """Whether all of its messages are stored or refused."""
        return self.batch is None and not self.waiting

    def put_back(self, batch: _Batch) -> None:
        """Let the messages of a refused batch wait again."""
        self.waiting.extendleft(reversed(batch.indexes))


class Writes:
    """All messages of one transaction.

    A batch that is refused for one of its messages is split, within the same transaction, until each such message is
    found: the numbers of what was certainly not stored are free for the next batch. The transaction is aborted then,
    because other messages of the same run may be stored.

    Invariants:
        * A batch that may have been stored is sent again with the same bytes, or ends the transaction.
        * No message counts as stored without an acknowledgement of its partition.
    """

    def __init__(self, messages: Sequence[Message], accepted: float) -> None:
        """Begin with nothing assigned.

        Args:
            messages: The messages in their order.
            accepted: The time of messages without one, in seconds since the epoch.
        """
        self.messages = messages
        self.refused: dict[int, MessageRefusedError] = {}
        """The messages that can never be written, by index."""
        self.failure: WireError | None = None
        """The reason why the transaction cannot be committed, if it is not a message."""
        self.is_in_doubt = False
        """Whether a request may still arrive after its answer was lost."""
        self._accepted = accepted
        self._partitions: dict[TopicPartition, PartitionWrites] = {}

    @property
    def partitions(self) -> Collection[TopicPartition]:
        """The partitions with messages."""
        return self._partitions.keys()

    @property
    def pending(self) -> list[PartitionWrites]:
        """The partitions with messages that are neither stored nor refused."""
        return [writes for writes in self._partitions.values() if not writes.is_done]

    def assign(self, index: int, partition: TopicPartition) -> None:
        """Append a message to those of a partition."""
        writes = self._partitions.get(partition)
        if writes is None:
            writes = self._partitions[partition] = PartitionWrites(partition)
        writes.waiting.append(index)

    def refuse(self, index: int, error: Exception) -> None:
        """Note that a message can never be written."""
        refusal = MessageRefusedError(str(error))
        refusal.__cause__ = error
        self.refused[index] = refusal

    def refuse_topic(self, topic: str, error: Exception) -> None:
        """Note that no message for a topic can be written, and give up those that are not stored."""
        for writes in self._partitions.values():
            if writes.name.topic == topic:
                self._refuse_all(writes, error)

    def next_batch(self, writes: PartitionWrites, transactional: TransactionalId) -> bytes | None:
        """Return the batch to send to a partition; None if none of its messages can be encoded."""
        if writes.batch is None:
            writes.batch = self._build(writes, transactional)
        return None if writes.batch is None else writes.batch.data

    def _build(self, writes: PartitionWrites, transactional: TransactionalId) -> _Batch | None:
        builder = BatchBuilder(transactional.identity, transactional.sequence(writes.name), is_transactional=True)
        most = writes.sizes.popleft() if writes.sizes else len(writes.waiting)
        indexes: list[int] = []
        while writes.waiting and len(indexes) < most:
            index = writes.waiting[0]
            message = self.messages[index]
            try:
                if not builder.add(message, timestamp_ms(message, self._accepted)):
                    break
            except Exception as error:  # noqa: BLE001 - the encoder reports what it cannot encode in many ways
                self.refuse(index, not_encoded(message, error))
            else:
                indexes.append(index)
            writes.waiting.popleft()
        return _Batch(indexes, builder.build()) if indexes else None

    # Answers --------------------------------------------------------------------------

    def apply(
        self,
        writes: PartitionWrites,
        transactional: TransactionalId,
        error: WireError | None,
        blamed: Collection[int] = (),
    ) -> None:
        """Act on the answer to the batch of a partition.

        Args:
            writes: The partition.
            transactional: Counts what is stored.
            error: The error of the batch, or why there is no answer.
            blamed: The positions in the batch of the records that the broker names as the reason.
        """
        batch = writes.batch
        assert batch is not None  # noqa: S101 - it was sent
        if error is not None and error.code in ENDS_PRODUCING:
            self._fail(error)
            return
        match verdict(error):
            case Verdict.STORED:
                writes.batch = None
                transactional.count_stored(writes.name, len(batch.indexes))
            case Verdict.AGAIN:
                pass
            case Verdict.IN_DOUBT:
                self._doubt(batch)
            case Verdict.SUSPECT if not batch.is_suspect:
                batch.is_suspect = True
                self._doubt(batch)
            case found:
                assert error is not None  # noqa: S101 - it is not stored
                self._act_on_refusal(writes, batch, found, error, blamed)

    def _doubt(self, batch: _Batch) -> None:
        batch.is_in_doubt = True
        self.is_in_doubt = True

    def _act_on_refusal(
        self,
        writes: PartitionWrites,
        batch: _Batch,
        found: Verdict,
        error: WireError,
        blamed: Collection[int],
    ) -> None:
        # 1. An earlier attempt may have stored it, so its numbers cannot be used again. Another transaction tells more.
        if batch.is_in_doubt or found not in (Verdict.REFUSED, Verdict.MESSAGE_REFUSED):
            self._fail(error)
            return
        # 2. Nothing is stored, and no message of this partition ever will be.
        if found is Verdict.REFUSED:
            self._refuse_all(writes, error)
            return
        writes.batch = None
        named = [batch.indexes[position] for position in blamed if 0 <= position < len(batch.indexes)]
        if named:
            # 3. The broker names the messages that are the reason.
            for index in named:
                self.refuse(index, refused(error, self.messages[index]))
            batch.indexes = [index for index in batch.indexes if index not in self.refused]
            writes.put_back(batch)
        elif len(batch.indexes) > 1:
            # 4. One of the messages may be the reason: look for it in each half.
            half = (len(batch.indexes) + 1) // 2
            writes.put_back(batch)
            writes.sizes.extendleft((len(batch.indexes) - half, half))
        else:
            # 5. This one is.
            (index,) = batch.indexes
            self.refuse(index, refused(error, self.messages[index]))

    def _refuse_all(self, writes: PartitionWrites, error: Exception) -> None:
        batch, writes.batch = writes.batch, None
        for index in [*(batch.indexes if batch is not None else ()), *writes.waiting]:
            reason = refused(error, self.messages[index]) if isinstance(error, WireError) else error
            self.refuse(index, reason)
        writes.waiting.clear()

    def _fail(self, error: WireError) -> None:
        """Note that the transaction cannot be committed; the first reason counts."""
        if self.failure is None:
            self.failure = error


def by_leader(
    pending: Sequence[PartitionWrites], leaders: Mapping[TopicPartition, int]
) -> Iterator[tuple[int, list[PartitionWrites]]]:
    """Return the partitions that have a leader, by leader."""
    led: dict[int, list[PartitionWrites]] = {}
    for writes in pending:
        leader = leaders.get(writes.name)
        if leader is not None:
            led.setdefault(leader, []).append(writes)
    yield from led.items()
