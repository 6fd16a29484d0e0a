"""Static members in separate processes: killed and restarted within the session, and two with one id."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.records import TopicPartition
from tests.support.kafka_libs import PROJECT
from tests.support.shared_kafka import SharedKafka

QUICK: dict[str, Any] = {"session_timeout": 20, "heartbeat_interval": 0.5}
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {"client": "aiokafka"} | QUICK,
        pytest.param({"client": "confluent"} | QUICK, marks=pytest.mark.chaos),
        pytest.param({"client": "confluent", "group_protocol": "consumer"}, marks=pytest.mark.chaos),
    ],
    ids=["aiokafka", "cooperative", "KIP-848"],
)

MEMBER = """
import os
from aioshard import App, Record

app = App(os.environ["GROUP"], auto_offset_reset="earliest", commit_interval=0.1)

@app.consume(os.environ["TOPIC"])
async def handle(record: Record) -> None:
    print(f"processed {record.partition}/{record.offset}", flush=True)
"""


class Process:
    """`aioshard run` with a static member."""

    def __init__(self, directory: Path, name: str, environment: dict[str, str]) -> None:
        self._log = directory / f"{name}.log"
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "aioshard", "run", "member:app"],
                cwd=directory,
                env=os.environ | environment | {"PYTHONPATH": str(PROJECT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def is_assigned(self) -> bool:
        return re.search(r"\bassigned [1-9]", self.log) is not None

    @property
    def code(self) -> int | None:
        return self.popen.poll()

    async def stop(self) -> None:
        self.popen.send_signal(signal.SIGTERM)
        await until(lambda: self.code is not None)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)


Start = Callable[..., Process]


@pytest.fixture
def start(kafka: SharedKafka, tmp_path: Path, topic: str, group: str) -> Iterator[Start]:
    """Starts processes of the test's group, which are ended with the test; arguments are settings."""
    (tmp_path / "member.py").write_text(MEMBER)
    started: list[Process] = []

    def begin(**settings: Any) -> Process:
        given = {"bootstrap_servers": kafka.bootstrap, "fetch_max_wait": 0.05} | settings
        environment = {f"AIOSHARD_{name.upper()}": str(value) for name, value in given.items()}
        process = Process(tmp_path, f"member{len(started)}", environment | {"GROUP": group, "TOPIC": topic})
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


async def until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - processes tell nobody
            await asyncio.sleep(0.05)


@OPTIONS
@pytest.mark.timeout(120)
async def test_a_restarted_static_member_gets_its_partitions_without_a_rebalance(
    kafka: SharedKafka, topic: str, group: str, start: Start, options: dict[str, Any]
) -> None:
    await kafka.create_topic(topic, 4)
    other = App(
        group,
        bootstrap_servers=kafka.bootstrap,
        auto_offset_reset="earliest",
        group_instance_id="other",
        **options,
    )
    processed: list[TopicPartition] = []

    @other.consume(topic)
    async def handle(record: Record) -> None:
        processed.append(TopicPartition(record.topic, record.partition))

    async with other:
        first = start(group_instance_id="one", **options)
        await until(lambda: len(other.assignment()) == 2 and first.is_assigned())
        theirs = other.assignment()
        rebalances, epochs = other.statistics().rebalances, [one.epoch for one in other.statistics().partitions]
        mine = [number for number in range(4) if TopicPartition(topic, number) not in theirs]
        await kafka.produce(topic, [(b"", b"")], mine[0])
        await until(lambda: f"processed {mine[0]}/0" in first.log)

        if options.get("group_protocol") == "consumer":
            await first.stop()  # one that was killed keeps its id until its session has timed out, under this protocol
        else:
            first.kill()
        for number in range(4):
            await kafka.produce(topic, [(b"", b"")] * 5, number)
        await until(lambda: len(processed) == 10)
        again = start(group_instance_id="one", **options)
        await until(lambda: all(f"processed {number}/4" in again.log for number in mine))

        assert other.assignment() == theirs
        assert other.statistics().rebalances == rebalances
        assert [one.epoch for one in other.statistics().partitions] == epochs
        assert set(processed) == set(theirs)


@OPTIONS
@pytest.mark.timeout(120)
async def test_of_two_members_with_one_instance_id_one_ends_with_an_error(
    kafka: SharedKafka, topic: str, start: Start, options: dict[str, Any]
) -> None:
    await kafka.create_topic(topic, 2)
    first = start(group_instance_id="twin", **options)
    await until(first.is_assigned)
    second = start(group_instance_id="twin", **options)

    await until(lambda: first.code is not None or second.code is not None, 60.0)

    ended, left = (first, second) if first.code is not None else (second, first)
    assert ended.code == 1, ended.log
    assert "another process has joined group" in ended.log.splitlines()[-1]
    assert "with our group_instance_id='twin'" in ended.log.splitlines()[-1]
    await kafka.produce(topic, [(b"", b"")] * 5, 0)
    await kafka.produce(topic, [(b"", b"")] * 5, 1)
    await until(lambda: "processed 0/4" in left.log and "processed 1/4" in left.log)
    assert left.code is None, left.log
