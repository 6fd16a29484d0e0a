"""Unnecessary pauses of a partition, measured from the observations of members."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tests.guarantees.checks import ENDS
from tests.guarantees.observations import Kind, Place, Seen


class Pause(NamedTuple):
    """Nothing happened although a record was there."""

    seconds: float
    process: str
    place: Place
    """The record that waited."""
    moved: bool = False
    """Whether its partition came from another process meanwhile."""


def pauses(seen: Iterable[Seen], available: Mapping[Place, int]) -> Iterator[Pause]:
    """For each start: how long nothing of its partition had started although the broker had that record.

    Args:
        seen: What all processes have reported.
        available: When each record was acknowledged, in nanoseconds of the monotonic clock.
    """
    latest: dict[int, Seen] = {}
    for start in sorted(one for one in seen if one.kind is Kind.STARTED):
        before = latest.get(start.partition)
        latest[start.partition] = start
        if before is not None:
            since = max(before.at, available[start.place])
            moved = before.process != start.process
            yield Pause(max(start.at - since, 0) / 1e9, start.process, start.place, moved)


def idle_workers(seen: Iterable[Seen], concurrency: int) -> Iterator[Pause]:
    """How long a worker of one process idled while a record that it was to run was in the memory of the engine.

    Records that the process took in and handed over to another one do not count. No two records may have the same key:
    one that waits for another would count, too.

    Args:
        seen: What the process has reported, in the order in which it did.
        concurrency: How many workers there are.
    """
    seen = list(seen)
    taken_in: dict[Place, int] = {}
    queued: dict[Place, int] = {}
    for one in seen:
        if one.kind is Kind.TAKEN_IN:
            taken_in[one.place] = one.at
        elif one.kind is Kind.STARTED:
            queued[one.place] = taken_in[one.place]
    waiting: dict[Place, int] = {}
    running = idle_since = 0
    for one in seen:
        if one.kind is Kind.TAKEN_IN and queued.get(one.place) == one.at:
            waiting[one.place] = one.at
        elif one.kind is Kind.STARTED:
            oldest, since = next(iter(waiting.items()))
            if running < concurrency:
                yield Pause((one.at - max(since, idle_since)) / 1e9, one.process, oldest)
            del waiting[one.place]
            running += 1
        elif one.kind in ENDS:
            if running == concurrency:
                idle_since = one.at
            running -= 1
