"""The next owner does not rerun records that finished beyond the committed offset."""

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

import pytest

from aioshard import App, Park, Record, Retry
from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.core.finished_offsets import Run, records_with_room
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Delivery
from aioshard.engine.partition import Partition
from aioshard.errors import NotDrainedError
from aioshard.ports import FetchedBatch
from aioshard.records import TopicPartition
from aioshard.serde.side_records import Coordinates, release
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemorySideTopics, InMemoryTransport, run
from tests.engine.deliveries import make_buffer, make_intake, make_partition
from tests.engine.live_apps import until
from tests.support.offsets import runs_of

TP = TopicPartition("orders", 0)


class Deployment:
    """One partition, and processes that come one after the other; some records hang until they are let go."""

    def __init__(self, records: int = 100, *, hanging: tuple[int, ...] = (3,), **options: Any) -> None:
        self.broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        for number in range(records):
            self.broker.publish("orders", b"", key=b"%d" % number)
        self.hanging = asyncio.Event()
        self.hangs = hanging
        self.runs: Counter[int] = Counter()
        self.options = options

    def app(self) -> App:
        app = App("group", auto_offset_reset="earliest", commit_interval=0.5, shutdown_timeout=1.0, drain_timeout=0.5)

        @app.consume("orders", concurrency=20, **self.options)
        async def handle(record: Record) -> None:
            self.runs[record.offset] += 1
            if record.offset in self.hangs:
                await self.hanging.wait()

        return app

    @property
    def committed(self) -> tuple[int, CommitMetadata]:
        found = self.broker.group("group").committed(TP)
        assert found is not None
        return found.offset, CommitMetadata.read(found.metadata, found.offset)

    async def crash_when(self, processed: int) -> None:
        """Run a process until that number of records were run and their end was committed, and take it away."""
        app = self.app()
        transports: list[InMemoryTransport] = []

        def transport() -> InMemoryTransport:
            transports.append(InMemoryTransport(self.broker, "group"))
            return transports[-1]

        try:
            async with app.started(transport):
                await until(lambda: self.runs.total() >= processed)
                await asyncio.sleep(2.0)
                for client in transports:
                    client.crash()
        except Exception as error:  # noqa: BLE001 - it cannot stop cleanly, and nobody expects it to
            assert transports, error  # noqa: PT017
        self.broker.group("group").lose()

    async def finish(self) -> App:
        """Let nothing hang any more, and have a process run until all is committed."""
        self.hanging.set()
        app = self.app()
        async with app.started(lambda: InMemoryTransport(self.broker, "group", max_batch_records=10)):
            await until(lambda: self.broker.committed("group", "orders", 0) == self.broker.log("orders", 0).end)
            self.already_done = app.statistics().already_done
        return app


def test_a_crash_repeats_only_records_that_were_running() -> None:
    async def test() -> None:
        world = Deployment(hanging=(3, 70))
        await world.crash_when(100)
        offset, metadata = world.committed
        assert (offset, metadata.finished) == (3, (Run(4, 70), Run(71, 100)))

        await world.finish()

        assert {offset for offset, runs in world.runs.items() if runs > 1} == {3, 70}
        assert world.already_done == 95

    run(test())


def test_stored_completions_survive_an_owner_that_did_not_reach_them() -> None:
    async def test() -> None:
        world = Deployment(hanging=(3, 4))
        await world.crash_when(100)
        world.runs.clear()
        await world.crash_when(2)

        assert world.committed[1].finished == (Run(5, 100),)
        assert set(world.runs) == {3, 4}

    run(test())


@pytest.mark.parametrize(
    ("moved_to", "expected"),
    [(1, set(range(1, 100))), (3, set(range(3, 100))), (50, set(range(50, 100))), (None, set(range(100)))],
    ids=["lower", "the-same-without-metadata", "higher", "deleted"],
)
def test_moving_the_offset_discards_stored_completions(moved_to: int | None, expected: set[int]) -> None:
    async def test() -> None:
        world = Deployment()
        await world.crash_when(100)
        world.runs.clear()
        world.broker.group("group").commit_from_outside({TP: moved_to})

        await world.finish()

        assert set(world.runs) == expected

    run(test())


def test_metadata_copied_to_another_offset_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world = Deployment()
        await world.crash_when(100)
        found = world.broker.group("group").committed(TP)
        assert found is not None
        world.runs.clear()
        world.broker.group("group").commit_from_outside({TP: 1}, metadata=found.metadata)

        await world.finish()

        assert set(world.runs) == set(range(1, 100))

    run(test())
    assert "written for offset 3, but the committed offset is 1" in caplog.text


def test_completions_stored_for_a_longer_log_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """A topic recreated under the same name has different records."""

    async def test() -> None:
        world = Deployment()
        await world.crash_when(100)
        world.broker.recreate("orders", forget_commits=False)
        for number in range(50):
            world.broker.publish("orders", b"", key=b"%d" % number)
        world.runs.clear()

        await world.finish()

        assert set(world.runs) == set(range(3, 50))

    run(test())
    assert "belongs to another log" in caplog.text


def test_damaged_and_foreign_metadata_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def test(metadata: str) -> None:
        world = Deployment(hanging=())
        world.broker.group("group").commit_from_outside({TP: 3}, metadata=metadata)

        await world.finish()

        assert set(world.runs) == set(range(3, 100))

    whole = CommitMetadata(finished=(Run(4, 90),)).text(3)
    for text in (whole[:-1], whole.replace("aioshard/1", "aioshard/7"), "worker-7"):
        caplog.clear()
        run(test(text))
        assert "is not used and will be replaced" in caplog.text


def test_a_parked_record_in_stored_completions_stays_parked() -> None:
    """The partition does not deliver it again, so a restore must not expect it."""

    async def test() -> None:
        broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        broker.create_topic("parked", 1)
        for number in range(10):
            broker.publish("orders", b"", key=b"broken" if number in (4, 7) else b"%d" % number)
        broken, hanging = True, asyncio.Event()
        done: list[int] = []

        def app() -> App:
            app = App("group", auto_offset_reset="earliest", commit_interval=0.2, shutdown_timeout=1.0)

            @app.consume("orders", retry=Retry(attempts=1), on_failure=Park("parked", delay=3600.0))
            async def handle(record: Record) -> None:
                if record.offset == 2:
                    await hanging.wait()
                if record.key == b"broken" and broken:
                    raise ConnectionError("the account is locked")
                done.append(record.offset)

            return app

        def clients() -> Any:
            return (
                lambda: InMemoryTransport(broker, "group"),
                lambda: InMemoryProducer(broker),
                lambda: InMemorySideTopics(broker),
            )

        first = app()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(first.started(*clients()))
            await until(lambda: first.statistics().handlers[0].parked == 2)
            await asyncio.sleep(1.0)
            with pytest.raises(NotDrainedError):
                await stack.aclose()
        found = broker.group("group").committed(TP)
        assert found is not None
        assert CommitMetadata.read(found.metadata, found.offset).finished == (Run(3, 10),)

        hanging.set()
        broken = False
        second = app()
        async with second.started(*clients()):
            await until(lambda: broker.committed("group", "orders", 0) == 10)
            assert 4 not in done
            message = release("parked", Coordinates("orders", 0, 4))
            broker.publish(message.topic, message.value, key=message.key, partition=0, headers=message.headers)
            await until(lambda: {4, 7} <= set(done))

        assert sorted(done) == list(range(10)), "each once"
        assert done.index(4) < done.index(7)

    run(test())


# Admission --------------------------------------------------------------------------------


def _partition(buffer: Buffer, span: int, incomplete: list[int]) -> Partition:
    partition, _ = make_partition(buffer=buffer)
    records = [Record(*TP, offset, b"k", b"", (), 0.0) for offset in incomplete]
    deliveries = [Delivery(record, partition, None, 1, 0.0) for record in records]
    partition.take_in(FetchedBatch(TP, records, [1] * len(records), span), deliveries)
    return partition


@pytest.mark.parametrize(
    ("span", "incomplete", "most"),
    [
        (200_000, range(0, 200_000, 60), 0),
        (200_000, range(0, 200_000, 200), 2_000),
        (57_000, range(0, 57_000, 2), 1_200),
        (1_000, range(1_000), 1_000_000),
    ],
    ids=["full", "some-room", "nearly-dense", "almost-nothing"],
)
def test_intake_is_limited_to_what_metadata_can_store(span: int, incomplete: range, most: int) -> None:
    buffer = make_buffer(10_000_000, 1 << 40)
    partition = _partition(buffer, span, list(incomplete))
    intake = make_intake(partition, buffer=buffer)

    allowance = intake.allowance(TP)

    assert allowance.records <= most
    assert bool(allowance.records) == bool(most)
    limit = intake.limit(partition)
    assert (limit is not None) == (not most)
    assert limit is None or "no room for more completions" in limit.reason


def test_records_missing_in_full_metadata_are_still_admitted() -> None:
    """Otherwise the owner of full metadata would be stuck forever."""
    buffer = make_buffer(10_000_000, 1 << 40)
    partition = _partition(buffer, 0, [])
    partition.finished_ahead = runs_of(range(1, 58_900, 2))
    intake = make_intake(partition, buffer=buffer)

    assert intake.allowance(TP).records == 58_900
    assert intake.limit(partition) is None


@pytest.mark.slow
def test_metadata_has_room_for_every_pattern_of_admitted_records() -> None:
    """Patterns that compress badly, at the limit of admission."""
    chosen = random.Random(3)
    for span, incomplete in ((1, 1), (40_000, 20_000), (100_000, 1_000), (1_000_000, 1_500)):
        more = records_with_room(span, incomplete, 3_900)
        end, count = span + more, incomplete + more
        for share in (1.0, 0.1):
            stuck = {0, *chosen.sample(range(1, end), max(int(count * share) - 1, 0))}
            finished = runs_of(set(range(end)) - stuck)
            text = CommitMetadata(first=FirstCommit(512, 1 << 31), finished=finished)
            read = CommitMetadata.read(text.text(0), 0)
            assert read.finished == finished, (span, incomplete, share)


def test_completions_of_an_earlier_owner_are_dropped_once_passed() -> None:
    """Otherwise they take room from the text of every commit."""
    partition, _ = make_partition()
    partition.finished_ahead = (Run(1, 3), Run(5, 7))
    records = [Record(*TP, offset, None, b"", (), 0.0) for offset in range(6)]

    batch = partition.without_finished(FetchedBatch(TP, records, [10] * 6, 6))

    assert [record.offset for record in batch.records] == [0, 3, 4]
    assert list(partition.finished_ahead) == [Run(6, 7)]
