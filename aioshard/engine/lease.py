"""Whether our partitions are still ours by the clock: no record starts after that."""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from aioshard.engine.current_client import CurrentClient

_TRUSTED: Final = 0.001
"""Seconds of running for which one answer of the client counts."""
_PAUSE: Final = 0.05
"""Seconds between two questions while our partitions may not be ours."""


class Lease:
    """The time for which our partitions are ours, as everything sees it that is about to run a handler.

    Another member may own our partitions when the event loop has been blocked, or the process was stopped. The client
    reports that with an event, but the event waits in the queue of the event loop, behind workers that can continue. So
    each start compares its time with `due`, which costs next to nothing, and asks the client only when that has passed:
    once in a millisecond, and at the first start after a block.

    The clock of workers stands still while the machine is suspended, and that of the client does not. So after a
    suspension, records may start for one more millisecond.

    Owned by the event loop.

    Invariants:
        * Without a suspension, nothing starts at or after the time at which the client said that the ownership ends.
    """

    def __init__(self, client: CurrentClient, clock: Callable[[], float]) -> None:
        """Make the lease of an engine.

        Args:
            client: The member of the group.
            clock: Returns the time of the workers; see `precise`.
        """
        self.due = -math.inf
        """Time from which on `lasts` must be called before the next start."""
        self._client = client
        self._clock = clock
        self._waiting = 0
        self._renewed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def lasts(self, now: float) -> bool:
        """Ask the client whether our partitions are ours; *now* is the time of the workers, read just before."""
        seconds = self._seconds
        self.due = now + min(seconds, _TRUSTED)
        return seconds > 0.0

    @property
    def is_held(self) -> bool:
        """Whether our partitions are ours, by an answer of this moment. Safe from any thread."""
        return self._seconds > 0.0

    @property
    def _seconds(self) -> float:
        client = self._client.transport
        return -math.inf if client is None else client.owned_for

    async def wait(self) -> None:
        """Return once our partitions, or other ones, are ours: at once if they are."""
        while not self.lasts(self._clock()):
            self._waiting += 1
            try:
                self._ask_later()
                await self._renewed.wait()
            finally:
                self._waiting -= 1

    def _ask_later(self) -> None:
        """Ask again after a pause: no event tells when a heartbeat was answered."""
        if self._timer is None:
            self._renewed.clear()
            self._timer = asyncio.get_running_loop().call_later(_PAUSE, self._ask)

    def _ask(self) -> None:
        self._timer = None
        if self.lasts(self._clock()):
            self._renewed.set()
        elif self._waiting:
            self._ask_later()
