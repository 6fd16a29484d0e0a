"""One assigned partition as the second client reads it: positions, and records buffered for the engine."""

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
        """Whether the engine has set a position."""
        self.paused = True
        """Whether the engine has paused it."""
        self.fetching = False
        """Whether the last change told the client to fetch it."""
        self.moved = False
        """Whether the client must seek to `reach`; records that it delivers before that do not count."""
        self.broken = False
        """Whether the client has given up on it; it cannot seek before it is assigned again."""
        self.failures = 0
        """Consecutive changes that the client could not make."""
        self.position = 0
        """The next offset to return to the engine."""
        self.reach = 0
        """The next offset that the client should deliver."""
        self.records: list[Record] = []
        self.sizes: list[int] = []
        self.bytes = 0
        self.full_since: float | None = None
        """Since when the buffer exceeds its share."""
        self.end: int | None = None
        self.fault: TransportError | None = None
        self.retry_at = 0.0
        self.reported = False
        """Whether the record that did not fit was reported."""

    def drop(self) -> None:
        """Drop the buffered records and any error."""
        self.records = []
        self.sizes = []
        self.bytes = 0
        self.full_since = None
        self.fault = None
        self.retry_at = 0.0
        self.reported = False
