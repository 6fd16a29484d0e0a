"""The watches: say in the log what does not advance, and since when (I11)."""

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
"""Checks within `stuck_after`: a record is reported at the latest a quarter of it too late."""

_LEAST_WINDOW = 100
_HELD_UP = 0.9
_LASTS = 2
"""A partition is reported before that when its oldest record has been the same at so many checks after the first, and
more than this share of at least so many offsets waits for it."""

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

    async def run(self, *others: "TroubleWatch") -> None:
        """Watch until cancelled, and have *others* look at the same moments."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            for watch in (self, *others):
                watch.check()

    def check(self) -> None:
        """Take note of what is wrong now."""
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
    """Looks every second at what is so, and notes since when: for explanations, which cost nothing in between.

    What it says is up to a second too late. What it looks at is a fact about a subject; another fact about the same
    subject begins anew.
    """

    def __init__(self, facts: Callable[[], Iterable[tuple[Hashable, object]]], clock: Callable[[], float]) -> None:
        """Make a watch; `run` is its task.

        Args:
            facts: Gives each subject with what is so of it now.
            clock: Loop time.
        """
        self.looked_at: float | None = None
        """Loop time of the latest look; None before the first."""
        self._facts = facts
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(_LOOK_INTERVAL)

    def check(self) -> None:
        """Note what is so now, and forget what is not any more."""
        now, before = self._clock(), self._seen
        noted = {}
        for subject, fact in self._facts():
            seen = before.get(subject)
            noted[subject] = seen if seen is not None and seen[0] == fact else (fact, now)
        self._seen = noted
        self.looked_at = now

    def of(self, subject: Hashable, fact: object) -> float | None:
        """Loop time at which *fact* was first seen of *subject*; None when it was not. Safe from any thread."""
        seen = self._seen.get(subject)
        return seen[1] if seen is not None and seen[0] == fact else None


def facts_of(
    epochs: Iterable[Epoch], workers: Iterable[Worker], pauses: Iterable[tuple[Hashable, str]], *, settled: bool
) -> Iterator[tuple[Hashable, object]]:
    """What a `SinceWatch` of an engine looks at: what the explanations ask for.

    Args:
        epochs: Those that have not ended.
        workers: Of all handlers.
        pauses: What the application has paused, and why.
        settled: Whether all partitions are ours for certain.
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
    """How long one record has been the oldest of a partition, in checks."""

    def __init__(self, oldest: Delivery) -> None:
        self.oldest = oldest
        self.checks = 0
        self.reported = False
        """Whether the log has a line that it is in the way."""
        self.stuck = False
        """Whether it has one that the partition is stuck."""


class StuckWatch:
    """Looks at the oldest incomplete record of each partition a few times within `stuck_after`.

    One line when a record is halted or has been in hand for that long; one before, when most of what its partition
    has in hand waits for it; and one when the partition goes on.
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
            epochs: Gives those that have not ended.
            describe: What is known of a partition that does not advance, in a line.
            behind: How many deliveries wait in the shard of one.
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
        """Report what has come into the way, and what is not any more, since the last check."""
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
        # One that has waited long behind another is not in the way yet when it comes to the front.
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
        """Whether most of what was taken in behind *oldest* waits for it: done, or queued in its shard."""
        window = epoch.tracker.position - oldest.offset
        if window < _LEAST_WINDOW or epoch.gate is not Gate.OPEN:
            return False
        incomplete = len(epoch.tracker)
        return window - incomplete + min(self._behind(oldest), incomplete - 1) > _HELD_UP * window


_PATIENCE = 30.0
"""Seconds without a turn after which a task hangs, at least: a busy machine may take longer than any time-out."""
_SEVERAL = 5
"""So many times its own time-out a task may take for a turn."""


class Outside(Protocol):
    """Where the facts are."""

    clock: Callable[[], float]

    @property
    def workers(self) -> Collection[Worker]:
        """All workers of all handlers."""

    @property
    def calm(self) -> bool:
        """Whether the brokers answer, as far as the client says."""


class Liveness:
    """Knows whether the fetcher and the commit coordinator still turn, and which records have run for too long.

    Both tasks turn by themselves as long as they live: the client is asked at least once a second, the coordinator
    looks at least once an interval while it owns a partition, and every request of theirs has a time-out. So one that
    does not turn for several times as long waits for what never comes. While brokers are away nothing is concluded.
    """

    def __init__(
        self, pump: Pump, committer: Committer, settings: "Settings", since: SinceWatch, outside: Outside
    ) -> None:
        """Make one; `watch` is to be run.

        Args:
            pump: The fetcher.
            committer: The commit coordinator.
            settings: Time-outs.
            since: Looks at `facts`, among others.
            outside: The engine.
        """
        self.watch = TroubleWatch(self._what_hangs, outside.clock)
        """Tells the log when one of the two hangs, and when that is over."""
        self._since = since
        self._pump = pump
        self._committer = committer
        self._pump_limit = max(_PATIENCE, _SEVERAL * settings.fetch_max_wait)
        commits = max(settings.commit_timeout, settings.commit_interval)
        self._commit_limit = max(_PATIENCE, _SEVERAL * commits)
        self._overdue_after = settings.stuck_after if settings.restart_when_stuck else None
        self._outside = outside

    def facts(self) -> Iterator[tuple[Hashable, object]]:
        """What has to be noted since when it is so, for the sentences."""
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
        """The workers whose run is to be ended by a restart; safe from any thread."""
        since = self._since
        return [worker for worker in self._outside.workers if since.of(("overdue", worker), worker.started) is not None]
