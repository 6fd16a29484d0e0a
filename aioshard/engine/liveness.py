"""What of an engine has stopped although nothing keeps it from going on: what a restart of the process cures."""

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import TYPE_CHECKING, Protocol

from aioshard.engine.committer import Committer
from aioshard.engine.fetcher import Pump
from aioshard.engine.watch import SinceWatch, TroubleWatch
from aioshard.engine.worker import Worker

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Liveness", "Outside"]

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
