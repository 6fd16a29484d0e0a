"""The adaptive concurrency of a running handler: reads what its runs come to, and moves the limit of its shards."""

from collections import Counter
from collections.abc import Callable

from aioshard.core.adaptive import AdaptiveLimit, Figures
from aioshard.core.options import Adaptive
from aioshard.engine.counts import Counters
from aioshard.engine.failures import FailureHandler
from aioshard.engine.shards import Shards
from aioshard.log_fields import get_logger
from aioshard.observe import AdaptiveStatistics

logger = get_logger("aioshard.engine.adaptation")


class Adaptation:
    """Keeps as many workers of one handler running as its back end bears.

    All workers up to the maximum exist; those above the limit stay idle. Owned by the event loop; its statistics are
    safe from any thread.
    """

    def __init__(
        self,
        adaptive: Adaptive,
        *,
        handler: str,
        shards: Shards,
        failures: FailureHandler,
        counters: Counters,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        """Begin with the initial concurrency.

        Args:
            adaptive: Bounds of the concurrency.
            handler: Name of the handler, for log lines.
            shards: The shards that all workers serve.
            failures: The failure handler, which counts `RetryLater`.
            counters: The counters of the handler.
            clock: Returns the loop time.
            now: Returns the time since the Unix epoch.
        """
        self.adaptive = adaptive
        self._handler = handler
        self._limit = AdaptiveLimit(adaptive)
        self._shards = shards
        self._failures = failures
        self._counters = counters
        self._clock = clock
        # Processes that share a back end must probe it at the same moments. A clock that is set must not move them.
        self._ahead = now() - clock()
        self._moves: Counter[str] = Counter()
        self._apply()

    @property
    def limit(self) -> int:
        """The current concurrency."""
        return self._limit.limit

    def update(self) -> None:
        """Move the limit if the runs since the last call say so."""
        before = self._limit.move
        self._limit.look(self._figures())
        move = self._limit.move
        if move is before:
            return
        self._moves[move.reason] += 1
        self._apply()
        message = "handler %s: concurrency %d, %d before: %s"
        fields = {"event": "concurrency", "handler": self._handler, "concurrency": self.limit, "reason": move.reason}
        logger.debug(message, self._handler, self.limit, move.before, self._why(), extra=fields)

    def _apply(self) -> None:
        self._shards.limit_workers(self.limit, self.adaptive.maximum)
        self._failures.workers = self.limit

    def _figures(self) -> Figures:
        durations = [counts.durations for counts in self._counters.topics.values()]
        return Figures(
            at=self._clock() + self._ahead,
            runs=sum(sum(histogram.buckets) for histogram in durations),
            seconds=sum(histogram.total for histogram in durations),
            processed=self._counters.processed,
            overloads=self._failures.overloads,
        )

    def statistics(self) -> AdaptiveStatistics:
        """Return the limit and why it moved last. Safe from any thread."""
        limit = self._limit
        move = limit.move
        return AdaptiveStatistics(
            minimum=self.adaptive.minimum,
            maximum=self.adaptive.maximum,
            before=move.before,
            reason=move.reason,
            why=self._why(),
            since=max(self._clock() + self._ahead - move.at, 0.0) if self._moves else None,
            latency=limit.latency,
            baseline=limit.baseline,
            moves=dict(self._moves),
        )

    def _why(self) -> str:
        """Say in words why the limit moved last, with the latencies of then."""
        move = self._limit.move
        latency = _shown(move.latency)
        baseline = _shown(move.baseline)
        match move.reason:
            case "start":
                return "it has not moved since the start"
            case "spare":
                return f"records took {latency}, as with an idle back end, so it bears more"
            case "queue":
                return f"records took {latency}, and {baseline} with an idle back end, so they queued there"
            case "overload":
                return "the handler raised RetryLater: its back end was overloaded"
            case "failures":
                return "no run succeeded"
            case "probe":
                return f"the latency of an idle back end is measured regularly; it was {baseline}"


def _shown(seconds: float | None) -> str:
    """Return a latency in words."""
    return "an unknown time" if seconds is None else f"{seconds * 1000:.3g} ms"
