"""The watch: says in the log which record a partition does not get past, and since when (I11)."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from aioshard.engine.epoch import Delivery, Epoch

__all__ = ["StuckWatch"]

logger = logging.getLogger("aioshard.engine.watch")

_CHECKS = 4
"""Checks within `stuck_after`: a record is reported at the latest a quarter of it too late."""


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
