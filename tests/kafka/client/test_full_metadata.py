"""Commit metadata of maximum length for 128 partitions is stored and used."""

import asyncio
import contextlib
import functools
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from aioshard import App, Context, Record
from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata
from aioshard.core.finished_offsets import Run, holds
from aioshard.errors import NotDrainedError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.clients import kafka_clients
from aioshard.ports import Allowance, AllowanceOf, Committed, Membership, Transport
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.engine.live_apps import engine_of
from tests.kafka.faults.support import quick_app, until
from tests.support.brokers import SharedKafka
from tests.support.cluster import DEADLINE, KafkaCluster
from tests.support.kafka import KafkaBroker
from tests.support.offsets import runs_of

PARTITIONS = 128
HEAD, HOLE, TAIL = 100, 60_500, 300
"""Records of each partition: some, then a transaction that was aborted and that nobody is given, then some."""
SECOND = HEAD + HOLE + 1
"""Resume positions: after the marker of the transaction's end."""
LOOK_INTERVAL = 0.05
HELD = 6
"""Of the first records of each partition."""
GZIP = 1
MOST_BYTES = 768 * 1024
"""Of the texts of one request; brokers refuse whole what makes more than 1 MiB in their own topic."""
AT_ONCE = 50
"""Partitions whose texts are stored with one request from outside."""


async def abort_transaction(kafka: KafkaCluster, topic: str) -> None:
    """Leave `HOLE` offsets without a record in each partition: one batch, made once, in an aborted transaction."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic)
    async with asyncio.timeout(3 * DEADLINE), producer:
        await producer.begin_transaction()
        await asyncio.gather(*[await producer.send(topic, b"", partition=number) for number in range(PARTITIONS)])
        state = producer._txn_manager
        builder = DefaultRecordBatchBuilder(2, GZIP, 1, state.producer_id, state.producer_epoch, 1, 1 << 20)
        for number in range(HOLE - 1):
            assert builder.append(number, 0, None, b"", []) is not None
        batch = bytes(builder.build())
        (leader,) = {node.nodeId for node in producer.client.cluster.brokers()}
        batches = [(topic, [(number, batch) for number in range(PARTITIONS)])]
        answer = await producer.client.send(leader, ProduceRequest(topic, -1, 30_000, batches))
        assert {code for _, stored in answer.topics for _, code, *_ in stored} == {0}
        await producer.abort_transaction()
        while min((await kafka.end_offsets(topic)).values()) < SECOND:  # noqa: ASYNC110 - markers come later, silently
            await asyncio.sleep(LOOK_INTERVAL)


class StoredCommits:
    """The committed offsets of a group and their metadata."""

    def __init__(self, brokers: KafkaAdmin, topic: str, group: str) -> None:
        self.partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        self.brokers = brokers
        self.group = group

    async def fill(self) -> None:
        """At the start of each log, store half of all that follows, in an order that no shorter text describes."""
        text = _full_text()
        offsets = {partition: Committed(0, text) for partition in self.partitions}
        for first in range(0, PARTITIONS, AT_ONCE):
            some = self.partitions[first : first + AT_ONCE]
            await self.brokers.commit_without_member(self.group, {partition: offsets[partition] for partition in some})

    async def now(self) -> dict[TopicPartition, tuple[Run, ...]]:
        """Return the finished offsets; every metadata text is complete and at its limit."""
        found = await self.brokers.all_commits(self.group)
        assert sorted(found) == self.partitions
        completions = {}
        for partition, committed in found.items():
            read = _read(committed)
            assert (committed.offset, read.ignored) == (0, ())
            # librdkafka's NUL counts too.
            assert MOST_UNITS - 40 <= len(committed.metadata.removesuffix("\0")) <= MOST_UNITS
            completions[partition] = read.finished
        return completions


@functools.lru_cache
def _read(committed: Committed) -> CommitMetadata:
    """Return the metadata of a commit; in these tests it is the same in every partition."""
    return CommitMetadata.read(committed.metadata, committed.offset)


def _full_text() -> str:
    bits = random.Random(1).getrandbits(HOLE)
    finished = {HEAD + number for number in range(HOLE) if bits >> number & 1}
    finished |= {*range(2, HEAD, 2), *range(SECOND, SECOND + TAIL, 3)}
    return CommitMetadata(finished=runs_of(finished)).text(0)


class Owner:
    """An app whose handler waits at the records that are held, and the commits that it sends."""

    def __init__(self, kafka: KafkaCluster, group: str, topic: str) -> None:
        self.app: App = quick_app(
            kafka,
            group,
            session_timeout=20,
            rebalance_timeout=30,
            start_timeout=60,
            shutdown_timeout=1,
            commit_timeout=5,
            commit_interval=1,
        )
        self.ran: Counter[tuple[TopicPartition, int]] = Counter()
        self.held: dict[int, asyncio.Event] = {}
        self.most_records: int | None = None
        """Nothing from that offset on is read."""
        self.requests: list[list[int]] = []
        self.stored: dict[TopicPartition, str] = {}
        self.app.consume(topic, shard_by="record", concurrency=HELD * PARTITIONS)(self.handle)

    async def handle(self, record: Record) -> None:
        if record.offset in self.held:
            await self.held[record.offset].wait()
        self.ran[record.topic_partition, record.offset] += 1

    def hold(self) -> None:
        """Read only the first records, and finish none of them."""
        self.most_records = HELD
        self.held = {offset: asyncio.Event() for offset in range(HELD)}

    async def until_stored(self, offset: int) -> None:
        """Return when that has finished in every partition, and has changed the stored metadata of each."""
        before = dict(self.stored)

        def progress() -> str:
            return f"{sum(at == offset for _, at in self.ran)} ran, {len(self.stored)} stored; {self.app.explain()}"

        await until(lambda: sum(at == offset for _, at in self.ran) == PARTITIONS, progress)
        await until(
            lambda: all(self.stored.get(partition) != before.get(partition) for partition, _ in self.ran), progress
        )

    def transport(self) -> Transport:
        """A client whose commits are looked at."""
        transport = kafka_clients(self.app.settings, self.app.group_id).transport()
        commit, poll = transport.commit, transport.poll

        async def watched_commit(offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
            self.requests.append([len(due.metadata.encode()) for due in offsets.values()])
            await commit(offsets, membership)
            self.stored |= {partition: due.metadata for partition, due in offsets.items()}

        async def bounded_poll(allowance: AllowanceOf, timeout: float) -> Any:
            def bounded(one: TopicPartition) -> Allowance:
                more, position = allowance(one), transport.position(one) or 0
                if self.most_records is None:
                    return more
                return more._replace(records=min(more.records, max(self.most_records - position, 0)))

            return await poll(bounded, timeout)

        vars(transport).update(commit=watched_commit, poll=bounded_poll)
        return transport


@pytest.fixture
async def stored_commits(kafka: SharedKafka, topic: str, group: str) -> AsyncIterator[StoredCommits]:
    await kafka.create_topic(topic, PARTITIONS)
    await kafka.produce(topic, [(None, b"x")] * (HEAD * PARTITIONS))
    await abort_transaction(kafka, topic)
    await kafka.produce(topic, [(None, b"x")] * (TAIL * PARTITIONS))
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers:
        yield StoredCommits(brokers, topic, group)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_full_metadata_of_128_partitions_is_stored_and_used(
    kafka: SharedKafka, stored_commits: StoredCommits, topic: str, group: str
) -> None:
    await stored_commits.fill()
    before = await stored_commits.now()
    first, second = (Owner(kafka, group, topic) for _ in range(2))
    first.hold()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(first.app.started(first.transport))
        for offset in (1, 3):
            first.held[offset].set()
            await first.until_stored(offset)
        with pytest.raises(NotDrainedError):
            await stack.aclose()
    finished = await stored_commits.now()

    assert {offset for _, offset in first.ran} == {1, 3}
    ((runs, old),) = {(finished[partition], before[partition]) for partition in stored_commits.partitions}
    expected = {offset for run in old for offset in range(*run)} | {1, 3}
    left_out = expected - {offset for run in runs for offset in range(*run)}
    assert not left_out or min(left_out) > max(expected) - 100, "what has no room is left out from the highest on"
    sizes = [sum(request) for request in first.requests]
    print(
        f"{len(sizes)} requests with up to {max(sizes):,} bytes of text of {max(map(len, first.requests))} partitions"
    )
    assert sum(sizes) > 2 * PARTITIONS * 11_000, "each partition twice, with three bytes to most characters"
    assert max(sizes) <= MOST_BYTES

    async with second.app.started(second.transport):
        await kafka.wait_for_lag(group, topic)
        done = second.app.statistics().already_done

    there = {*range(HEAD), *range(SECOND, SECOND + TAIL)}
    due = {
        (partition, offset) for partition in stored_commits.partitions for offset in there if not holds(runs, offset)
    }
    assert second.ran == Counter(due), "each record without a stored completion once, and no other"
    assert done == PARTITIONS * len(there) - len(due)
    assert max(sum(request) for request in second.requests) <= MOST_BYTES


@pytest.fixture
async def sparing(
    kafka: SharedKafka,  # noqa: ARG001 - or a skip
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> AsyncIterator[KafkaBroker]:
    """A broker that stores little with an offset: 5 characters, unless the test says how many."""
    most = getattr(request, "param", 5)
    broker = KafkaBroker(tmp_path, properties={"offset.metadata.max.bytes": str(most)})
    await broker.start()
    try:
        yield broker
    finally:
        await broker.kill()


@pytest.mark.chaos
async def test_offsets_are_committed_even_when_metadata_is_rejected(
    sparing: KafkaBroker, topic: str, group: str
) -> None:
    await sparing.create_topic(topic)
    await sparing.produce(topic, [(None, b"x")] * 20)
    owner = Owner(sparing, group, topic)
    async with owner.app.started(owner.transport):
        await sparing.wait_for_lag(group, topic)
        assert owner.app.statistics().trouble is None

    assert owner.ran == Counter((TopicPartition(topic, 0), offset) for offset in range(20))
    assert sum(owner.requests[0]) > 0
    assert sum(owner.requests[-1]) == 0


@pytest.mark.chaos
@pytest.mark.parametrize("sparing", [0, 100], indirect=True)
async def test_outputs_are_published_once_even_when_metadata_is_rejected(
    sparing: KafkaBroker, topic: str, group: str
) -> None:
    """Processes end while many records hang, and the next one runs again what no text lists."""
    records, out = 1_000, f"{topic}.out"
    hanging = {3, *random.Random(7).sample(range(4, records), records // 4)}
    released = asyncio.Event()
    await sparing.create_topic(topic)
    await sparing.create_topic(out)
    await sparing.produce(topic, [(b"%d" % number, b"%d" % number) for number in range(records)])

    def app() -> App:
        made = quick_app(
            sparing,
            group,
            processing_guarantee="exactly_once",
            drain_timeout=0.5,
            shutdown_timeout=2.0,
        )

        @made.consume(topic, concurrency=records)
        async def on_record(record: Record, context: Context) -> None:
            if record.offset in hanging:
                await released.wait()
            await context.publish(out, record.value, key=record.key)

        return made

    for _ in range(2):
        with contextlib.suppress(NotDrainedError):
            async with app() as running:
                committer = engine_of(running).committer
                await until(lambda: committer.metadata_limit == 0)  # noqa: B023 - awaited at once
                await until(lambda: running.statistics().handlers[0].busy == len(hanging))
                await until(lambda: running.statistics().partitions[0].committed == min(hanging))
    released.set()
    async with app():
        await sparing.wait_for_lag(group, topic)

    published = Counter(record.value for record in await sparing.read(out))
    assert published == Counter(b"%d" % number for number in range(records))
