"""Confluent Parallel Consumer as a contestant: it compiles, processes a topic and reports like the others."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aioshard.kafka.admin import KafkaAdmin
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from benchmarks.peers import PEERS, TRANSACTIONAL, ParallelConsumerUnavailableError, find_peers
from benchmarks.spec import Measurement, Spec, Work
from benchmarks.stage import ContestantFailedError, Stage, Topic
from tests.support.brokers import SharedKafka
from tests.support.requirements import skip_or_fail

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(700)]  # jars may be fetched

RECORDS, KEYS, PARTITIONS = 300, 20, 2
CONCURRENCY = 8
DEADLINE = 60.0
LOOK_INTERVAL = 0.05
PEER = PEERS[0]


@pytest.fixture(scope="module", autouse=True)
def classes() -> Path:
    """Those of the contestant."""
    try:
        return find_peers()
    except ParallelConsumerUnavailableError as missing:
        skip_or_fail("Parallel Consumer", missing)


@pytest.fixture
async def stage(kafka: SharedKafka) -> AsyncIterator[Stage]:
    """On the tests' broker."""
    stage = Stage(kafka, quick=False, progress=Console(quiet=True))
    try:
        yield stage
    finally:
        await stage.tidy()


async def filled(stage: Stage, records: int = RECORDS) -> Topic:
    messages = ((b"%08d" % (number % KEYS), b"%08d" % (number % 3) + b"x" * 20) for number in range(records))
    return await stage.fill("peers", PARTITIONS, messages)


def spec_of(stage: Stage, topic: Topic, work: Work, records: int = RECORDS) -> Spec:
    spec = stage.spec(PEER, topic, records=records, work=work, concurrency=CONCURRENCY)
    return replace(spec, keys=KEYS)


def well_done(measured: Measurement) -> bool:
    return (measured.records, measured.missing, measured.repeated, measured.disordered) == (RECORDS, 0, 0, 0)


async def test_a_peer_processes_every_record_once_in_order_and_commits(stage: Stage) -> None:
    topic, warm_up = await filled(stage), await filled(stage, 40)
    spec = replace(spec_of(stage, topic, "planned"), warm_up=warm_up.name, warm_up_ends=warm_up.ends)

    measured = await stage.run(spec, DEADLINE)

    assert well_done(measured), measured
    assert 2 <= measured.peak_concurrency <= CONCURRENCY
    assert measured.nearly_seconds > 0
    assert 0 < measured.wall_seconds < DEADLINE
    assert 0 < measured.cpu_seconds < DEADLINE
    assert 0 < measured.start_seconds < DEADLINE
    assert 20 * 2**20 < measured.peak_rss < 2 * 2**30
    assert await stage.cluster.committed(spec.group, topic.name) == dict(enumerate(topic.ends))
    assert set(await stage.cluster.committed(f"{spec.group}-warm-up", warm_up.name)) == {0, 1}


async def test_a_peer_runs_the_computing_workload(stage: Stage) -> None:
    assert well_done(await stage.run(spec_of(stage, await filled(stage), "hash"), DEADLINE))


async def test_a_peer_publishes_in_the_transactions_of_its_commits(stage: Stage) -> None:
    topic, output = await filled(stage), await stage.begin("peers-out", PARTITIONS, {})
    spec = stage.spec(TRANSACTIONAL, topic, records=RECORDS, work="sleep", concurrency=CONCURRENCY, seconds=0.005)

    measured = await stage.run(replace(spec, output=output), DEADLINE)

    assert well_done(measured), measured
    assert 0.001 < measured.longest_pause < measured.wall_seconds
    assert await stage.cluster.committed(spec.group, topic.name) == dict(enumerate(topic.ends))
    assert len(await stage.cluster.read(output)) == RECORDS
    ends = await stage.cluster.end_offsets(output)
    assert sum(ends.values()) > RECORDS, "no transaction left its marker"


async def test_a_peer_stops_cleanly_on_sigterm(stage: Stage, tmp_path: Path) -> None:
    topic, journal = await filled(stage), tmp_path / "journal"
    spec = replace(spec_of(stage, topic, "journal", 0), journal=str(journal), seconds=0.002)
    process = await stage.start(spec)
    try:
        async with asyncio.timeout(DEADLINE):
            while not (journal.exists() and journal.stat().st_size):
                process.check()
                await asyncio.sleep(LOOK_INTERVAL)  # it is another process that writes
        process.signal(signal.SIGTERM)
        await process.measurement(DEADLINE)
    finally:
        await process.kill()

    done = {tuple(map(int, line.split()[:2])) for line in journal.read_text().splitlines()}
    assert set() < await committed_by(stage, spec) <= done


async def committed_by(stage: Stage, spec: Spec) -> set[tuple[int, ...]]:
    """Return the records below its committed offsets; its own metadata lists finished ones above."""
    partitions = [TopicPartition(spec.topic, partition) for partition in range(PARTITIONS)]
    async with KafkaAdmin(Settings(bootstrap_servers=stage.cluster.bootstrap)) as brokers:
        commits = await brokers.group_commits(spec.group, partitions)
    return {(at.partition, offset) for at, commit in commits.items() if commit for offset in range(commit.offset)}


async def test_a_peer_that_does_not_end_is_killed_and_reported(stage: Stage) -> None:
    spec = spec_of(stage, await filled(stage), "planned", RECORDS + 1)  # one more than there is

    with pytest.raises(ContestantFailedError, match=rf"{PEER} did not end within 3 s"):
        await stage.run(spec, 3.0)
