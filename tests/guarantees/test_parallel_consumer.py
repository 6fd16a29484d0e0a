"""A group moves over from Confluent's Parallel Consumer: what that has finished is not run again."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aioshard import App, Record
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import runs_of
from aioshard.kafka.history import HistoryBrokers
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.parallel_consumer_jars import SOURCES, ParallelConsumerUnavailableError, parallel_consumer_jars
from tests.support.provision import skip_or_fail
from tests.support.shared_kafka import SharedKafka

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]  # jars may be fetched

DEADLINE = 150.0
SHORT_RUNS = (range(60), {0, 7, 8, 30})
LONG_RUNS = (range(3_000), {0, 5, 2_500})
SCATTERED = (range(6_000), {0, *random.Random(1).sample(range(6_000), 150)})


@pytest.fixture(scope="module")
def jars() -> Path:
    """Those of Parallel Consumer."""
    try:
        return parallel_consumer_jars()
    except ParallelConsumerUnavailableError as missing:
        skip_or_fail("Parallel Consumer", str(missing))


@contextlib.asynccontextmanager
async def member(jars: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A member that runs Parallel Consumer; it is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *("java", "-Xmx256m", "-cp", f"{jars}/*", str(SOURCES / "Member.java"), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.communicate()


@pytest.mark.parametrize(
    ("offsets", "stuck"),
    [
        pytest.param(*SHORT_RUNS, marks=pytest.mark.chaos, id="short"),
        pytest.param(*LONG_RUNS, marks=pytest.mark.chaos, id="long"),
        pytest.param(*SCATTERED, id="scattered"),
    ],
)
async def test_its_finished_records_are_not_run_again(
    kafka: SharedKafka, topic: str, group: str, jars: Path, offsets: range, stuck: set[int]
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"%d" % offset) for offset in offsets])
    finished, left = set(offsets) - stuck, set(stuck)
    partition = TopicPartition(topic, 0)
    settings = Settings(bootstrap_servers=kafka.bootstrap)

    async with (
        asyncio.timeout(DEADLINE),
        HistoryBrokers(settings) as brokers,
        member(jars, kafka.bootstrap, group, topic, ",".join(map(str, stuck))) as process,
    ):
        assert process.stdout is not None
        assert {int(await process.stdout.readline()) for _ in finished} == finished
        read = CommitMetadata()
        while read.finished != runs_of(finished):
            await asyncio.sleep(0.05)  # it is another process that commits
            committed = (await brokers.group_commits(group, [partition]))[partition]
            if committed is not None:
                read = CommitMetadata.read(committed.metadata, committed.offset)
                assert not read.ignored
                assert read.foreign is None
                # While records finish, Parallel Consumer takes what is incomplete first and how far it is after that:
                # what hangs in between, which is in the last run then, it notes as finished.
                assert {one for run in read.finished[:-1] for one in range(*run)} <= finished

    app = App(group, bootstrap_servers=kafka.bootstrap, start_timeout=60, auto_offset_reset="error")
    done: list[int] = []
    over = asyncio.Event()

    @app.consume(topic, shard_by="record")
    async def handle(record: Record) -> None:
        done.append(record.offset)
        left.discard(record.offset)
        if not left:
            over.set()

    async with asyncio.timeout(DEADLINE), app:  # the one that was killed is a member until its session times out
        await over.wait()
    assert sorted(done) == sorted(stuck)
    assert await kafka.committed(group, topic) == {0: len(offsets)}
