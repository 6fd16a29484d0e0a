"""Watches that log stuck partitions, overdue handlers and hanging tasks, and since when (I11)."""

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.fetcher import Pump
from aioshard.engine.log_fields import record_fields
from aioshard.engine.worker import Worker

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Liveness", "Outside", "SinceWatch", "StuckWatch", "TimeoutWatch", "TroubleWatch", "facts_of"]

logger = logging.getLogger("aioshard.engine.watch")

_CHECKS = 4
"""Checks per `stuck_after`: a record is reported late by at most a quarter of it."""

_LEAST_WINDOW = 100
_HELD_UP = 0.9
_LASTS = 2
"""A partition is reported earlier if its oldest record stays the same for this many checks after the first, and if at
least `_LEAST_WINDOW` offsets follow it, of which more than the share `_HELD_UP` wait for it."""

_LOOK_INTERVAL = 1.0

_TIMEOUT_CHECKS = 20
_SHORTEST_CHECK = 0.005
_LONGEST_CHECK = 0.5
"""Attempts are checked twenty times per timeout, but at most every 5 ms and at least every half second."""
_LETS_GO = 1.0
"""Seconds after a timeout within which a cancelled handler should have ended."""


class TroubleWatch:
    """Checks every second for problems that stop everything without raising.

    A client without brokers keeps retrying, and so does the lookup of a position. A problem that passes within a second
    is not reported. One that lasts gets one log line when it begins and one when it is over.
    """

    def __init__(self, ask: Callable[[], str | None], clock: Callable[[], float]) -> None:
        """Make a watch; `run` is its task.

        Args:
            ask: Returns the current problem in a sentence, or None.
            clock: Loop time.
        """
        self.trouble: str | None = None
        """The current problem, once it has lasted for a second."""
        self._ask = ask
        self._clock = clock
        self._since: float | None = None

    async def run(self, *others: "TroubleWatch") -> None:
        """Watch until cancelled, and make *others* check at the same moments."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            for watch in (self, *others):
                watch.check()

    def check(self) -> None:
        """Check for a problem now."""
        found = self._ask()
        if found is None:
            if self.trouble is not None:
                lasted = self._clock() - (self._since or 0.0)
                logger.warning("over after %.0f s: %s", lasted, self.trouble, extra={"event": "trouble_over"})
            self.trouble = self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif found != self.trouble:
            logger.warning("%s", found, extra={"event": "trouble"})
            self.trouble = found

    def sentence(self, now: float) -> str | None:
        """The problem and how long it has lasted by loop time *now*."""
        trouble, since = self.trouble, self._since
        return None if trouble is None or since is None else f"{trouble} (for {now - since:.0f} s)"


class TimeoutWatch:
    """Ends overdue attempts of one handler, with one timer for all its workers and none per record.

    A handler that does not end when it is cancelled is reported once; its shard waits for it.
    """

    def __init__(self, workers: Sequence[Worker], timeout: float, clock: Callable[[], float]) -> None:
        """Make a watch; `run` is its task.

        Args:
            workers: Workers of the handler; read again at each check.
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
        """Time out overdue attempts, and report handlers that do not end afterwards."""
        now = self._clock()
        still: dict[Delivery, Worker] = {}
        for worker in self._workers:
            if worker.overdue(now):
                worker.time_out()
            elif worker.cancelled and now - worker.started > self._timeout + _LETS_GO:
                still |= dict.fromkeys(worker.deliveries[:1], worker)
        for delivery in still.keys() - self._reported:
            message = "the handler of %r%s was cancelled after timeout=%g s and does not end: its shard waits for it"
            others = len(still[delivery].deliveries) - 1
            more = f" and {others} more of its batch" if others > 0 else ""
            logger.error(message, delivery, more, self._timeout, extra=record_fields("outlives_time_out", delivery))
        self._reported = set(still)


class SinceWatch:
    """Checks facts every second and remembers since when each one holds, so that explanations cost nothing in between.

    Its times are up to a second late. Each subject has one fact; when the fact changes, its time starts again.
    """

    def __init__(self, facts: Callable[[], Iterable[tuple[Hashable, object]]], clock: Callable[[], float]) -> None:
        """Make a watch; `run` is its task.

        Args:
            facts: Returns each subject with its current fact.
            clock: Loop time.
        """
        self.looked_at: float | None = None
        """Loop time of the latest check; None before the first."""
        self._facts = facts
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(_LOOK_INTERVAL)

    def check(self) -> None:
        """Remember the current facts, and forget those that no longer hold."""
        now, before = self._clock(), self._seen
        noted = {}
        for subject, fact in self._facts():
            seen = before.get(subject)
            noted[subject] = seen if seen is not None and seen[0] == fact else (fact, now)
        self._seen = noted
        self.looked_at = now

    def of(self, subject: Hashable, fact: object) -> float | None:
        """Loop time at which *fact* was first seen of *subject*; None if it does not hold. Safe from any thread."""
        seen = self._seen.get(subject)
        return seen[1] if seen is not None and seen[0] == fact else None


def facts_of(
    epochs: Iterable[Epoch], workers: Iterable[Worker], pauses: Iterable[tuple[Hashable, str]], *, settled: bool
) -> Iterator[tuple[Hashable, object]]:
    """Facts of an engine for a `SinceWatch`, which the explanations use.

    Args:
        epochs: The epochs that have not ended.
        workers: The workers of all handlers.
        pauses: Partitions and handlers that the application paused, and why.
        settled: Whether all partitions are certain to be ours.
    """
    yield "settled", settled
    for paused, why in pauses:
        yield ("application", paused), why
    for epoch in epochs:
        name = epoch.topic_partition
        yield ("committable", name), epoch.tracker.committable
        yield ("position", name), epoch.tracker.position
        if epoch.gate:
            yield ("gate", name), epoch.gate
            for who, why in epoch.pauses.items():
                yield ("pause", name, who), why
    for worker in workers:
        if worker.asked and worker.cancelled:
            yield worker, worker.started


class _Episode:
    """For how many checks one record has been the oldest of its partition."""

    def __init__(self, oldest: Delivery) -> None:
        self.oldest = oldest
        self.checks = 0
        self.reported = False
        """Whether the log says that the record holds up its partition."""
        self.stuck = False
        """Whether the log says that the partition is stuck."""


class StuckWatch:
    """Checks the oldest incomplete record of each partition a few times within `stuck_after`.

    Logs one line when a record is halted or has been incomplete for that long, one earlier if most of its partition's
    records wait for it, and one when the partition resumes.
    """

    def __init__(
        self,
        epochs: Callable[[], Iterable[Epoch]],
        describe: Callable[[Epoch], str],
        behind: Callable[[Delivery], int],
        stuck_after: float,
        clock: Callable[[], float],
    ) -> None:
        """Make a watch; `run` is its task.

        Args:
            epochs: Returns the epochs that have not ended.
            describe: Describes a partition that does not advance, in one line.
            behind: Returns how many deliveries wait in the shard of the given one.
            stuck_after: Seconds.
            clock: Loop time.
        """
        self._epochs = epochs
        self._describe = describe
        self._behind = behind
        self._stuck_after = stuck_after
        self._clock = clock
        self._episodes: dict[Epoch, _Episode] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._stuck_after / _CHECKS)
            self.check()

    def check(self) -> None:
        """Report records that hold up their partition, and those that no longer do, since the last check."""
        episodes = {}
        for epoch in self._epochs():
            oldest, episode = epoch.tracker.oldest, self._episodes.get(epoch)
            if episode is not None and episode.oldest is not oldest:
                if episode.reported:
                    message = "%s goes on: record %r is not in the way any more"
                    fields = record_fields("goes_on", episode.oldest)
                    logger.warning(message, epoch.topic_partition, episode.oldest, extra=fields)
                episode = None
            if oldest is not None:
                episodes[epoch] = episode = episode or _Episode(oldest)
                self._look_at(epoch, episode)
        self._episodes = episodes

    def _look_at(self, epoch: Epoch, episode: _Episode) -> None:
        # A record that has waited long behind another one is not to blame the moment it becomes the oldest.
        blocked = episode.checks > 0 or episode.oldest.block is not None
        if not episode.stuck and blocked and epoch.stuck(self._clock(), self._stuck_after):
            fields = record_fields("stuck", episode.oldest)
            logger.warning("stuck: %s", self._describe(epoch), extra=fields)
            episode.stuck = episode.reported = True
        elif not episode.reported and episode.checks >= _LASTS and self._held_up(epoch, episode.oldest):
            fields = record_fields("held_up", episode.oldest)
            logger.warning("almost everything waits for one record: %s", self._describe(epoch), extra=fields)
            episode.reported = True
        episode.checks += 1

    def _held_up(self, epoch: Epoch, oldest: Delivery) -> bool:
        """Whether most of the records taken in after *oldest* wait for it: completed, or queued in its shard."""
        window = epoch.tracker.position - oldest.offset
        if window < _LEAST_WINDOW or epoch.gate is not Gate.OPEN:
            return False
        incomplete = len(epoch.tracker)
        return window - incomplete + min(self._behind(oldest), incomplete - 1) > _HELD_UP * window


_PATIENCE = 30.0
"""Least seconds without progress after which a task hangs: a busy machine may take longer than any timeout."""
_SEVERAL = 5
"""How many times its timeout a task may take for one round."""


class Outside(Protocol):
    """The parts of the engine that the liveness check uses."""

    clock: Callable[[], float]

    @property
    def workers(self) -> Collection[Worker]:
        """All workers of all handlers."""

    @property
    def calm(self) -> bool:
        """Whether the brokers answer, according to the client."""


class Liveness:
    """Knows whether the pump and the commit coordinator still make progress, and which records run for too long.

    Both tasks make progress on their own as long as they live: the pump polls the client at least once a second, the
    coordinator checks at least once an interval while it owns a partition, and each of their requests has a timeout. If
    one makes no progress for several times as long, it waits for something that never comes. While the brokers do not
    answer, nothing is concluded.
    """

    def __init__(
        self, pump: Pump, committer: Committer, settings: "Settings", since: SinceWatch, outside: Outside
    ) -> None:
        """Make one; its `watch` must be run.

        Args:
            pump: The pump.
            committer: The commit coordinator.
            settings: Timeouts.
            since: A watch that checks `facts`, among others.
            outside: The engine.
        """
        self.watch = TroubleWatch(self._what_hangs, outside.clock)
        """Logs when one of the two tasks hangs, and when that is over."""
        self._since = since
        self._pump = pump
        self._committer = committer
        self._pump_limit = max(_PATIENCE, _SEVERAL * settings.fetch_max_wait)
        commits = max(settings.commit_timeout, settings.commit_interval)
        self._commit_limit = max(_PATIENCE, _SEVERAL * commits)
        self._overdue_after = settings.stuck_after if settings.restart_when_stuck else None
        self._outside = outside

    def facts(self) -> Iterator[tuple[Hashable, object]]:
        """Facts whose start times the liveness check needs."""
        yield "calm", self._outside.calm
        yield "pump", self._pump.turns
        yield "committer", self._committer.turns if self._committer.owns else None
        if self._overdue_after is not None:
            now = self._outside.clock()
            for worker in self._outside.workers:
                delivery = worker.delivery
                if delivery is not None and delivery.detour is None and now - worker.started > self._overdue_after:
                    yield ("overdue", worker), worker.started

    def _what_hangs(self) -> str | None:
        calm = self._since.of("calm", fact=True)
        if calm is None:
            return None
        now = self._outside.clock()
        asked = self._since.of("pump", self._pump.turns)
        if asked is not None and now - max(asked, calm) > self._pump_limit:
            return (
                f"the fetcher hangs: the client has not come back with records or without for {self._pump_limit:g} s, "
                "although the brokers answer"
            )
        looked = self._since.of("committer", self._committer.turns)
        if self._committer.owns and looked is not None and now - max(looked, calm) > self._commit_limit:
            return (
                f"the commit coordinator hangs: no commit has ended for {self._commit_limit:g} s, although each has a "
                "time-out and the brokers answer"
            )
        return None

    def overdue(self) -> list[Worker]:
        """Workers whose run should be ended by a restart; safe from any thread."""
        since = self._since
        return [worker for worker in self._outside.workers if since.of(("overdue", worker), worker.started) is not None]
