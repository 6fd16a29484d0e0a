"""The watches: say in the log what does not advance, and since when (I11)."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.worker import Worker

__all__ = ["StuckWatch", "TimeoutWatch", "TroubleWatch"]

logger = logging.getLogger("aioshard.engine.watch")

_CHECKS = 4
"""Checks within `stuck_after`: a record is reported at the latest a quarter of it too late."""

_LOOK_INTERVAL = 1.0

_TIMEOUT_CHECKS = 20
_SHORTEST_CHECK = 0.005
_LONGEST_CHECK = 0.5
"""Time-outs are looked at twenty times within one, at most every 5 ms, at least every half second."""
_LETS_GO = 1.0
"""Seconds after a time-out within which a handler that is cancelled should have ended."""


class TroubleWatch:
    """Looks every second for what keeps everything from moving although nothing is raised.

    A client without brokers goes on trying, and so does who looks for a position. What passes within a
    second is not told; of what lasts, the log has one line when it begins and one when it is over.
    """

    def __init__(self, ask: Callable[[], str | None], clock: Callable[[], float]) -> None:
        """Make a watch; `run` is its task.

        Args:
            ask: Gives what is wrong now, in a sentence, or None.
            clock: Loop time.
        """
        self.trouble: str | None = None
        """What is wrong, and was a second ago."""
        self._ask = ask
        self._clock = clock
        self._since: float | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            self.check()

    def check(self) -> None:
        """Take note of what is wrong now."""
        found = self._ask()
        if found is None:
            if self.trouble is not None:
                logger.warning("over after %.0f s: %s", self._clock() - (self._since or 0.0), self.trouble)
            self.trouble = self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif found != self.trouble:
            logger.warning("%s", found)
            self.trouble = found

    def sentence(self, now: float) -> str | None:
        """What is wrong, and for how long by loop time *now*."""
        trouble, since = self.trouble, self._since
        return None if trouble is None or since is None else f"{trouble} (for {now - since:.0f} s)"


class TimeoutWatch:
    """Ends the attempts of one handler that take too long: one timer for all its workers, none per record.

    A handler that does not end when it is cancelled is reported once; its shard waits for it.
    """

    def __init__(self, workers: Sequence[Worker], timeout: float, clock: Callable[[], float]) -> None:
        """Make a watch; `run` is its task.

        Args:
            workers: Those of the handler; looked at anew each time.
            timeout: Seconds that an attempt may take.
            clock: Loop time.
        """
        self._workers = workers
        self._timeout = timeout
        self._clock = clock
        self._reported: set[Delivery] = set()

    async def run(self) -> None:
        """Watch until cancelled."""
        interval = min(max(self._timeout / _TIMEOUT_CHECKS, _SHORTEST_CHECK), _LONGEST_CHECK)
        while True:
            await asyncio.sleep(interval)
            self.check()

    def check(self) -> None:
        """Tell those who are overdue."""
        now = self._clock()
        still: set[Delivery] = set()
        for worker in self._workers:
            if worker.overdue(now):
                worker.time_out()
            elif worker.cancelled and now - worker.started > self._timeout + _LETS_GO:
                still.update(worker.deliveries)
        for delivery in still - self._reported:
            message = "the handler of %r was cancelled after timeout=%g s and does not end: its shard waits for it"
            logger.error(message, delivery, self._timeout)
        self._reported = still


class StuckWatch:
    """Looks at the oldest incomplete record of each partition a few times within `stuck_after`.

    One line when a record has been in hand for that long, another when its partition goes on.
    """

    def __init__(
        self,
        epochs: Callable[[], Iterable[Epoch]],
        describe: Callable[[Epoch], str],
        stuck_after: float,
        clock: Callable[[], float],
    ) -> None:
        """Make a watch; `run` is its task.

        Args:
            epochs: Gives those that have not ended.
            describe: What is known of a partition that does not advance, in a sentence.
            stuck_after: Seconds.
            clock: Loop time.
        """
        self._epochs = epochs
        self._describe = describe
        self._stuck_after = stuck_after
        self._clock = clock
        self._reported: dict[Epoch, Delivery] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._stuck_after / _CHECKS)
            self.check()

    def check(self) -> None:
        """Report what has become stuck, and what is not any more, since the last check."""
        epochs = list(self._epochs())
        for epoch in epochs:
            oldest = epoch.tracker.oldest
            reported = self._reported.get(epoch)
            if reported is not None and reported is not oldest:
                logger.warning("%s goes on: record %r is not in the way any more", epoch.topic_partition, reported)
                del self._reported[epoch]
            if oldest is not None and reported is not oldest and epoch.stuck(self._clock(), self._stuck_after):
                logger.warning("%s does not advance. %s", epoch.topic_partition, self._describe(epoch))
                self._reported[epoch] = oldest
        for epoch in set(self._reported).difference(epochs):
            del self._reported[epoch]
