"""The producer behind a transactional id: its epochs, and when a transaction may begin in one. No IO."""

import enum
import uuid
from typing import Final

from aioshard.errors import ClientLostError, StateError
from aioshard.kafka.batches import Identity
from aioshard.records import TopicPartition

_MOST_SEQUENCE: Final = 2**31


class Version(enum.IntEnum):
    """The protocol of transactions; the values are those of the feature `transaction.version`, where 0 is as 1."""

    FIRST = 1
    """All transactions of an epoch are the same to the brokers, so a request that arrives late changes the next one."""
    SECOND = 2
    """The end of each transaction raises the epoch, so the brokers refuse late requests (KIP-890)."""


class _Phase(enum.Enum):
    STALE = "stale"
    """A transaction may be open, or a request of one may be on its way: only a new epoch helps."""
    READY = "ready"
    """A transaction may begin."""
    OPEN = "open"
    """A transaction has begun, and its commit was not requested."""
    ENDING = "ending"
    """The commit was requested."""
    FENCED = "fenced"
    """Somebody else has requested a newer epoch."""


class TransactionalId:
    """The producer behind a transactional id, as the brokers see it. It outlives the clients of a process.

    Invariants:
        * A transaction begins only in an epoch in which no request of an earlier transaction can still arrive.
        * After the first time, a client requests a new epoch with the id and epoch of the one before. So it never
          fences a process that has taken over the transactional id.
        * Of the first protocol, a new epoch is requested when no transaction is open: brokers abort an open one in an
          epoch that they name to nobody, and then refuse the one before.
        * Every new epoch begins with sequence number 0 in each partition.
    """

    def __init__(self, name: str) -> None:
        """Know nothing yet.

        Args:
            name: The transactional id, which is unique among running processes.
        """
        self.name = name
        self.version = Version.FIRST
        """The protocol of the current epoch."""
        self._identity: Identity | None = None
        self._phase = _Phase.STALE
        self.unfinished: bool | None = None
        """How to end the transaction that may be open before a new epoch is requested: whether by a commit. None if
        the request of a new epoch ends it, or none is open."""
        self._sequences: dict[TopicPartition, int] = {}

    def __str__(self) -> str:
        """Describe it for messages."""
        identity = self._identity
        if identity is None:
            return f"transactional id {self.name!r}"
        return f"transactional id {self.name!r} (producer {identity.producer_id}, epoch {identity.epoch})"

    @property
    def phase(self) -> str:
        """The state, in one word, for messages."""
        return self._phase.value

    @property
    def known(self) -> Identity | None:
        """The producer id and epoch to request a new epoch with; None if this process has none yet."""
        return self._identity

    @property
    def identity(self) -> Identity:
        """The producer id and epoch of the current transaction."""
        if self._identity is None:
            raise StateError(f"{self} has no epoch")
        return self._identity

    @property
    def is_stale(self) -> bool:
        """Whether a new epoch must come before the next transaction."""
        return self._phase is _Phase.STALE

    @property
    def is_fenced(self) -> bool:
        """Whether somebody else has requested a newer epoch: another one of ours would fence that."""
        return self._phase is _Phase.FENCED

    def use(self, version: Version) -> None:
        """Accept the protocol that the cluster has now; a new epoch must come between two protocols."""
        if self._phase is _Phase.READY and version != self.version:
            self._phase = _Phase.STALE

    def renew(self, identity: Identity, version: Version) -> None:
        """Begin an epoch that a coordinator has given us."""
        self._expect(_Phase.STALE)
        self._phase = _Phase.READY
        self.version = version
        self._begin_epoch(identity)

    def begin(self) -> None:
        """Begin a transaction."""
        self._expect(_Phase.READY)
        self._phase = _Phase.OPEN

    def request_commit(self) -> None:
        """Note that the commit is about to be requested: from now on, only an answer tells how it ends."""
        self._expect(_Phase.OPEN)
        self._phase = _Phase.ENDING

    def refuse_commit(self) -> None:
        """Note that the commit was refused: the transaction may be open, but must not be committed any more."""
        self._expect(_Phase.ENDING)
        self._phase = _Phase.OPEN
        self.fail()

    def commit(self, following: Identity | None, *, is_in_doubt: bool) -> None:
        """Note that the transaction was committed.

        Args:
            following: The producer id and epoch of the next transaction, if the coordinator named it.
            is_in_doubt: Whether a request of the transaction may still arrive.
        """
        self._expect(_Phase.ENDING)
        if following is not None:
            self._phase = _Phase.READY
            self._begin_epoch(following)
        elif is_in_doubt or self.version is Version.SECOND:
            self._phase = _Phase.STALE
        else:
            self._phase = _Phase.READY

    def fail(self) -> None:
        """Note that the transaction was not committed, or that nobody knows: the next epoch ends it."""
        if self._phase not in (_Phase.OPEN, _Phase.ENDING):
            return
        if self.version is Version.FIRST:
            self.unfinished = self._phase is _Phase.ENDING  # a commit that was requested may be executed later
        self._phase = _Phase.STALE

    def finish(self) -> None:
        """Note that no transaction is open any more."""
        self._expect(_Phase.STALE)
        self.unfinished = None

    def forget(self) -> None:
        """Note that the brokers have forgotten the transactional id, because nobody used it for days."""
        self._expect(_Phase.STALE)
        self._identity = None

    def fence(self) -> None:
        """Note that somebody else has requested a newer epoch."""
        self._phase = _Phase.FENCED

    def sequence(self, partition: TopicPartition) -> int:
        """Return the sequence number of the next message for a partition."""
        return self._sequences.get(partition, 0)

    def count_stored(self, partition: TopicPartition, messages: int) -> None:
        """Note that messages were stored in this epoch."""
        self._sequences[partition] = (self.sequence(partition) + messages) % _MOST_SEQUENCE

    @property
    def end(self) -> ClientLostError | None:
        """The reason why this client can begin no transaction any more, if there is one."""
        if not self.is_fenced:
            return None
        return ClientLostError(f"somebody else has requested a newer epoch of {self}; a new client is needed")

    def _begin_epoch(self, identity: Identity) -> None:
        if identity != self._identity:
            self._sequences.clear()
        self._identity = identity

    def _expect(self, phase: _Phase) -> None:
        if self._phase is not phase:
            raise StateError(f"{self} is {self._phase.value}, not {phase.value}")


class TransactionalIds:
    """The transactional ids of the clients of a process, which follow one another.

    With a group instance id, all of them have the same: a restarted process ends at once what the one before has left
    open. Without one, each process has its own.

    A client that was fenced is followed by one that begins anew, without the epoch of the one before. It joins the
    group again and reads the committed offsets again. If another process has the same group instance id, the group
    tells.
    """

    def __init__(self, group_id: str, instance_id: str | None) -> None:
        """Choose the first.

        Args:
            group_id: The group. Operators grant rights on the prefix that it makes, with a colon.
            instance_id: The group instance id; None without one. It has no colon, so different pairs of group and
                instance never share a transactional id.
        """
        self._group_id = group_id
        self._instance_id = instance_id
        self._latest = self._choose()

    def for_client(self) -> TransactionalId:
        """Return the transactional id of the next client."""
        if self._latest.is_fenced:
            self._latest = self._choose()
        return self._latest

    def _choose(self) -> TransactionalId:
        return TransactionalId(f"{self._group_id}:{self._instance_id or uuid.uuid4().hex}")
