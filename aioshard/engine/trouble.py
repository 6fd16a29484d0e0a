"""Why something does not work at the moment, and since when."""

from collections.abc import Callable

from aioshard.log_fields import get_logger

logger = get_logger("aioshard.engine.trouble")


class Trouble:
    """A problem that lasts until it is ended. Written by the event loop, read from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without a problem; *clock* is loop time."""
        self.why: str | None = None
        """The problem in a sentence; None without one."""
        self.since = 0.0
        """Loop time at which it began."""
        self._clock = clock
        self._noticed: float | None = None
        """When `check` saw a problem that it has not reported yet."""

    def report(self, why: str) -> bool:
        """Record the problem; return whether it is new or has changed, so that it should be logged."""
        changed = why != self.why
        if self.why is None:
            self.since = self._clock()
        self.why = why
        return changed

    def end(self) -> float | None:
        """End the problem; return for how many seconds it lasted, or None if there was none."""
        if self.why is None:
            return None
        self.why = None
        return self._clock() - self.since

    def check(self, why: str | None) -> None:
        """Record and log a problem that two checks in a row have found, and log its end.

        Args:
            why: The problem that this check has found; None without one.
        """
        before = self.why
        if why is None:
            lasted = self.end()
            self._noticed = None
            if lasted is not None:
                logger.warning("over after %.0f s: %s", lasted, before, extra={"event": "trouble_over"})
        elif self._noticed is None:
            self._noticed = self._clock()
        elif self.report(why):
            logger.warning("%s", why, extra={"event": "trouble"})
            self.since = self._noticed

    def sentence(self, now: float) -> str | None:
        """The problem and how long it has lasted by loop time *now*."""
        return None if self.why is None else f"{self.why} (for {now - self.since:.0f} s)"
