"""The watches: say in the log what does not advance, and since when (I11)."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from aioshard.engine.epoch import Delivery, Epoch

__all__ = ["StuckWatch", "TroubleWatch"]

logger = logging.getLogger("aioshard.engine.watch")

_CHECKS = 4
"""Checks within `stuck_after`: a record is reported at the latest a quarter of it too late."""

_LOOK_INTERVAL = 1.0


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
