"""Positions that the application asked for, each until its partition goes on there."""

import asyncio
from collections.abc import Collection

from aioshard.engine.epoch import Epoch
from aioshard.errors import StateError
from aioshard.records import TopicPartition

__all__ = ["Seeks"]


class _Seek:
    """A position that was asked for."""

    def __init__(self, start: int, epoch: Epoch) -> None:
        self.start = start
        self.draining: Epoch | None = epoch
        """The ownership that is left, while only who asked drains it; None when whoever looks into it may go on."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Seeks:
    """The positions that were asked for and are not reached yet. Owned by the rebalance.

    A position stays due across rebalances, as long as the partition is ours in each of them: whoever looks into an
    assignment begins there, instead of where the group has committed.

    Invariants:
        * A partition has at most one.
        * Every future ends: with the epoch that begins there, with the partition given away, or with the app.
    """

    def __init__(self) -> None:
        """Nothing is asked for."""
        self._asked: dict[TopicPartition, _Seek] = {}

    def ask(self, epoch: Epoch, start: int) -> asyncio.Future[None]:
        """Take note that a partition is to go on at *start*; the future ends when it does.

        Raises:
            StateError: Another position was asked for, and is not reached yet.
        """
        topic_partition = epoch.topic_partition
        before = self._asked.get(topic_partition)
        if before is not None:
            raise StateError(
                f"{topic_partition} is on its way to offset {before.start}, which was asked for before: await that seek"
            )
        seek = self._asked[topic_partition] = _Seek(start, epoch)
        return seek.done

    @property
    def under_way(self) -> bool:
        """Whether a position was asked for that is not reached yet."""
        return bool(self._asked)

    def start_of(self, topic_partition: TopicPartition) -> int | None:
        """Where a partition is to go on, or None."""
        seek = self._asked.get(topic_partition)
        return None if seek is None else seek.start

    def drains(self, epoch: Epoch) -> bool:
        """Whether an epoch is being drained for a seek, and nobody else has taken over since."""
        seek = self._asked.get(epoch.topic_partition)
        return seek is not None and seek.draining is epoch

    def let_go(self, epoch: Epoch) -> None:
        """An epoch is handed over or has ended: where its partition goes on is settled as for any other."""
        seek = self._asked.get(epoch.topic_partition)
        if seek is not None and seek.draining is epoch:
            seek.draining = None

    def reached(self, topic_partition: TopicPartition) -> None:
        """A partition goes on; at the position that was asked for, if one was."""
        seek = self._asked.pop(topic_partition, None)
        if seek is not None and not seek.done.done():
            seek.done.set_result(None)

    def keep(self, given: Collection[TopicPartition]) -> None:
        """Give up what was asked of partitions that are not among the assigned ones."""
        for topic_partition in sorted(self._asked.keys() - set(given)):
            why = "the group gave it to another member meanwhile"
            self._give_up(topic_partition, f"{why}, which goes on at the committed offset: seek there")

    def give_up_all(self) -> None:
        """The app stops."""
        for topic_partition in tuple(self._asked):
            self._give_up(topic_partition, "the app stopped meanwhile: what is committed says where it goes on")

    def _give_up(self, topic_partition: TopicPartition, why: str) -> None:
        seek = self._asked.pop(topic_partition)
        if not seek.done.done():
            seek.done.set_exception(StateError(f"{topic_partition} did not go to offset {seek.start}: {why}"))
            seek.done.exception()  # it is raised to who waits; not waiting any more is no error
