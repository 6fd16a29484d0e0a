"""Fairness between the keys of a handler: keys that fail must not take all workers, and a key that does is named."""

from collections import Counter, deque
from collections.abc import Collection, Hashable
from typing import NamedTuple

FAILING_SHARE = 0.2
"""Share of the workers that may run records of keys that are known to fail, while other records wait.

Together with first attempts, whose failure nobody can foresee, failing keys hold less than 30 %."""
_SPARE_SHARE = 0.2
"""Share of the workers that stay free for other keys even if nothing else waits now."""
MOST_FAILING_KEYS = 1_000
"""Maximum number of remembered keys; the oldest are forgotten."""
_LOOKS = 60
"""Number of looks that count."""
_LEAST_LOOKS = 20
_MOST = 0.5


def most_failing_runs(workers: int, *, others_wait: bool) -> int:
    """Return how many workers may run records of keys whose latest run failed; at least one.

    Args:
        workers: Number of workers of the handler.
        others_wait: Whether other records wait for a worker.

    Example:
        >>> most_failing_runs(64, others_wait=True), most_failing_runs(64, others_wait=False)
        (12, 51)
        >>> most_failing_runs(2, others_wait=True)
        1
    """
    share = FAILING_SHARE if others_wait else 1 - _SPARE_SHARE
    return max(int(workers * share), 1)


class DominantKey(NamedTuple):
    """A key that takes most of the time of a handler's workers."""

    key: Hashable
    share: float
    """Its share of their time."""


class KeyTimes:
    """Which keys the workers of a handler spend their time on, from a look at them once a second.

    Invariants:
        * Only the last minute counts.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[Hashable, ...]] = deque()
        self._times: Counter[Hashable] = Counter()

    def look(self, keys: Collection[Hashable]) -> None:
        """Add the keys that run now, each as often as it runs; None is a record without a key."""
        self._looks.append(tuple(keys))
        self._times.update(keys)
        if len(self._looks) > _LOOKS:
            for key in self._looks.popleft():
                self._times[key] -= 1
                if not self._times[key]:
                    del self._times[key]

    @property
    def dominant(self) -> DominantKey | None:
        """The key that takes most of the time, and runs almost always; None if there is none.

        Example:
            >>> times = KeyTimes()
            >>> for _ in range(30):
            ...     times.look(["hot"])
            ...     times.look(["hot", "other"])
            >>> times.dominant
            DominantKey(key='hot', share=0.6666666666666666)
        """
        looks = len(self._looks)
        if looks < _LEAST_LOOKS or not self._times:
            return None
        ((key, count),) = self._times.most_common(1)
        share = count / self._times.total()
        if key is None or share <= _MOST or count < looks * (1 - _SPARE_SHARE):
            return None
        return DominantKey(key, share)
