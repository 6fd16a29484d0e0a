"""Manual assignment (`assign`) on a real broker."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aioshard import App, Record, TopicPartition
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.errors import GroupHasMembersError, StartError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.group.transport import MemberTransport
from aioshard.ports import Committed
from aioshard.settings import Settings
from tests.kafka.client.members import background_tasks
from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker
from tests.support.paths import PROJECT

MEMBERS = pytest.mark.parametrize("protocol", ["classic", "consumer"])


class ByHand:
    """An app with manually assigned partitions, and its processed records."""

    def __init__(self, bootstrap: str, group: str, topic: str, assign: Any, **settings: Any) -> None:
        self.processed: list[tuple[int, int]] = []
        options: dict[str, Any] = {
            "auto_offset_reset": "earliest",
            "commit_interval": 0.1,
            "fetch_max_wait": 0.05,
        } | settings
        self.app = App(group, bootstrap_servers=bootstrap, assign=assign, **options)

        @self.app.consume(topic)
        async def handle(record: Record) -> None:
            self.processed.append((record.partition, record.offset))

    async def until_processed(self, count: int) -> None:
        await until(lambda: len(self.processed) >= count)

    async def until_committed(self, expected: Mapping[int, int | None]) -> None:
        """Wait for the statistics, then ask the broker."""
        (topic,) = self.app.handlers[0].topics
        ours = {number: offset for number, offset in expected.items() if offset is not None}
        await until(
            lambda: {partition.partition: partition.committed for partition in self.app.statistics().partitions} == ours
        )
        assert {number: await self.app.committed(topic, number) for number in expected} == expected


async def until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - an app and processes tell nobody
            await asyncio.sleep(0.02)


async def fill(kafka: KafkaBroker | SharedKafka, topic: str, partitions: int, records: int) -> None:
    for number in range(partitions):
        await kafka.produce(topic, [(None, b"%d" % value) for value in range(records)], number)


async def test_only_assigned_partitions_are_read_and_the_group_stays_empty(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic, 4)
    await fill(kafka, topic, 4, 5)
    hand = ByHand(kafka.bootstrap, group, topic, {topic: [0, 2]})

    async with hand.app:
        await hand.until_processed(10)
        await hand.until_committed({0: 5, 1: None, 2: 5, 3: None})
        statistics = hand.app.statistics()
        assert hand.app.assignment() == (TopicPartition(topic, 0), TopicPartition(topic, 2))
        assert (statistics.state, statistics.member_id, statistics.rebalances) == ("running", None, 1)
        async with KafkaAdmin(hand.app.settings) as brokers:
            seen = await brokers.group(group)
            assert (seen.state, seen.members) == ("empty", ())

            # A reset is not refused, although the app runs: nothing tells the brokers that it does.
            await brokers.commit_without_member(group, {TopicPartition(topic, 0): Committed(1, "")})
        await kafka.produce(topic, [(None, b"more")], 0)
        await hand.until_committed({0: 6, 2: 5})

    assert sorted(hand.processed) == [(0, offset) for offset in range(6)] + [(2, offset) for offset in range(5)]


async def test_the_next_process_resumes_at_the_commits(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, 2)
    await fill(kafka, topic, 2, 5)
    for expected in ([(1, offset) for offset in range(5)], []):
        hand = ByHand(kafka.bootstrap, group, topic, f"{topic}:1")
        async with asyncio.timeout(30):
            await hand.app.serve(until_caught_up=True)
        assert hand.processed == expected


# Missing partitions and foreign members ---------------------------------------------------


async def test_a_missing_partition_or_topic_ends_the_start(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, 2)
    hand = ByHand(kafka.bootstrap, group, topic, {topic: [1, 2, 7]})
    with pytest.raises(StartError, match=rf"'{topic}' has partitions 0 to 1, but assign names .*/2, 7: correct"):
        await hand.app.serve()

    hand = ByHand(kafka.bootstrap, group, f"{topic}-no", {f"{topic}-no": [0]})
    with pytest.raises(StartError, match=rf"topic '{topic}-no' does not exist, but assign names"):
        await hand.app.serve()


async def test_without_start_timeout_the_app_waits_for_a_missing_topic(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    hand = ByHand(kafka.bootstrap, group, topic, {topic: [0]}, start_timeout=None)
    async with hand.app:
        await until(lambda: "does not exist" in (hand.app.statistics().trouble or ""))
        await kafka.create_topic(topic, 1)
        await fill(kafka, topic, 1, 1)
        await hand.until_processed(1)
        await hand.until_committed({0: 1})


@MEMBERS
async def test_a_group_with_members_ends_the_start(kafka: SharedKafka, topic: str, group: str, protocol: str) -> None:
    await kafka.create_topic(topic, 2)
    member = ByHand(kafka.bootstrap, group, topic, None, group_protocol=protocol)
    hand = ByHand(kafka.bootstrap, group, topic, {topic: [0]})
    async with member.app:
        with pytest.raises(GroupHasMembersError, match=rf"group '{group}' has members \(member .*manual assignment"):
            await hand.app.serve()


MEMBER = """
import os
from aioshard import App, Record, Retry

app = App(os.environ["GROUP"], auto_offset_reset="earliest", commit_interval=0.1, start_timeout=60)

@app.consume(os.environ["TOPIC"], retry=Retry(attempts=2, initial=100_000.0, maximum=100_000.0), shard_by="record")
async def handle(record: Record) -> None:
    if record.value == os.environ.get("STUCK", "").encode():
        raise ConnectionError("its back end is down")
    print(f"processed {record.partition}/{record.offset}", flush=True)
"""


class Process:
    """`aioshard run --assign`."""

    def __init__(self, directory: Path, name: str, assign: str, environment: dict[str, str]) -> None:
        self._log = directory / f"{name}.log"
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "aioshard", "run", "by_hand:app", "--assign", assign],
                cwd=directory,
                env=os.environ | environment | {"PYTHONPATH": str(PROJECT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def processed(self) -> list[str]:
        return [line.removeprefix("processed ") for line in self.log.splitlines() if line.startswith("processed ")]

    @property
    def code(self) -> int | None:
        return self.popen.poll()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)


Start = Callable[..., Process]


@pytest.fixture
def start(kafka: SharedKafka, tmp_path: Path, topic: str, group: str) -> Iterator[Start]:
    """Starts processes with manually assigned partitions that end with the test."""
    (tmp_path / "by_hand.py").write_text(MEMBER)
    started: list[Process] = []

    def begin(assign: str, **environment: str) -> Process:
        given = {"AIOSHARD_BOOTSTRAP_SERVERS": kafka.bootstrap, "GROUP": group, "TOPIC": topic} | environment
        process = Process(tmp_path, f"process{len(started)}", assign, given)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


@MEMBERS
async def test_members_that_join_later_end_the_process_at_its_next_commit(
    kafka: SharedKafka, topic: str, group: str, start: Start, protocol: str
) -> None:
    await kafka.create_topic(topic, 1)
    await fill(kafka, topic, 1, 1)
    process = start(f"{topic}:0")
    await until(lambda: process.processed == ["0/0"])
    member = ByHand(kafka.bootstrap, group, topic, None, group_protocol=protocol)
    async with member.app:
        await fill(kafka, topic, 1, 1)
        await until(lambda: process.code is not None)

    assert process.code == 1, process.log
    assert re.search(
        rf"Error: group '{group}' has members \(a commit was refused: (unknown member id|illegal generation)\)",
        process.log,
    )
    assert "Traceback" not in process.log


async def test_a_refused_last_commit_is_raised_to_the_caller(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, 1)
    await fill(kafka, topic, 1, 1)
    rarely = {"commit_interval": 1000, "commit_records": None}
    hand = ByHand(kafka.bootstrap, group, topic, {topic: [0]}, **rarely)
    member = ByHand(kafka.bootstrap, group, topic, None)
    serving = asyncio.create_task(hand.app.serve())
    await hand.until_processed(1)
    async with member.app:
        hand.app.stop()
        with pytest.raises(GroupHasMembersError, match="a commit was refused"):
            await asyncio.wait_for(serving, 20)


async def test_after_a_kill_only_unfinished_records_run_again(
    kafka: SharedKafka, topic: str, group: str, start: Start
) -> None:
    """Offset 3 cannot be finished: the completions beyond it are stored by a commit without a member."""
    await kafka.create_topic(topic, 2)
    await fill(kafka, topic, 2, 10)
    process = start(f"{topic}:1", STUCK="3")
    one = TopicPartition(topic, 1)
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers, asyncio.timeout(30):
        while True:
            found = (await brokers.group_commits(group, [one]))[one] or Committed(0, "")
            metadata = CommitMetadata.read(found.metadata.removesuffix("\0"), found.offset)
            if (found.offset, metadata.finished) == (3, (Run(4, 10),)):
                break
            await asyncio.sleep(0.05)
    process.kill()
    assert sorted(process.processed) == [f"1/{offset}" for offset in range(10) if offset != 3]

    second = start(f"{topic}:1")
    await until(lambda: second.processed)
    await kafka.produce(topic, [(None, b"last")], 1)
    await until(lambda: "1/10" in second.processed)
    assert second.processed == ["1/3", "1/10"]


# The client is lost -----------------------------------------------------------------------


def lose(transport: object) -> None:
    """As when the background work of the client ends."""
    assert isinstance(transport, MemberTransport)
    background_tasks(transport)["metadata"].cancel()


async def test_a_lost_client_is_rebuilt_with_the_same_partitions(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, 2)
    await fill(kafka, topic, 2, 3)
    hand = ByHand(kafka.bootstrap, group, topic, {topic: [1]})
    async with hand.app:
        await hand.until_processed(3)
        await hand.until_committed({1: 3})
        lose(hand.app.running_engine().client.transport)
        await until(lambda: hand.app.statistics().client_losses == 1)
        await fill(kafka, topic, 2, 2)
        await hand.until_processed(5)
        await hand.until_committed({0: None, 1: 5})
        assert hand.app.assignment() == (TopicPartition(topic, 1),)
    assert hand.processed == [(1, offset) for offset in range(5)]


@pytest.mark.chaos
@pytest.mark.timeout(120)
async def test_reading_and_committing_resume_after_a_broker_restart(
    breakable_kafka: KafkaBroker, topic: str, group: str
) -> None:
    await breakable_kafka.create_topic(topic, 1)
    await fill(breakable_kafka, topic, 1, 3)
    hand = ByHand(breakable_kafka.bootstrap, group, topic, {topic: [0]})
    async with hand.app:
        await hand.until_processed(3)
        await hand.until_committed({0: 3})
        await breakable_kafka.kill()
        await until(lambda: hand.app.statistics().trouble is not None)
        await breakable_kafka.start()
        await fill(breakable_kafka, topic, 1, 2)
        await hand.until_processed(5)
        await hand.until_committed({0: 5})
    assert hand.processed == [(0, offset) for offset in range(5)]
