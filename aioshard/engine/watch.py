"""Watches that log stuck partitions, overdue handlers and hanging tasks, and that remember since when (I11)."""

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator

from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.log_fields import record_fields
from aioshard.engine.loop_watch import LoopWatch
from aioshard.engine.partition import Partition
from aioshard.engine.runtime import Engine
from aioshard.engine.trouble import Trouble
from aioshard.engine.worker import Worker

logger = logging.getLogger("aioshard.engine.watch")

_INTERVAL = 1.0
_CHECKS = 4
"""Least checks per `stuck_after`; a record that has just become the oldest is not blamed for a quarter of it."""
_LEAST_WINDOW = 100
_HELD_UP = 0.9
"""A partition is reported after half of `stuck_after` if at least `_LEAST_WINDOW` offsets follow its oldest record, of
which more than this share wait for it."""
_PATIENCE = 30.0
"""Least seconds without progress after which a task hangs: a busy machine may take longer than any timeout."""
_SEVERAL = 5
"""How many times its timeout a task may take for one round."""


class Watch:
    """Looks at a running engine once a second, so that explanations cost nothing in between.

    It remembers since when facts hold, up to a second late. It logs one line when a problem begins and one when it is
    over: for a partition that is stuck, for brokers that do not answer, and for a task that hangs. The pump and the
    commit coordinator make progress on their own as long as they live, whatever the brokers answer: one whose counter
    stands still for several times its timeout waits for something that never comes.
    """

    def __init__(self, engine: Engine, describe: Callable[["Watch", Partition], str], *, watch_loop: bool) -> None:
        """Make a watch; `run` is its task.

        Args:
            engine: The engine.
            describe: Describes a partition that does not advance, in one line.
            watch_loop: Whether to watch from a thread for a blocked event loop.
        """
        self.engine = engine
        self.loop = LoopWatch(self._busy) if watch_loop else None
        self.standstill = Trouble(engine.clock)
        """Why consuming makes no progress although the client is alive, such as unreachable brokers."""
        self.hang = Trouble(engine.clock)
        """A task of the engine that makes no progress although the brokers answer."""
        self._describe = describe
        self._facts: dict[Hashable, tuple[object, float]] = {}
        self._reported: dict[Partition, tuple[Delivery, bool]] = {}
        """Partitions that the log reports, with their oldest record and whether they count as stuck."""

    async def run(self) -> None:
        """Watch until cancelled."""
        interval = min(_INTERVAL, self.engine.settings.stuck_after / _CHECKS)
        async with asyncio.TaskGroup() as group:
            if self.loop is not None:
                group.create_task(self.loop.run(), name="loop watch")
            while True:
                self.check()
                await asyncio.sleep(interval)

    def check(self) -> None:
        """Look at the engine now."""
        engine, before = self.engine, self._facts
        now = engine.clock()
        current = {}
        for subject, fact in self._find_facts():
            seen = before.get(subject)
            current[subject] = seen if seen is not None and seen[0] == fact else (fact, now)
        self._facts = current
        self.standstill.check(engine.standstill)
        self.hang.check(self._find_hang())
        partitions = engine.rebalance.epochs
        self._reported = {partition: told for partition, told in self._reported.items() if partition in partitions}
        for partition in partitions:
            self._check_partition(partition, now)

    # Since when -------------------------------------------------------------------------

    def lasts(self, subject: Hashable, fact: object) -> float | None:
        """Seconds for which *fact* holds of *subject*; None if it is not known to hold. Safe from any thread."""
        seen = self._facts.get(subject)
        return self.engine.clock() - seen[1] if seen is not None and seen[0] == fact else None

    def stands(self, partition: Epoch) -> float:
        """Seconds for which the committable offset has not advanced; 0 if it has since the last look."""
        return self.lasts(("committable", partition.topic_partition), partition.tracker.committable) or 0.0

    def _find_facts(self) -> Iterator[tuple[Hashable, object]]:
        engine = self.engine
        yield "settled", engine.rebalance.settled.is_set()
        yield "calm", engine.trouble.why is None and engine.standstill is None
        yield "pump", engine.intake.turns
        yield "committer", engine.committer.turns if engine.committer.owns else None
        for paused, why in engine.pauses.items():
            yield ("application", paused), why
        for epoch in engine.rebalance.epochs:
            name = epoch.topic_partition
            yield ("committable", name), epoch.tracker.committable
            yield ("position", name), epoch.tracker.position
            yield ("gate", name), epoch.gate
            for who, why in epoch.pauses.items():
                yield ("pause", name, who), why
        for worker in engine.workers:
            if worker.cancelled:
                yield worker, worker.started

    # Hanging tasks ----------------------------------------------------------------------

    def _find_hang(self) -> str | None:
        engine = self.engine
        calm = self.lasts("calm", fact=True) or 0.0  # what waits for the brokers does not hang
        limit = max(_PATIENCE, _SEVERAL * engine.settings.fetch_max_wait)
        if min(self.lasts("pump", engine.intake.turns) or 0.0, calm) > limit:
            return (
                f"the fetcher hangs: the client has not come back with records or without for {limit:g} s, "
                "although the brokers answer"
            )
        limit = max(_PATIENCE, _SEVERAL * max(engine.settings.commit_timeout, engine.settings.commit_interval))
        if min(self.lasts("committer", engine.committer.turns) or 0.0, calm) > limit:
            return (
                f"the commit coordinator hangs: no commit has ended for {limit:g} s, although each has a time-out and "
                "the brokers answer"
            )
        return None

    def _busy(self) -> list[tuple[str, Worker]]:
        """The workers that run something, each with the name of its handler. Safe from any thread."""
        return [
            (handler.spec.name, worker)
            for handler in self.engine.handlers
            for worker in tuple(handler.workers)
            if worker.deliveries
        ]

    # Stuck partitions -------------------------------------------------------------------

    def _check_partition(self, partition: Partition, now: float) -> None:
        limit, oldest = self.engine.settings.stuck_after, partition.tracker.oldest
        told, is_stuck = self._reported.get(partition, (None, False))
        if told is not None and told is not oldest:
            message = "%s advances again: record %r no longer holds it up"
            fields = record_fields("advances_again", told)
            logger.warning(message, partition.topic_partition, told, extra=fields)
            del self._reported[partition]
            is_stuck = False
        if oldest is None or is_stuck:
            return
        stands = self.stands(partition)
        if partition.stuck(now, limit) and (stands >= limit / _CHECKS or oldest.block is not None):
            self._report(partition, oldest, "stuck", "stuck")
        elif told is not oldest and stands >= limit / 2 and self._held_up(partition, oldest):
            self._report(partition, oldest, "held_up", "almost everything waits for one record")

    def _report(self, partition: Partition, oldest: Delivery, event: str, what: str) -> None:
        logger.warning("%s: %s", what, self._describe(self, partition), extra=record_fields(event, oldest))
        self._reported[partition] = oldest, event == "stuck"

    def _held_up(self, partition: Partition, oldest: Delivery) -> bool:
        """Whether most of the records taken in after *oldest* wait for it: completed, or queued in its shard."""
        window, incomplete = partition.tracker.position - oldest.offset, len(partition.tracker)
        if window < _LEAST_WINDOW or partition.gate is not Gate.OPEN:
            return False
        shards = self.engine.handler_of(partition.topic_partition.topic).feed.shards_of(oldest)
        return window - incomplete + min(shards.behind(oldest), incomplete - 1) > _HELD_UP * window
