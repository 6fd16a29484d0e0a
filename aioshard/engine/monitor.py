"""The monitor of a running engine: logs stuck partitions and hanging tasks, and keeps the history (I11)."""

import asyncio
import time
from collections import deque

from aioshard.engine.epoch import Delivery, Gate
from aioshard.engine.explain.diagnosis import explain_partition
from aioshard.engine.guard import Guard
from aioshard.engine.log_fields import partition_fields, record_fields
from aioshard.engine.partition import Partition
from aioshard.engine.statistics import sample
from aioshard.engine.watch import Watch
from aioshard.log_fields import get_logger
from aioshard.observe import Sample
from aioshard.records import TopicPartition

logger = get_logger("aioshard.engine.monitor")

_INTERVAL = 1.0
HISTORY_STEP = 5.0
"""Seconds between two samples of the history."""
_CHECKS = 4
"""Minimum checks per `stuck_after`; a new oldest record is not blamed before a quarter of that has passed."""
_INTERVAL_PER_PARTITION = 0.001
"""Seconds between two checks for each partition, at least: a check of one takes some 20 µs."""
_LEAST_WINDOW = 100
_HELD_UP = 0.9
"""A partition is reported after half of `stuck_after` if at least `_LEAST_WINDOW` offsets follow its oldest record, of
which more than this share wait for it."""


class Monitor:
    """Checks a running engine once a second; with more than 1,000 partitions less often.

    Updates the watch, and moves adaptive concurrencies. Logs one line when a problem begins and one when it is over:
    for a stuck partition, brokers that do not answer, and a hanging task. Also keeps the history of the figures that
    the dashboard plots, because it must exist before the dashboard is opened.

    Invariants:
        * Nothing that a check raises ends the app: the guard logs it once, and the other checks continue.
    """

    def __init__(self, watch: Watch) -> None:
        """Make a monitor that updates *watch*; `run` is its task."""
        self.watch = watch
        self.history: deque[Sample] = deque(maxlen=720)
        """The samples of the last hour, oldest first."""
        self._engine = watch.engine
        self._guard = Guard()
        self._reported: dict[Partition, tuple[Delivery, bool]] = {}
        """Partitions that the log reports, with their oldest record and whether they count as stuck."""
        self._restarting: dict[TopicPartition, float] = {}
        """Partitions whose failing transactions the log reports, with the loop time of the first failure."""

    async def run(self) -> None:
        """Check until cancelled."""
        interval = min(_INTERVAL, self._engine.settings.stuck_after / _CHECKS)
        async with asyncio.TaskGroup() as group:
            if self.watch.loop is not None:
                group.create_task(self.watch.loop.run(), name="loop watch")
            while True:
                self.check()
                await asyncio.sleep(max(interval, _INTERVAL_PER_PARTITION * len(self._engine.rebalance.partitions)))

    def check(self) -> None:
        """Check the engine now."""
        watch = self.watch
        watching = self._guard.watching
        now = self._engine.clock()
        with watching("how long things last"):
            watch.update_facts(now)
        with watching("progress"):
            watch.update_standstill()
        with watching("hanging tasks"):
            watch.update_hang()
        with watching("dominant keys"):
            watch.update_dominant_keys()
        for handler in self._engine.handlers:
            with watching("repeated failures"):
                handler.failures.log.report_repeats()
            if handler.adaptation is not None:
                with watching("the concurrency"):
                    handler.adaptation.update()
        partitions = tuple(self._engine.rebalance.partitions)
        self._reported = {partition: report for partition, report in self._reported.items() if partition in partitions}
        for partition in partitions:
            with watching("a partition"):
                self._check_partition(partition, now)
        with watching("the history"):
            self._add_to_history(now)

    def _add_to_history(self, now: float) -> None:
        if not self.history or abs(time.time() - self.history[-1].at) >= HISTORY_STEP:  # the clock may be set back
            self.history.append(self._sample())
        lags = self.watch.lags
        if not lags or now - lags[-1][0] >= HISTORY_STEP:
            lags.append((now, self._engine.lags()))

    def _sample(self) -> Sample:
        """Take a sample for the history."""
        return sample(self.watch)

    def _describe(self, partition: Partition) -> str:
        """Describe a partition that does not advance, in one line."""
        return explain_partition(self.watch, partition)

    # Stuck partitions -------------------------------------------------------------------

    def _check_partition(self, partition: Partition, now: float) -> None:
        if self._keeps_restarting(partition, now):
            return
        limit = self._engine.settings.stuck_after
        oldest = partition.tracker.oldest
        reported, is_stuck = self._reported.get(partition, (None, False))
        if reported is not None and reported is not oldest:
            logger.warning(
                "%s advances again: record %r no longer holds it up",
                partition.topic_partition,
                reported,
                extra=record_fields("advances_again", reported),
            )
            del self._reported[partition]
            is_stuck = False
        if oldest is None or is_stuck:
            return
        stands = self.watch.stands(partition)
        if partition.stuck(now, limit) and (stands >= limit / _CHECKS or oldest.block is not None):
            self._report(partition, oldest, "stuck", "stuck")
        elif reported is not oldest and stands >= limit / 2 and self._held_up(partition, oldest):
            self._report(partition, oldest, "held_up", "almost everything waits for one record")

    def _keeps_restarting(self, partition: Partition, now: float) -> bool:
        """Whether a partition counts as stuck because its transactions fail; log it once, for all its epochs."""
        name = partition.topic_partition
        failed = partition.commits.held_up_by_transactions
        if failed is None or not partition.commits.keeps_failing(now, self._engine.settings.stuck_after):
            if self._restarting.pop(name, None) is not None:
                message = "%s advances again: a transaction with it has succeeded"
                logger.warning(message, name, extra=partition_fields("advances_again", name))
            return False
        if self._restarting.get(name) != failed.since:
            self._restarting[name] = failed.since
            logger.warning("stuck: %s", self._describe(partition), extra=partition_fields("stuck", name))
        return True

    def _report(self, partition: Partition, oldest: Delivery, event: str, what: str) -> None:
        logger.warning("%s: %s", what, self._describe(partition), extra=record_fields(event, oldest))
        self._reported[partition] = oldest, event == "stuck"

    def _held_up(self, partition: Partition, oldest: Delivery) -> bool:
        """Whether most of the records taken in after *oldest* wait for it: completed, or queued in its shard."""
        window = partition.tracker.position - oldest.offset
        incomplete = len(partition.tracker)
        if window < _LEAST_WINDOW or partition.gate is not Gate.OPEN:
            return False
        shards = self._engine.handlers.of(partition.topic_partition.topic).sharder.shards_of(oldest)
        return window - incomplete + min(shards.behind(oldest), incomplete - 1) > _HELD_UP * window
