"""The work inside the handlers: longest runs, deepest shards, failed and parked records. Safe from any thread."""

import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from aioshard.engine.epoch import Delivery
from aioshard.engine.explain.causes import HandlerSnapshot
from aioshard.engine.parking import Parking
from aioshard.engine.watch import Watch
from aioshard.observe import IncompleteRecord, ParkedKey, Pause, Workload
from aioshard.records import TopicPartition

_MOST = 50
"""Maximum number of entries of each kind."""


class _Run(NamedTuple):
    """A run in progress."""

    started: float
    snapshot: HandlerSnapshot
    delivery: Delivery


class _Shard(NamedTuple):
    """A shard with waiting records."""

    waiting: int
    snapshot: HandlerSnapshot
    key: Hashable


class _Failed(NamedTuple):
    """A delivery that holds its shard without running."""

    snapshot: HandlerSnapshot
    delivery: Delivery


def workload(watch: Watch) -> Workload:
    """Take a snapshot of the work inside the handlers; safe to call from any thread."""
    engine = watch.engine
    snapshots = [HandlerSnapshot(handler, watch) for handler in engine.handlers]
    parkings = [handler.parking for handler in engine.handlers if handler.parking is not None]
    runs = _runs(snapshots)
    shards = _shards(snapshots)
    failed = [_Failed(snapshot, delivery) for snapshot in snapshots for delivery in snapshot.blocked]
    return Workload(
        workers=_longest(runs),
        busy=len(runs),
        shards=_deepest(shards),
        deep=len(shards),
        failed=_worst(failed),
        failing=len(failed),
        parked=_parked(parkings, show_keys=engine.settings.show_keys),
        parked_keys=sum(parking.key_count for parking in parkings),
        pauses=tuple(_pause(what, why) for what, why in engine.pauses.items()),
    )


def _runs(snapshots: Sequence[HandlerSnapshot]) -> list[_Run]:
    return [
        _Run(worker.started, snapshot, delivery) for snapshot in snapshots for worker, delivery in snapshot.runs.items()
    ]


def _longest(runs: Sequence[_Run]) -> tuple[IncompleteRecord, ...]:
    """Describe the longest runs, longest first."""
    longest = heapq.nsmallest(_MOST, runs, key=operator.attrgetter("started"))
    return tuple(_describe(run.snapshot, run.delivery) for run in longest)


def _shards(snapshots: Sequence[HandlerSnapshot]) -> list[_Shard]:
    return [_Shard(waiting, snapshot, key) for snapshot in snapshots for waiting, key in snapshot.depths() if waiting]


def _deepest(shards: Sequence[_Shard]) -> tuple[IncompleteRecord, ...]:
    """Describe the records that occupy the deepest shards, deepest first."""
    described = []
    for waiting, snapshot, key in heapq.nlargest(_MOST, shards, key=operator.attrgetter("waiting")):
        owner = snapshot.owner_of(key)
        if owner is not None:
            described.append(dataclasses.replace(_describe(snapshot, owner), waiting=waiting))
    return tuple(described)


def _worst(failed: Sequence[_Failed]) -> tuple[IncompleteRecord, ...]:
    """Describe failed records: halted ones first, the oldest first within each state."""
    worst = heapq.nsmallest(_MOST, failed, key=lambda entry: _failed_first(entry.delivery))
    return tuple(_describe(entry.snapshot, entry.delivery) for entry in worst)


def _failed_first(delivery: Delivery) -> tuple[bool, float]:
    block = delivery.block
    if block is None:
        return True, math.inf
    return not block.halted, block.since


def _describe(snapshot: HandlerSnapshot, delivery: Delivery) -> IncompleteRecord:
    """Describe a record without the frames of its stack: the data of a dashboard must stay small."""
    record = snapshot.describe(delivery)
    if record.stack is None:
        return record
    return dataclasses.replace(record, stack=dataclasses.replace(record.stack, frames=()))


def _parked(parkings: Sequence[Parking], *, show_keys: bool) -> tuple[ParkedKey, ...]:
    return tuple(itertools.islice(_parked_keys(parkings, show_keys=show_keys), _MOST))


def _parked_keys(parkings: Sequence[Parking], *, show_keys: bool) -> Iterator[ParkedKey]:
    for parking in parkings:
        yield from parking.parked_keys(_MOST, show_keys=show_keys)


def _pause(what: TopicPartition | str, why: str) -> Pause:
    if isinstance(what, TopicPartition):
        return Pause(what.topic, what.partition, None, why)
    return Pause(None, None, what, why)
