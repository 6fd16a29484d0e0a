"""The workloads of P13: the content of their topics, and an upper bound of the throughput."""

import asyncio
import bisect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from aiokafka import AIOKafkaProducer

from aioshard.records import Record
from benchmarks.spec import Work
from benchmarks.stage import Stage, Topic
from tests.support.cluster import Message

Planned = tuple[int, int]
"""The number of a record's key, and the whole milliseconds that its handler waits."""

BYTES = 100
TRANSACTION = 10
ABORTED = 20
"""One of this many transactions is aborted."""
WRITERS = 24
COMPACTED_BYTES = 200
SEGMENT_BYTES = 1024 * 1024
"""The minimum of brokers; the newest segment is not compacted."""
COMPACTION_TIMEOUT = 60.0
COMPACTION_LOOK = 1.0
WARM_UP_PARTITIONS = 4
WARM_UP_KEYS = 1_000
HANG_SECONDS = 20.0


class UnfilledError(RuntimeError):
    """A topic could not be filled as its workload needs."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load."""

    name: str
    records: int
    quick: int
    """Records in a quick run; 0 to leave it out there."""
    partitions: int
    keys: int
    concurrency: int
    plan: Callable[["Workload", int], Iterable[Planned]]
    """Returns that number of planned records, the same ones in every run."""
    work: Work = "planned"
    rounds: int = 1
    holes: bool = False
    """Whether it is written in transactions to a compacted topic, which leaves offsets without a record."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A workload's topic."""

    topic: Topic
    offsets: list[Sequence[int]]
    """The offsets of each partition that have a record."""
    bound: float
    """Maximum records per second of a consumer that keeps the order of each key; 0 if the CPU is the limit."""

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(map(len, self.offsets))

    def uncommitted(self, committed: dict[int, int]) -> int:
        """Return the number of records that the *committed* offsets do not cover."""
        return sum(
            len(present) - bisect.bisect_left(present, committed.get(partition, 0))
            for partition, present in enumerate(self.offsets)
        )


def _uniform(workload: Workload, records: int) -> Iterator[Planned]:
    rng = random.Random(1)
    return ((number % workload.keys, rng.randint(0, 5)) for number in range(records))


def _always(milliseconds: int) -> Callable[[Workload, int], Iterator[Planned]]:
    return lambda workload, records: ((number % workload.keys, milliseconds) for number in range(records))


def _skewed(workload: Workload, records: int) -> Iterator[Planned]:
    """Return keys by Zipf's law with 1.1; times are log-normal, median 5 ms and 99th percentile 500 ms."""
    rng = random.Random(9)
    weights = list(itertools.accumulate(rank**-1.1 for rank in range(1, workload.keys + 1)))
    sigma = math.log(100) / 2.3263
    for key in rng.choices(range(workload.keys), cum_weights=weights, k=records):
        yield key, round(rng.lognormvariate(math.log(5), sigma))


def _hanging(workload: Workload, records: int) -> Iterator[Planned]:
    """Return records of which one in 10,000 hangs, and at least one."""
    every, hang = (10_000, HANG_SECONDS) if records >= 10_000 else (records, HANG_SECONDS / 20)
    slow, rng = round(hang * 1000), random.Random(10)
    for number in range(records):
        yield rng.randrange(workload.keys), slow if number % every == every // 2 else 5


def _random_keys(workload: Workload, records: int) -> Iterator[Planned]:
    rng = random.Random(12)
    return ((rng.randrange(workload.keys), 1) for _ in range(records))


WORKLOADS = (
    Workload("W1, 1 key", 4_000, 0, 1, 1, 100, _uniform),
    Workload("W1, 100 keys", 40_000, 100, 1, 100, 100, _uniform, rounds=3),
    Workload("W1, 10,000 keys", 40_000, 0, 1, 10_000, 100, _uniform, rounds=3),
    Workload("W6, 5 ms", 60_000, 0, 4, 100, 1_000, _always(5), rounds=3),
    Workload("W6, SHA-256", 20_000, 100, 4, 100, 1_000, _always(0), work="hash", rounds=3),
    Workload("W9", 6_000, 0, 12, 100_000, 1_000, _skewed),
    Workload("W10", 100_000, 200, 6, 10_000, 1_000, _hanging),
    Workload("W12", 48_000, 400, 6, 10_000, 1_000, _random_keys, rounds=3, holes=True),
)

DESCRIPTIONS = (
    "W1: 1 partition, concurrency 100, a record takes 0 to 5 ms, uniformly.",
    "W6: 4 partitions, 100 keys, concurrency 1,000; a record takes 5 ms, or 500 × SHA-256.",
    "W9: 12 partitions, 100,000 keys by Zipf's law with 1.1, concurrency 1,000; median 5 ms, 99th percentile 500 ms.",
    f"W10: 6 partitions, 10,000 keys, concurrency 1,000; a record takes 5 ms, one in 10,000 takes {HANG_SECONDS:g} s.",
    "W12: 6 partitions, 10,000 keys, concurrency 1,000, 1 ms; a compacted topic, transactions of 10, some aborted.",
)


async def fill(stage: Stage, workload: Workload) -> Filled:
    """Create and fill the topic of a workload.

    Raises:
        UnfilledError: The topic could not be filled.
    """
    plan = list(workload.plan(workload, stage.size(workload.records, workload.quick)))
    if workload.holes:
        return await _fill_with_holes(stage, workload, plan)
    topic = await stage.fill("p13", workload.partitions, map(_message, plan))
    bound = 0.0 if workload.work == "hash" else _bound(plan, workload.concurrency)
    return Filled(topic, [range(end) for end in topic.ends], bound)


async def fill_to_warm_up(stage: Stage, records: int) -> Topic:
    """Fill a topic whose records take no time."""
    messages = (_message((number % WARM_UP_KEYS, 0)) for number in range(records))
    return await stage.fill("p13-warm-up", WARM_UP_PARTITIONS, messages)


def _message(planned: Planned, size: int = BYTES) -> Message:
    key, milliseconds = planned
    return b"%08d" % key, b"%08d" % milliseconds + b"x" * (size - 8)


def _bound(plan: Sequence[Planned], concurrency: int) -> float:
    """Return the maximum throughput: limited by the slowest key, and by all workers being busy all the time."""
    by_key: Counter[int] = Counter()
    for key, milliseconds in plan:
        by_key[key] += milliseconds
    slowest = max(*by_key.values(), by_key.total() / concurrency)
    return len(plan) / slowest * 1000 if slowest else 0.0


async def _fill_with_holes(stage: Stage, workload: Workload, plan: list[Planned]) -> Filled:
    """Fill a topic with gaps: transaction markers, aborted transactions, and compacted records."""
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": str(SEGMENT_BYTES),
        "min.cleanable.dirty.ratio": "0.01",
    }
    name = await stage.begin("p13", workload.partitions, config)
    lanes = [
        [record for record in plan if record[0] % workload.partitions == lane] for lane in range(workload.partitions)
    ]
    pieces = [
        (lane, records[start : start + TRANSACTION])
        for lane, records in enumerate(lanes)
        for start in range(0, len(records), TRANSACTION)
    ]
    random.Random(12).shuffle(pieces)
    left = iter(enumerate(pieces))
    async with asyncio.TaskGroup() as writers:
        for number in range(WRITERS):
            writers.create_task(_write(stage.cluster.bootstrap, name, number, left), name=f"writer-{number}")
    full = sum(len(piece) for index, (_, piece) in enumerate(pieces) if index % ABORTED)
    records = await (stage.cluster.read(name) if stage.quick else _compacted(stage, name, full))
    offsets: list[list[int]] = [[] for _ in lanes]
    for record in records:
        offsets[record.partition].append(record.offset)
    ends = await stage.cluster.end_offsets(name)
    topic = Topic(name, tuple(ends[partition] for partition in range(workload.partitions)))
    stage.say(f"filled {name}: {topic.records:,} offsets, {full:,} records, {len(records):,} left by compaction")
    present = [(int(record.key or b""), int((record.value or b"")[:8])) for record in records]
    return Filled(topic, list(offsets), _bound(present, workload.concurrency))


async def _write(
    bootstrap: str, topic: str, number: int, left: Iterator[tuple[int, tuple[int, list[Planned]]]]
) -> None:
    """Write one transaction after the other until none is left."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{topic}-{number}")
    async with producer:
        for index, (lane, piece) in left:
            await producer.begin_transaction()
            batch = producer.create_batch()
            for planned in piece:
                key, value = _message(planned, COMPACTED_BYTES)
                batch.append(key=key, value=value, timestamp=None)
            await (await producer.send_batch(batch, topic, partition=lane))
            await (producer.abort_transaction() if index % ABORTED == 0 else producer.commit_transaction())


async def _compacted(stage: Stage, topic: str, full: int) -> list[Record]:
    """Return the records that remain of *full* once the broker has compacted all but the newest segments."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + COMPACTION_TIMEOUT
    before: list[Record] = []
    now = await stage.cluster.read(topic)
    while len(now) == full or len(now) != len(before):
        if loop.time() > give_up:
            raise UnfilledError(f"the broker did not compact {topic} within {COMPACTION_TIMEOUT:g} s")
        await asyncio.sleep(COMPACTION_LOOK)
        before, now = now, await stage.cluster.read(topic)
    return now
