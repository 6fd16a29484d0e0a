"""Facts about an app that consumes: since when they hold, and which problems last."""

from collections import deque
from collections.abc import Hashable, Iterator

from aioshard.core.fairness import KeyTimes
from aioshard.core.loop_block import LoopBlock
from aioshard.core.tail import Tail, tail_of
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.handler import ActiveHandler
from aioshard.engine.loop_watch import LoopWatch
from aioshard.engine.runtime import Engine
from aioshard.engine.trouble import Trouble
from aioshard.records import TopicPartition

_PATIENCE = 30.0
"""Minimum seconds without progress after which a task hangs: a busy machine may take longer than any timeout."""
_TIMEOUT_FACTOR = 5
"""A task hangs when one iteration takes this many times its timeout."""


class Watch:
    """Facts about an engine, checked once a second, so that explanations cost nothing in between.

    Remembers since when facts hold, up to a second late. The intake and the commit coordinator make progress even if
    the brokers do not answer: if the counter of one has not changed for several times its timeout, the task hangs.
    `Monitor` updates it. Written by the event loop, read from any thread.
    """

    def __init__(self, engine: Engine, *, watch_loop: bool) -> None:
        """Make a watch that knows nothing yet.

        Args:
            engine: The engine.
            watch_loop: Whether to watch from a thread for a blocked event loop.
        """
        self.engine = engine
        self.loop = LoopWatch(engine.handlers) if watch_loop else None
        self.standstill = Trouble(engine.clock)
        """Why consuming makes no progress although the client is alive, such as unreachable brokers."""
        self.hang = Trouble(engine.clock)
        """A task of the engine that makes no progress although the brokers answer."""
        self.lags: deque[tuple[float, dict[TopicPartition, int]]] = deque(maxlen=13)
        """The lag of each partition in the last minute, with the loop time of each."""
        self._facts: dict[Hashable, tuple[object, float]] = {}
        self._key_times = {handler: KeyTimes() for handler in engine.handlers if handler.spec.batch is None}
        self.dominant_keys: dict[ActiveHandler, tuple[Delivery, float]] = {}
        """The key that takes most of the time of a handler's workers: a record of it, and its share of the time."""

    # Updates ----------------------------------------------------------------------------

    def update_facts(self, now: float) -> None:
        """Find the facts that hold now."""
        before = self._facts
        current = {}
        for subject, fact in self._find_facts():
            seen = before.get(subject)
            current[subject] = seen if seen is not None and seen[0] == fact else (fact, now)
        self._facts = current

    def update_standstill(self) -> None:
        """Find out whether consuming makes progress; without a client it is not known whether a standstill is over."""
        if self.engine.client.transport is not None:
            self.standstill.check(self.engine.standstill)

    def update_dominant_keys(self) -> None:
        """Find out which keys the workers spend their time on."""
        for handler, times in self._key_times.items():
            running = [worker.delivery for worker in handler.handling if worker.delivery is not None]
            times.look([delivery.key for delivery in running])
            dominant = times.dominant
            records = [delivery for delivery in running if dominant is not None and delivery.key == dominant.key]
            if dominant is not None and records:
                self.dominant_keys[handler] = records[0], dominant.share
            elif dominant is None:
                self.dominant_keys.pop(handler, None)

    def update_hang(self) -> None:
        """Find out whether a task hangs."""
        self.hang.check(self._find_hang())

    # Since when -------------------------------------------------------------------------

    def lasts(self, subject: Hashable, fact: object) -> float | None:
        """Seconds since *fact* has held for *subject*; None if it is not known to hold. Safe from any thread."""
        seen = self._facts.get(subject)
        return self.engine.clock() - seen[1] if seen is not None and seen[0] == fact else None

    @property
    def blocked(self) -> LoopBlock | None:
        """Why the event loop is blocked now; None while it is not, or if it is not watched. Safe from any thread."""
        return None if self.loop is None else self.loop.blocked()

    def tail(self) -> Tail:
        """Describe which partitions finish last, as fast as in the last minute. Safe from any thread."""
        at, before = self.lags[0] if self.lags else (0.0, {})
        return tail_of(self.engine.lags(), before, self.engine.clock() - at)

    def stands(self, partition: Epoch) -> float:
        """Seconds for which the committable offset has not advanced; 0 if it has since the last check."""
        return self.lasts(("committable", partition.topic_partition), partition.tracker.committable) or 0.0

    def _find_facts(self) -> Iterator[tuple[Hashable, object]]:
        engine = self.engine
        yield "opened", engine.rebalance.opened.is_set()
        yield "calm", engine.trouble.why is None and engine.standstill is None
        yield "intake", engine.intake.turns
        yield "committer", engine.committer.turns if engine.committer.owns else None
        for paused, why in engine.pauses.items():
            yield ("application", paused), why
        for partition in engine.rebalance.partitions:
            name = partition.topic_partition
            yield ("committable", name), partition.tracker.committable
            yield ("position", name), partition.tracker.position
            yield ("gate", name), partition.gate
            for who, why in partition.pauses.items():
                yield ("pause", name, who), why
        for worker in engine.handlers.workers:
            if worker.cancelled:
                yield worker, worker.started

    # Hanging tasks ----------------------------------------------------------------------

    def _find_hang(self) -> str | None:
        engine = self.engine
        if not engine.handlers:
            return None  # neither task runs
        calm = self.lasts("calm", fact=True) or 0.0  # a task that waits for the brokers does not hang
        limit = max(_PATIENCE, _TIMEOUT_FACTOR * engine.settings.fetch_max_wait)
        if min(self.lasts("intake", engine.intake.turns) or 0.0, calm) > limit:
            return f"the intake hangs: no poll of the client has returned for {limit:g} s, although the brokers answer"
        limit = max(_PATIENCE, _TIMEOUT_FACTOR * max(engine.settings.commit_timeout, engine.settings.commit_interval))
        if min(self.lasts("committer", engine.committer.turns) or 0.0, calm) > limit:
            return (
                f"the commit coordinator hangs: no commit has ended for {limit:g} s, although commits time out and "
                "the brokers answer"
            )
        return None
