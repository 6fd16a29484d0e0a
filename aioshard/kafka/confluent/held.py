"""One partition of ours as the second client reads it: where it is, and what waits for the engine."""

from aioshard.errors import TransportError
from aioshard.records import Record, TopicPartition

__all__ = ["Held"]


class Held:
    """One assigned partition. Owned by the intake."""

    __slots__ = (
        "broken",
        "bytes",
        "end",
        "failures",
        "fault",
        "fetching",
        "full_since",
        "moved",
        "name",
        "paused",
        "placed",
        "position",
        "reach",
        "records",
        "reported",
        "retry_at",
        "sizes",
    )

    def __init__(self, name: TopicPartition) -> None:
        self.name = name
        self.placed = False
        """Whether the engine has given it a position."""
        self.paused = True
        """Whether the engine wants nothing of it."""
        self.fetching = False
        """Whether the client fetches it, as far as it was told."""
        self.moved = False
        """Whether the client has to go to `reach`, whatever it does now; what it brings before does not count."""
        self.broken = False
        """Whether the client has given up on it, and goes nowhere before it is assigned once more."""
        self.failures = 0
        """How often in a row the client could not go where it was told."""
        self.position = 0
        """The next offset to hand out."""
        self.reach = 0
        """The next offset that the client is to bring."""
        self.records: list[Record] = []
        self.sizes: list[int] = []
        self.bytes = 0
        self.full_since: float | None = None
        """Since when it has more than its share."""
        self.end: int | None = None
        self.fault: TransportError | None = None
        self.retry_at = 0.0
        self.reported = False
        """Whether the record that did not fit was handed out."""

    def drop(self) -> None:
        """Forget what was read."""
        self.records = []
        self.sizes = []
        self.bytes = 0
        self.full_since = None
        self.fault = None
        self.retry_at = 0.0
        self.reported = False
