"""One call of a transactional producer: how long it may take, and what it waits for."""

import asyncio
import time
from typing import Final, NamedTuple

from aioshard.errors import CommitError
from aioshard.kafka.wire.errors import WireError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds until a request is sent again; they double with each attempt."""
_LATE: Final = 3.0
"""Seconds after which a request that is not answered, or again and again with an error, is reported."""


class _Wait(NamedTuple):
    """A request that has no final answer yet."""

    request: str
    since: float
    """By `time.monotonic`."""
    latest: WireError | None


class Call:
    """A call that sends requests until they have final answers, or until its time is over."""

    def __init__(self, seconds: float) -> None:
        """Begin a call that may take so long."""
        self.is_abandoned = False
        """Whether nobody waits for the result any more."""
        self.must_end = False
        """Whether it goes on nevertheless, because nothing else can tell how a transaction has ended."""
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._wait: _Wait | None = None
        self._earlier: _Wait | None = None
        """The request of earlier calls that has no final answer yet."""
        self._pause = _SHORTEST_PAUSE

    @property
    def left(self) -> float:
        """The seconds that it still may take; at least 0."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether nothing more may be sent."""
        return self.left <= 0 or (self.is_abandoned and not self.must_end)

    @property
    def delay(self) -> str | None:
        """The request that has taken too long, as the rest of a sentence; None without one."""
        wait = self._wait
        if wait is None or (lasts := time.monotonic() - wait.since) < _LATE:
            return None
        answer = "nothing has answered" if wait.latest is None else f"the latest answer is: {wait.latest}"
        return f"waits for {wait.request} for {lasts:.0f} s; {answer}"

    @property
    def unanswered(self) -> _Wait | None:
        """The request without a final answer, of this call or of one before."""
        return self._wait or self._earlier

    def follow(self, previous: "Call") -> None:
        """Count the time of a request without a final answer from its first attempt on, in the call before."""
        self._earlier = previous.unanswered

    @property
    def latest(self) -> WireError | None:
        """The latest error of the request that has no final answer yet."""
        return None if self._wait is None else self._wait.latest

    def expect(self, request: str) -> None:
        """Note that a request is about to be sent."""
        if self._wait is None or self._wait.request != request:
            earlier = self._earlier
            since = time.monotonic()
            if earlier is not None and earlier.request == request:
                since = earlier.since
            self._wait = _Wait(request, since, None)
            self._pause = _SHORTEST_PAUSE

    def finish(self) -> None:
        """Note that the request has its final answer."""
        if self._wait is not None and self._earlier is not None and self._wait.request == self._earlier.request:
            self._earlier = None
        self._wait = None

    async def pause(self, error: WireError | None) -> None:
        """Wait a moment before a request is sent again, because of an error or an incomplete answer.

        Raises:
            CommitError: The time is over, or the caller has given up.
        """
        wait = self._wait
        if wait is not None and error is not None:
            self._wait = wait._replace(latest=error)
        self.check()
        await asyncio.sleep(min(self._pause, self.left))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self.check()

    def check(self) -> None:
        """Raise if nothing more may be sent.

        Raises:
            CommitError: The time is over, or the caller has given up.
        """
        if not self.is_over:
            return
        what = "requests" if self._wait is None else self._wait.request
        if self.left > 0:
            raise CommitError(f"a transaction was given up while it waited for {what}")
        latest = None if self._wait is None else self._wait.latest
        why = "nothing has answered" if latest is None else str(latest)
        raise CommitError(f"a transaction waited for {what} for {self._seconds:g} s: {why}")
