"""The outcome of a transaction whose commit was not answered, as its offsets show it. No IO."""

import enum
from collections.abc import Mapping

from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import Committed
from aioshard.records import TopicPartition


class TransactionOutcome(enum.Enum):
    """The end of a transaction."""

    COMMITTED = enum.auto()
    ABORTED = enum.auto()
    UNKNOWN = enum.auto()


class KnownOffsets:
    """The committed offsets of a group with their texts, as far as one client knows them.

    The offsets of a transaction are stored together, or none is. So they show its outcome, if no other transaction can
    change them meanwhile, and if they differ from those before.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[TopicPartition, tuple[int, str] | None] = {}

    def learn(self, committed: Mapping[TopicPartition, Committed | None]) -> None:
        """Note what the brokers report as committed."""
        for name, stored in committed.items():
            self._known[name] = None if stored is None else (stored.offset, stored.metadata)

    def note(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Note the offsets of a transaction that was committed."""
        self._known |= {name: _comparable(offset) for name, offset in offsets.items()}

    def outcome(
        self, offsets: Mapping[TopicPartition, CommittedOffset], stored: Mapping[TopicPartition, CommittedOffset]
    ) -> TransactionOutcome:
        """Return the outcome of a transaction.

        Args:
            offsets: Those of the transaction.
            stored: Those that the brokers report once nothing of the transaction can happen any more.
        """
        ours = {name: _comparable(offset) for name, offset in offsets.items()}
        now = {name: _comparable(offset) for name, offset in stored.items()}
        changes = {name for name, offset in ours.items() if self._known.get(name, offset) != offset}
        # 1. It was not committed: an offset is what it was before.
        if any(now.get(name) == self._known.get(name) for name in changes):
            return TransactionOutcome.ABORTED
        # 2. It was: each offset is what it has made it. One alone may also be what another owner has made it.
        if changes and all(now.get(name) == ours[name] for name in changes):
            return TransactionOutcome.COMMITTED
        # 3. As far as we know, it changes no offset, as with only the messages of parked records. Or others have
        # committed since.
        return TransactionOutcome.UNKNOWN


def _comparable(offset: CommittedOffset) -> tuple[int, str]:
    return offset.offset, offset.metadata
