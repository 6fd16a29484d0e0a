"""Records that a handler leaves out: a newer one of their key waits, or they are too old."""

from collections.abc import Callable, Hashable, Sequence

from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.outcomes import Outcome, Recovery
from aioshard.engine.parked_partition import Replay
from aioshard.engine.parking import Parking
from aioshard.errors import RecordExpiredError


async def _supersede(delivery: Delivery) -> Outcome:  # noqa: ARG001 - signature shared by all recoveries
    return Outcome.SUPERSEDED


_SUPERSEDE = Recovery("a newer record of its key waits, and its handler has keep='latest'", _supersede)


class Latest:
    """Leaves only the newest of the waiting records of each key.

    The sharder calls `add` with records that are queued, and `forget` when their epoch has ended. Workers call `divert`
    before they start a delivery.

    Invariants:
        * A record is superseded only while a later record of its key and partition is in memory and has not started,
          so the newest record of a key always runs (I2).
        * A key takes memory only while one of its records is queued.
    """

    def __init__(self) -> None:
        self._newest: dict[Epoch, dict[Hashable, Delivery]] = {}
        """The newest delivery of each key that has not started yet."""

    def add(self, deliveries: Sequence[Delivery]) -> None:
        """Note deliveries, of one epoch, that are queued now; evicted ones are queued again."""
        if not deliveries:
            return
        newest = self._newest.setdefault(deliveries[0].epoch, {})
        for delivery in deliveries:
            key = delivery.key
            if key is None:
                continue
            known = newest.get(key)
            if known is None or known.offset < delivery.offset:
                newest[key] = delivery

    def divert(self, delivery: Delivery) -> None:
        """Complete a delivery without its handler if a newer one of its key waits."""
        epoch = delivery.epoch
        newest = self._newest.get(epoch)
        if newest is None:
            return
        later = newest.get(delivery.key)
        # 1. Nothing of its key waits, as after a failed attempt of the newest one.
        if later is None:
            return
        # 2. It is the newest, and starts now.
        if later is delivery:
            del newest[delivery.key]
        # 3. A newer one waits. If that was evicted, it is not certain that the log still has it when it is fetched.
        elif delivery.recovery is None and later.offset not in epoch.evicted:
            delivery.divert(_SUPERSEDE)

    def forget(self, epoch: Epoch) -> None:
        """Forget the deliveries of an epoch that has ended."""
        self._newest.pop(epoch, None)


class Expiry:
    """Gives up records that are too old when they would start."""

    def __init__(
        self, max_age: float, now: Callable[[], float], *, dead_letters: Recovery | None, parking: Parking | None
    ) -> None:
        """Make the expiry of one handler.

        Args:
            max_age: Maximum age, in seconds since a record's timestamp.
            now: Returns the time on the clock of the records' timestamps, in seconds since the Unix epoch.
            dead_letters: Taken for records that are too old; None completes them as expired.
            parking: Parked records of the handler; None if it does not park.
        """
        self._max_age = max_age
        self._now = now
        self._dead_letters = dead_letters
        self._parking = parking
        self._expire = Recovery(f"it is older than max_age={max_age:g} s", self._complete)

    def divert(self, delivery: Delivery) -> None:
        """Give a delivery a recovery if its record is too old."""
        written = delivery.record.timestamp
        # 1. It has no timestamp, or its handler does not run anyway.
        if written < 0.0 or delivery.recovery is not None:
            return
        age = self._now() - written
        if age <= self._max_age:
            return
        # 2. It is complete without its handler.
        if self._dead_letters is None:
            delivery.divert(self._expire)
        # 3. Its dead letter says why.
        else:
            delivery.fail(RecordExpiredError(age, self._max_age), 0)
            delivery.divert(self._dead_letters)

    async def _complete(self, delivery: Delivery) -> Outcome:
        if isinstance(delivery, Replay) and self._parking is not None:
            await self._parking.drop.take(delivery)
        return Outcome.EXPIRED


def combined(*diverts: Callable[[Delivery], None] | None) -> Callable[[Delivery], None] | None:
    """Return a function that calls those of *diverts* that are not None, in order; None without any."""
    given = [divert for divert in diverts if divert is not None]
    if len(given) <= 1:
        return given[0] if given else None

    def divert(delivery: Delivery) -> None:
        for each in given:
            each(delivery)

    return divert
