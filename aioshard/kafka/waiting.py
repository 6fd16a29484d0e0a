"""Let a poll wait until the client has something new, the time-out passes, or another task wakes it."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiokafka import errors as kafka

from aioshard.errors import ClientLostError
from aioshard.kafka.intake import Found
from aioshard.kafka.internals import Internals
from aioshard.kafka.translate import reason

__all__ = ["Waiting", "raise_ended_task"]


class Waiting:
    """Lets the polls of one client wait, and wakes them. Owned by one event loop; one poll at a time."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

    async def until_new(self, look: Callable[[], tuple[Internals, Found]], timeout: float) -> Found:
        """Look repeatedly; return the result once part of it is new, or the time-out passes.

        Does not suspend if the first look finds something new.

        Args:
            look: Takes fetched records; an error that it raises ends the wait.
            timeout: Seconds.

        Raises:
            KafkaError: The client gave up on something during the wait.
            ClientLostError: The client itself failed with an unexpected error.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._woken = False
        while True:
            internals, found = look()
            remaining = deadline - loop.time()
            if found.new or self._woken or remaining <= 0:
                return found
            waiter = self._waiter = internals.waiter()
            timer = loop.call_later(remaining, self.look_again)
            try:
                await waiter
            except kafka.KafkaError:
                raise
            except Exception as error:
                raise ClientLostError(f"the Kafka client failed ({reason(error)}); a new client is needed") from error
            finally:
                timer.cancel()
                self._waiter = None

    def wake(self) -> None:
        """Make a waiting poll return what it has."""
        self._woken = True
        self.look_again()

    def look_again(self, _ended: "asyncio.Task[Any] | None" = None) -> None:
        """Make a waiting poll look again; also usable as a task's callback."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def raise_ended_task(internals: Internals) -> None:
    """Raise if a background task has ended that the client needs.

    Raises:
        ClientLostError: Such a task has ended.
    """
    for what, task in internals.background_tasks().items():
        if task.done():
            cause = None if task.cancelled() else task.exception()
            told = reason(cause) if cause else "without an error"
            raise ClientLostError(f"the Kafka client's task for {what} ended ({told})") from cause
