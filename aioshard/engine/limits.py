"""The rate limits of a running app: one object for each limit, shared by the handlers that name it."""

import asyncio
import math
from collections.abc import Callable, Hashable

from aioshard.core.limits import KeyBuckets, TokenBucket
from aioshard.core.options import Limit
from aioshard.core.sharding import record_key
from aioshard.engine.epoch import Delivery
from aioshard.observe import LimitStatistics

_PATIENCE = 0.005
"""Seconds after which a token that shards were called for, and did not take, goes to the next ones that wait."""
_AHEAD = 10.0
"""Seconds of work that a rate-limited handler may queue: more would only wait in memory and grow old."""


class WaitingTime:
    """How long at least one run has waited for a limit."""

    __slots__ = ("_ended", "_since")

    def __init__(self) -> None:
        """Start with no time and nothing that waits."""
        self._ended = 0.0
        """Seconds of the waits that have ended."""
        self._since: float | None = None
        """When the present wait began."""

    def update(self, now: float, *, waits: bool) -> None:
        """Record whether something waits from *now* on."""
        since = self._since
        if waits and since is None:
            self._since = now
        elif not waits and since is not None:
            self._ended += now - since
            self._since = None

    def seconds(self, now: float) -> float:
        """Return the seconds so far. Safe from any thread."""
        since = self._since
        return self._ended if since is None else self._ended + max(now - since, 0.0)


class Alarm:
    """A timer that calls a function at the earliest of the moments that were asked for."""

    __slots__ = ("_call", "_timer", "_when")

    def __init__(self, call: Callable[[], None]) -> None:
        """Make an alarm that is not set."""
        self._call = call
        self._timer: asyncio.Handle | None = None
        """None while it is not set. It is not asked for its time: uvloop's handle of a delay of 0 ms has none."""
        self._when = math.inf

    def ring_at(self, when: float) -> None:
        """Call the function at loop time *when*, unless it is called earlier anyway."""
        if self._when <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._when = when
        self._timer = asyncio.get_running_loop().call_at(when, self._ring)

    def cancel(self) -> None:
        """Call nothing until the next `ring_at`."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._when = math.inf

    def _ring(self) -> None:
        self._timer = None
        self._when = math.inf
        self._call()


class SharedLimit:
    """A limit with one token bucket for all runs of the handlers that share it.

    Shards that find no token are called back when there is one, the longest waiting first. A single timer serves all
    of them.

    Invariants:
        * Shards that never stop asking take no token for which others have waited longer.
        * No token is kept for shards that start nothing with it, for longer than a few milliseconds.
    """

    def __init__(self, limit: Limit, clock: Callable[[], float]) -> None:
        """Start with all tokens available; a limit of the group starts without a share, and so without any.

        Args:
            limit: The limit; not one for each key.
            clock: Returns the loop time.
        """
        self.limit = limit
        self.handlers: list[str] = []
        """Names of the handlers that share it."""
        self.share: float | None = None if limit.per == "process" else 0.0
        """The part of the group's limit that this process may use; None if it is not a limit of the group."""
        self._clock = clock
        self._bucket = TokenBucket(0.0, 0.0) if self.share is not None else TokenBucket(limit.per_second, limit.at_once)
        self._starts = 0
        self._refused: dict[Callable[[], bool], None] = {}
        """Callbacks of waiting shards, in order."""
        self._called: dict[Callable[[], bool], float] = {}
        """Callbacks of shards that a token is kept for until they take it, each with the time of its call."""
        self._timer = Alarm(self._call_next)
        self._waiting = WaitingTime()

    @property
    def ahead(self) -> int:
        """Number of runs that the handlers can start soon, at least 1; it changes with the share."""
        soon = max(self.limit.per_second * _AHEAD, self.limit.at_once)
        return max(int(soon if self.share is None else soon * self.share), 1)

    def due(self) -> float:
        """Return the seconds until the limit allows a run: 0 if it does now, infinity without a share.

        Safe from any thread.
        """
        return self._bucket.due(self._clock())

    def allows(self, otherwise: Callable[[], bool]) -> bool:
        """Return whether the limit allows a run now; if not, *otherwise* is called when it does.

        It returns whether it makes use of that.
        """
        due = self.due()
        if not due and self._is_next(otherwise):
            return True
        self._refused[otherwise] = None
        self._wait(due)
        self._update_waiting()
        return False

    def _is_next(self, callback: Callable[[], bool]) -> bool:
        """Return whether shards may take one of the tokens that are available, although others may wait."""
        called = self._called
        refused = self._refused
        if callback in called or not (called or refused):
            return True
        now = self._clock()
        is_first = callback == next(iter(refused), None)
        ahead = len(called) if is_first else len(called) + len(refused)
        if self._bucket.tokens(now) <= ahead:
            return False
        if callback in refused:
            del refused[callback]
            called[callback] = now
        return True

    def take(self, shards: Callable[[], bool]) -> None:
        """Spend the token of a run that starts now; *shards* is what they have passed to `allows`."""
        self._starts += self._bucket.take(self._clock())
        self._called.pop(shards, None)
        if self._refused:
            self._wait(self.due())

    def put_back(self, delivery: Delivery) -> None:  # noqa: ARG002 - as for `KeyLimit`
        """Return the token of a run that does not start."""
        self._bucket.put_back()
        self._starts -= 1

    def use_share(self, share: float) -> None:
        """Use another part of the group's limit from now on.

        The burst is divided as well, but a member has room for at least one token, which it keeps without a share.
        Tokens never come with a share: those of a partition that moves are lost. So the starts of all members in any
        *t* seconds are at most `at_once + per_second * t`, and one more for each member but the first.
        """
        if share == self.share:
            return
        self.share = share
        capacity = max(self.limit.at_once * share, 1.0)
        self._bucket.resize(self.limit.per_second * share, capacity, self._clock())
        self._timer.cancel()
        if self._refused:
            self._wait(self.due())
        self._update_waiting()

    def _wait(self, seconds: float) -> None:
        if seconds < math.inf:
            self._timer.ring_at(asyncio.get_running_loop().time() + seconds)

    def _call_next(self) -> None:
        """Call the shards that have waited longest, one for each token that is not kept for others."""
        now = self._clock()
        self._called = {callback: since for callback, since in self._called.items() if now < since + _PATIENCE}
        while self._refused and self._bucket.tokens(now) > len(self._called):
            callback = next(iter(self._refused))
            del self._refused[callback]
            self._called[callback] = now
            if not callback():
                self._called.pop(callback, None)
        if self._refused:
            self._wait(self.due() or _PATIENCE)
        self._update_waiting()

    def _update_waiting(self) -> None:
        # Without a share, the member owns no partition and has nothing to start.
        self._waiting.update(self._clock(), waits=bool(self._refused) and self.share != 0.0)

    def statistics(self) -> LimitStatistics:
        """Return its figures. Safe from any thread."""
        now = self._clock()
        due = self._bucket.due(now)
        return LimitStatistics(
            name=self.limit.name,
            per=self.limit.per,
            per_second=self.limit.per_second,
            burst=self.limit.at_once,
            handlers=tuple(self.handlers),
            starts=self._starts,
            waiting=len(self._refused) if self.share != 0.0 else 0,
            waiting_seconds=self._waiting.seconds(now),
            tokens=max(self._bucket.level(now), 0.0),
            due=due if due < math.inf else None,
            share=self.share,
        )


class KeyLimit:
    """A limit with a token bucket for each key, shared by the handlers that name it.

    A key is the value of the sharding function, or the key of the record with `shard_by="key"`: so handlers of
    different topics share the bucket of a key.
    """

    def __init__(self, limit: Limit, clock: Callable[[], float]) -> None:
        """Start with all tokens available for every key; *clock* returns the loop time."""
        self.limit = limit
        self.handlers: list[str] = []
        """Names of the handlers that share it."""
        self._clock = clock
        self._buckets = KeyBuckets(limit.per_second, limit.at_once)
        self._starts = 0
        self._keys_waiting = 0
        self._waiting = WaitingTime()

    def take(self, delivery: Delivery) -> float:
        """Spend a token of the key of a delivery; return 0, or without a token the seconds until there is one.

        A delivery without a key is not limited.
        """
        if delivery.key is None:
            return 0.0
        due = self._buckets.take(_key_of(delivery), self._clock())
        if not due:
            self._starts += 1
        return due

    def put_back(self, delivery: Delivery) -> None:
        """Return the token of a run that does not start."""
        if delivery.key is not None:
            self._buckets.put_back(_key_of(delivery))
            self._starts -= 1

    def add_waiting(self, keys: int) -> None:
        """Count keys that wait from now on; a negative number no longer does."""
        self._keys_waiting += keys
        self._waiting.update(self._clock(), waits=self._keys_waiting > 0)

    def statistics(self) -> LimitStatistics:
        """Return its figures. Safe from any thread."""
        return LimitStatistics(
            name=self.limit.name,
            per=self.limit.per,
            per_second=self.limit.per_second,
            burst=self.limit.at_once,
            handlers=tuple(self.handlers),
            starts=self._starts,
            waiting=self._keys_waiting,
            waiting_seconds=self._waiting.seconds(self._clock()),
            keys=len(self._buckets),
        )


def _key_of(delivery: Delivery) -> Hashable:
    return record_key(delivery.key, delivery.record.topic)


class Limits:
    """The limits of the handlers of one app.

    Each app has its own, even if several apps of a process have equal limits: an app has its own event loop, and
    starts and ends by itself.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without any limit; *clock* returns the loop time."""
        self._clock = clock
        self._by_name: dict[str, SharedLimit | KeyLimit] = {}

    def use(self, limit: Limit, handler: str) -> SharedLimit | KeyLimit:
        """Return what keeps a limit, for one more handler; equal limits are one."""
        active = self._by_name.get(limit.name)
        if active is None:
            kind = KeyLimit if limit.per == "key" else SharedLimit
            active = self._by_name[limit.name] = kind(limit, self._clock)
        active.handlers.append(handler)
        return active

    def statistics(self) -> tuple[LimitStatistics, ...]:
        """Return the figures of all limits, by name. Safe from any thread."""
        return tuple(active.statistics() for _, active in sorted(self._by_name.items()))
