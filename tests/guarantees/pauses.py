"""Unnecessary pauses of a partition, measured from the observations of members."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tests.guarantees.checks import ENDS
from tests.guarantees.observations import Kind, RecordId, Seen


class Pause(NamedTuple):
    """Nothing happened although a record was there."""

    seconds: float
    process: str
    record_id: RecordId
    """The record that waited."""
    moved: bool = False
    """Whether its partition came from another process meanwhile."""


def pauses(seen: Iterable[Seen], available: Mapping[RecordId, int]) -> Iterator[Pause]:
    """For each start: how long nothing of its partition had started although the broker had that record.

    Args:
        seen: The reports of all processes.
        available: When each record was acknowledged, in nanoseconds of the monotonic clock.
    """
    latest: dict[int, Seen] = {}
    for start in sorted(observation for observation in seen if observation.kind is Kind.STARTED):
        before = latest.get(start.partition)
        latest[start.partition] = start
        if before is not None:
            since = max(before.at, available[start.record_id])
            moved = before.process != start.process
            yield Pause(max(start.at - since, 0) / 1e9, start.process, start.record_id, moved)


def idle_workers(seen: Iterable[Seen], concurrency: int) -> Iterator[Pause]:
    """How long a worker of one process idled while a record that it was to run was in the memory of the engine.

    Records that the process took in and handed over to another one do not count. No two records may have the same key:
    one that waits for another would count, too.

    Args:
        seen: The reports of the process, in order.
        concurrency: How many workers there are.
    """
    seen = list(seen)
    taken_in: dict[RecordId, int] = {}
    queued: dict[RecordId, int] = {}
    for observation in seen:
        if observation.kind is Kind.TAKEN_IN:
            taken_in[observation.record_id] = observation.at
        elif observation.kind is Kind.STARTED:
            queued[observation.record_id] = taken_in[observation.record_id]
    waiting: dict[RecordId, int] = {}
    running = idle_since = 0
    for observation in seen:
        if observation.kind is Kind.TAKEN_IN and queued.get(observation.record_id) == observation.at:
            waiting[observation.record_id] = observation.at
        elif observation.kind is Kind.STARTED:
            oldest, since = next(iter(waiting.items()))
            if running < concurrency:
                yield Pause((observation.at - max(since, idle_since)) / 1e9, observation.process, oldest)
            del waiting[observation.record_id]
            running += 1
        elif observation.kind in ENDS:
            if running == concurrency:
                idle_since = observation.at
            running -= 1
