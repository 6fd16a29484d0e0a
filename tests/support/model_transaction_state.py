"""Transactions as brokers keep them: the coordinator's state, and the offsets of a group.

Without IO and without a clock: requests and times go in, codes come out. `ModelTransactions` puts it on a network.
"""

import enum
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from aioshard.kafka.offsets import Member
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.records import TopicPartition
from tests.support.model_producers import INVALID_EPOCH, OK, Identity

INVALID_STATE, UNKNOWN_ID = 48, 49
UNSUPPORTED, INVALID_TIMEOUT, CONCURRENT, FENCED, UNSTABLE, ABORTABLE = 35, 50, 51, 90, 88, 120
ILLEGAL_GENERATION, UNKNOWN_MEMBER, FENCED_INSTANCE = 22, 25, 82
FAILED = -1
"""The answer to a request for which the broker raises an exception."""

NO_ID, NO_EPOCH = -1, -1
SECOND_VERSION = 2
"""The level of `transaction.version` from which on each transaction has another epoch."""

Participant = TopicPartition | str
"""A partition that a transaction has written to, or a group whose offsets it commits."""


# The coordinator --------------------------------------------------------------------------


class State(enum.Enum):
    """The state of a transactional id, by Kafka's names."""

    EMPTY = enum.auto()
    ONGOING = enum.auto()
    PREPARE_COMMIT = enum.auto()
    PREPARE_ABORT = enum.auto()
    COMPLETE_COMMIT = enum.auto()
    COMPLETE_ABORT = enum.auto()


_PREPARED = (State.PREPARE_COMMIT, State.PREPARE_ABORT)


@dataclass
class Transaction:
    """The transaction of a transactional id, open or ended.

    Attributes:
        epoch: The epoch of the producer id.
        last_epoch: The epoch before it, if the producer that has this one may repeat its request; else -1.
        previous_id: The producer id before it.
        next_id: The producer id after the markers, if the epochs of this one are used up; else -1.
        timeout: Seconds from the first participant on.
        participants: Those that have no marker yet.
        began: When the first of them was added.
        is_stuck: Whether the coordinator waits for a change of its state that failed, until it loads the state again.
    """

    transactional_id: str
    producer_id: int
    epoch: int = NO_EPOCH
    last_epoch: int = NO_EPOCH
    previous_id: int = NO_ID
    next_id: int = NO_ID
    timeout: float = 60.0
    state: State = State.EMPTY
    participants: set[Participant] = field(default_factory=set)
    began: float = 0.0
    is_stuck: bool = False

    @property
    def is_commit(self) -> bool:
        """Whether it was committed."""
        return self.state in (State.PREPARE_COMMIT, State.COMPLETE_COMMIT)

    @property
    def is_prepared(self) -> bool:
        """Whether it is decided, and its markers are missing."""
        return self.state in _PREPARED

    @property
    def is_busy(self) -> bool:
        """Whether its state is changing, so that requests have to come again."""
        return self.is_prepared or self.is_stuck


class Coordinator:
    """The state of all transactional ids.

    It decides as Kafka 4.1.1 does, and returns its error codes. A transaction that it decides is in `prepared` until it
    is taken from there; call `mark` for each marker that is written.

    Attributes:
        level: The level of the feature `transaction.version`.
        most_epoch: The largest epoch; producers get smaller ones only.
        most_timeout: The longest timeout of a transaction, in seconds.
        repeats_last_epoch: Whether a producer may also repeat the request that gave it the last epoch. In Kafka 4.1
            that fails with -1, each time.
    """

    def __init__(self, *, level: int = SECOND_VERSION, most_epoch: int = 2**15 - 1) -> None:
        self.level = level
        self.most_epoch = most_epoch
        self.most_timeout = 900.0
        self.repeats_last_epoch = False
        self.transactions: dict[str, Transaction] = {}
        self.prepared: list[Transaction] = []
        self._ids = itertools.count(4)

    def is_exhausted(self, epoch: int) -> bool:
        """Whether no later epoch may be issued to a producer."""
        return epoch >= self.most_epoch - 1

    # InitProducerId -------------------------------------------------------------------

    def init(
        self, transactional_id: str, timeout: float, expected: Identity | None
    ) -> tuple[int, Identity]:  # fmt: skip
        """Issues an epoch, to a new process or to the one that has the expected id and epoch."""
        if timeout > self.most_timeout:
            return INVALID_TIMEOUT, (NO_ID, NO_EPOCH)
        known = self.transactions.get(transactional_id)
        if known is None:
            known = self.transactions[transactional_id] = Transaction(transactional_id, next(self._ids))
        code = self._init(known, timeout, expected)
        return code, (NO_ID, NO_EPOCH) if code else (known.producer_id, known.epoch)

    def _init(self, known: Transaction, timeout: float, expected: Identity | None) -> int:
        if known.is_busy:
            return CONCURRENT
        if expected is not None and not self._is_known(known, expected):
            return FENCED
        if known.state is State.ONGOING:
            self._fence(known)
            return CONCURRENT
        code = self._issue(known, None if expected is None else expected[1])
        if not code:
            known.timeout = timeout
            known.state = State.EMPTY
        return code

    def _issue(self, known: Transaction, expected: int | None) -> int:
        """Issues the next epoch, or again the current one to the producer that had the epoch before it."""
        last = NO_EPOCH if expected is None else known.epoch
        if self.is_exhausted(known.epoch) and expected in (None, known.epoch):
            known.previous_id, known.producer_id = known.producer_id, next(self._ids)
            known.epoch = 0
            known.last_epoch = last
            return OK
        if self.is_exhausted(known.epoch) and not self.repeats_last_epoch:
            return FAILED
        if expected is None or known.epoch in (NO_EPOCH, expected):
            known.epoch += 1
            known.last_epoch = last
            return OK
        return OK if expected == known.last_epoch else FENCED

    def _is_known(self, known: Transaction, expected: Identity) -> bool:
        """Whether a producer id is the current one, or the one before it that has used up its epochs."""
        producer_id, epoch = expected
        if known.epoch == NO_EPOCH or producer_id == known.producer_id:
            return True
        return producer_id == known.previous_id and self.is_exhausted(epoch)

    def _fence(self, known: Transaction) -> None:
        """Aborts a transaction without a request from its producer."""
        if self.level >= SECOND_VERSION:
            self._raise_epoch(known)
        else:
            known.epoch += 1
            known.last_epoch = NO_EPOCH
        self._prepare(known, State.PREPARE_ABORT)

    def time_out(self, now: float) -> None:
        """Aborts the transactions that are open for too long."""
        for known in self.transactions.values():
            if known.state is State.ONGOING and not known.is_stuck and now >= known.began + known.timeout:
                self._fence(known)

    def forget(self, transactional_id: str) -> None:
        """Forgets a transactional id that was not used for long, unless it has a transaction."""
        known = self.transactions.get(transactional_id)
        if known is not None and known.state is not State.ONGOING and not known.is_busy:
            del self.transactions[transactional_id]

    def reload(self) -> None:
        """Loads the state again, as another broker does that becomes the coordinator."""
        for known in self.transactions.values():
            known.is_stuck = False

    # Participants ---------------------------------------------------------------------

    def add(
        self,
        transactional_id: str,
        identity: Identity,
        added: Collection[Participant],
        now: float,
        *,
        is_second: bool = False,
    ) -> int:
        """Adds partitions or groups to a transaction; the first ones begin it.

        Args:
            transactional_id: The transactional id.
            identity: The producer id and epoch.
            added: The partitions or groups.
            now: Seconds.
            is_second: Whether a broker asks, because of a request of the second version of transactions.
        """
        code = self._check(transactional_id, identity)
        if code:
            return code
        known = self.transactions[transactional_id]
        if known.state is State.ONGOING and known.participants.issuperset(added):
            return OK
        if is_second and not self.level:
            known.is_stuck = True
            return UNSUPPORTED
        if known.state is not State.ONGOING:
            known.state = State.ONGOING
            known.began = now
        known.participants.update(added)
        return OK

    def verify(self, transactional_id: str, identity: Identity, participant: Participant) -> int:
        """Checks that a partition or group was added."""
        code = self._check(transactional_id, identity)
        if code:
            return code
        return OK if participant in self.transactions[transactional_id].participants else ABORTABLE

    def _check(self, transactional_id: str, identity: Identity) -> int:
        known = self.transactions.get(transactional_id)
        if known is not None and known.is_busy:
            return CONCURRENT  # first: a producer may have the next producer id already
        if known is None or known.producer_id != identity[0]:
            return UNKNOWN_ID
        return OK if known.epoch == identity[1] else FENCED

    # EndTxn ---------------------------------------------------------------------------

    def end(
        self, transactional_id: str, identity: Identity, *, commit: bool, raises_epoch: bool
    ) -> tuple[int, Identity]:  # fmt: skip
        """Ends a transaction; a producer of the second version gets another epoch by that."""
        known = self.transactions.get(transactional_id)
        if known is None:
            code = UNKNOWN_ID
        elif raises_epoch:
            code = self._end_second(known, identity, commit=commit)
        else:
            code = self._end_first(known, identity, commit=commit)
        if code or known is None or not raises_epoch:
            return code, (NO_ID, NO_EPOCH)
        if known.next_id != NO_ID:
            return OK, (known.next_id, 0)
        return OK, (known.producer_id, known.epoch)

    def _end_first(self, known: Transaction, identity: Identity, *, commit: bool) -> int:  # noqa: PLR0911 - as Kafka
        if known.producer_id != identity[0]:
            return UNKNOWN_ID
        if known.epoch != identity[1]:
            return FENCED
        if known.is_stuck:
            return CONCURRENT
        if known.state is State.EMPTY:
            return INVALID_STATE
        if known.state is State.ONGOING:
            self._prepare(known, State.PREPARE_COMMIT if commit else State.PREPARE_ABORT)
            return OK
        if known.is_commit != commit:
            return INVALID_STATE
        return CONCURRENT if known.is_prepared else OK

    def _end_second(self, known: Transaction, identity: Identity, *, commit: bool) -> int:  # noqa: PLR0911 - as Kafka
        producer_id, epoch = identity
        is_last = producer_id == known.previous_id and epoch == self.most_epoch - 1 and known.epoch == 0
        is_repeated = known.epoch == epoch + 1 or is_last
        if known.producer_id != producer_id and not is_last:
            return UNKNOWN_ID
        if known.state in (State.ONGOING, State.EMPTY):
            is_valid = epoch == known.epoch
        elif known.is_prepared:
            is_valid = known.epoch == epoch + 1
        else:
            is_valid = is_repeated or epoch == known.epoch
        if not is_valid:
            return FENCED
        if known.is_stuck:
            return CONCURRENT
        if known.is_prepared:
            return CONCURRENT if known.is_commit == commit else INVALID_STATE
        if known.state in (State.COMPLETE_COMMIT, State.COMPLETE_ABORT) and is_repeated:
            return OK if known.is_commit == commit else INVALID_STATE
        if known.state is not State.ONGOING and commit:
            return INVALID_STATE
        if not self.level:
            known.is_stuck = True
            return UNSUPPORTED
        self._raise_epoch(known)
        self._prepare(known, State.PREPARE_COMMIT if commit else State.PREPARE_ABORT)
        return OK

    def _raise_epoch(self, known: Transaction) -> None:
        if self.is_exhausted(known.epoch):
            known.next_id = next(self._ids)
        known.last_epoch = known.epoch
        known.epoch += 1

    # Markers --------------------------------------------------------------------------

    def _prepare(self, known: Transaction, state: State) -> None:
        known.state = state
        self.prepared.append(known)

    def mark(self, known: Transaction, participant: Participant | None = None) -> None:
        """Accepts that a participant has its marker; the last one completes the transaction."""
        if participant is not None:
            known.participants.discard(participant)
        if known.participants or not known.is_prepared:
            return
        known.state = State.COMPLETE_COMMIT if known.is_commit else State.COMPLETE_ABORT
        if known.next_id != NO_ID:
            known.previous_id, known.producer_id = known.producer_id, known.next_id
            known.next_id = NO_ID
            known.epoch = 0


# The group --------------------------------------------------------------------------------


class GroupState:
    """The offsets of a group: committed ones, and those of open transactions.

    Attributes:
        generation: The generation of its members, or their epoch.
        members: The ids of its members.
        instances: The ids of members by those of their instances.
        committed: The committed offsets.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.members: set[str] = set()
        self.instances: dict[str, str] = {}
        self.committed: dict[TopicPartition, CommittedOffset] = {}
        self._pending: dict[int, dict[TopicPartition, CommittedOffset]] = {}
        self._epochs: dict[int, int] = {}

    def set_members(self, *members: Member) -> None:
        """Rebalances: these are the members from now on; they have the same generation."""
        (self.generation,) = {member.generation for member in members} or {self.generation + 1}
        self.members = {member.member_id for member in members}
        self.instances = {
            member.instance_id: member.member_id for member in members if member.instance_id is not None
        }  # fmt: skip

    def check(self, member: Member) -> int:
        """Returns an error code if offsets of a transaction do not come from a member."""
        if member.generation < 0 and not member.member_id and member.instance_id is None:
            return OK  # Kafka accepts it although the group has members
        if member.instance_id is not None and self.instances.get(member.instance_id) != member.member_id:
            return FENCED_INSTANCE if member.instance_id in self.instances else UNKNOWN_MEMBER
        if member.member_id not in self.members:
            return UNKNOWN_MEMBER
        return OK if member.generation == self.generation else ILLEGAL_GENERATION

    def is_open(self, identity: Identity) -> bool:
        """Whether a producer has offsets here that are not decided, in this epoch."""
        return identity[0] in self._pending and self._epochs.get(identity[0]) == identity[1]

    def store(self, identity: Identity, offsets: dict[TopicPartition, CommittedOffset]) -> int:
        """Stores offsets of an open transaction."""
        producer_id, epoch = identity
        if epoch < self._epochs.get(producer_id, NO_EPOCH):
            return INVALID_EPOCH
        self._epochs[producer_id] = epoch
        self._pending.setdefault(producer_id, {}).update(offsets)
        return OK

    def end_transaction(self, identity: Identity, *, commit: bool) -> None:
        """Ends the transaction of a producer."""
        producer_id, epoch = identity
        if epoch < self._epochs.get(producer_id, NO_EPOCH):
            return
        self._epochs[producer_id] = epoch
        pending = self._pending.pop(producer_id, {})
        if commit:
            self.committed |= pending

    def is_stable(self, partition: TopicPartition) -> bool:
        """Whether no open transaction may change the offset of a partition."""
        return not any(partition in offsets for offsets in self._pending.values())

    @property
    def unstable(self) -> Collection[TopicPartition]:
        """The partitions whose offsets an open transaction may change."""
        return {partition for offsets in self._pending.values() for partition in offsets}
