"""Commits that were not answered: each may still reach the brokers, after newer ones."""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from aioshard.records import TopicPartition

LONGEST_DELAY: Final = 30.0
"""Seconds for which a request may still arrive after its connection was lost."""


class _Repeat(NamedTuple):
    """When the offset of a partition is committed once more."""

    due_at: float
    ends_at: float
    """When nothing can arrive any more; infinite until a newer commit is acknowledged."""


class LateCommits:
    """Decides which offsets are committed once more, because an older commit may have replaced them.

    A commit without an answer may be on its way although its connection is lost. If it arrives after a newer one, it
    puts the offset back. The newer one is therefore repeated: when nothing can arrive any more, and before the
    partition is released. All times are loop time.

    Invariants:
        * The doubt about a partition ends with an acknowledged commit that was sent when the late one could not arrive
          any more. An earlier commit does not end it.
    """

    def __init__(self) -> None:
        self._repeats: dict[TopicPartition, _Repeat] = {}

    def unanswered(self, names: Iterable[TopicPartition]) -> None:
        """Note that a commit of these partitions was not answered."""
        self._repeats.update(dict.fromkeys(names, _Repeat(math.inf, math.inf)))

    def acknowledged(self, names: Iterable[TopicPartition], sent_at: float, now: float) -> None:
        """Note that a commit of these partitions was acknowledged."""
        if not self._repeats:
            return
        for name in names:
            repeat = self._repeats.get(name)
            if repeat is None:
                continue
            # 1. It is the first one since: the connection of the late one was lost before.
            if repeat.ends_at == math.inf:
                self._repeats[name] = _Repeat(now + LONGEST_DELAY, now + LONGEST_DELAY)
            # 2. Nothing can replace it.
            elif sent_at >= repeat.ends_at:
                del self._repeats[name]
            # 3. It may still be replaced.
            elif sent_at >= repeat.due_at:
                self._repeats[name] = repeat._replace(due_at=repeat.ends_at)

    def forget(self, name: TopicPartition) -> None:
        """Repeat nothing of a partition: the brokers do not store its offsets."""
        self._repeats.pop(name, None)

    def repeat_now(self, names: Iterable[TopicPartition], now: float) -> None:
        """Let the offsets of these partitions be due, because the partitions are released."""
        for name in names:
            repeat = self._repeats.get(name)
            if repeat is not None and repeat.ends_at != math.inf:
                self._repeats[name] = repeat._replace(due_at=min(repeat.due_at, now))

    def is_due(self, name: TopicPartition, now: float) -> bool:
        """Whether the offset of a partition is to be committed once more now."""
        repeat = self._repeats.get(name)
        return repeat is not None and repeat.due_at <= now
