"""A tenth of the keys fails for a while: the input and the observations of a process; see `p22`.

Only the standard library is imported, because contestants in other environments need it too.
"""

import asyncio
import time
from collections import defaultdict
from typing import Any, NamedTuple, Protocol


class Outage(NamedTuple):
    """One run."""

    bootstrap: str
    topic: str
    side_topic: str
    group: str
    delay: float
    """Seconds after which a parked key is tried again."""
    seconds: float
    """Seconds from the first record for which a tenth of the keys fails; 0 without failure."""
    watch: float
    """Seconds for which the run lasts after that."""
    concurrency: int = 128
    handling: float = 0.005
    """Seconds that the handler takes for each record."""
    decodes: bool = False
    """Whether the handler decodes the value as JSON."""
    records: int = 0
    """Number of records that the process produces first, if the broker is in it."""


class Keyed(Protocol):
    """The part of a record that is observed."""

    @property
    def partition(self) -> int:
        """The partition."""

    @property
    def offset(self) -> int:
        """The offset."""

    @property
    def key(self) -> bytes | None:
        """The key."""


def fails(key: bytes | None) -> bool:
    """Whether a key is among those that fail."""
    return key is not None and key.endswith(b"0")


class Observed:
    """The handler of one run, and the records that ended."""

    def __init__(self, outage: Outage) -> None:
        self.healthy: defaultdict[int, int] = defaultdict(int)
        """Records of the keys that never fail, by second."""
        self.others: defaultdict[int, int] = defaultdict(int)
        """Records of the other keys that were processed, by second."""
        self.failures = 0
        self.disordered = 0
        self.repeated = 0
        self._outage = outage
        self._began: float | None = None
        self._latest: dict[tuple[int, bytes | None], int] = {}

    async def handle(self, record: Keyed) -> None:
        """Process a record, or fail.

        Raises:
            ConnectionError: Its key fails now.
        """
        if self._began is None:
            self._began = time.monotonic()
        elapsed = time.monotonic() - self._began
        await asyncio.sleep(self._outage.handling)
        if elapsed < self._outage.seconds and fails(record.key):
            self.failures += 1
            raise ConnectionError("the partner is down")
        self._note(record, int(time.monotonic() - self._began))

    async def until_watched(self) -> None:
        """Wait for the end of the run."""
        while self._began is None:
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._outage.seconds + self._outage.watch - (time.monotonic() - self._began))

    def _note(self, record: Keyed, second: int) -> None:
        counts = self.others if fails(record.key) else self.healthy
        counts[second] += 1
        name = (record.partition, record.key)
        latest = self._latest.get(name, -1)
        self.repeated += record.offset == latest
        self.disordered += record.offset < latest
        self._latest[name] = record.offset

    def asdict(self) -> dict[str, Any]:
        """Return an object for JSON."""
        return {
            "healthy": dict(self.healthy),
            "others": dict(self.others),
            "failures": self.failures,
            "disordered": self.disordered,
            "repeated": self.repeated,
        }
