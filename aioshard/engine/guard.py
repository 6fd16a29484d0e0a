"""A guard for code that only observes: the app that it observes continues after any error of that code."""

import contextlib
from collections.abc import Iterator

from aioshard.log_fields import get_logger

logger = get_logger("aioshard.engine.guard")


class Guard:
    """Suppresses the errors of observation, and logs each once for each subject and type of exception.

    Observation reads objects of the application, whose methods may raise anything.
    """

    def __init__(self) -> None:
        """Create a guard that has logged nothing."""
        self._logged: set[tuple[str, type[Exception]]] = set()

    @contextlib.contextmanager
    def watching(self, subject: str) -> Iterator[None]:
        """Suppress any exception of the code inside, but neither a cancellation nor an exit.

        Args:
            subject: The object that the code observes, in a few words for the log.
        """
        try:
            yield
        except Exception as error:  # observation must never end what it observes
            if (subject, type(error)) in self._logged:
                return
            self._logged.add((subject, type(error)))
            logger.exception(
                "%s cannot be observed now, and the app continues; this is logged once",
                subject,
                extra={"event": "not_observed", "subject": subject},
            )
