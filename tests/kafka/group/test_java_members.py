"""Members of Kafka's Java client in one group with ours: they share, take over and hand back."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioshard import App, Record
from tests.kafka.faults.support import until
from tests.support.brokers import SharedKafka
from tests.support.kafka_libs import kafka_libs
from tests.support.paths import PROJECT

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(180)]

PARTITIONS = 4
SOURCE = PROJECT / "tests" / "support" / "java" / "GroupMember.java"
PATIENCE = 60.0
"""Seconds for a JVM to start, compile and join."""


class JavaMember:
    """A process with one member."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._log = directory / "java.log"
        with self._log.open("wb") as log, (directory / "java.errors").open("wb") as errors:
            self._process = subprocess.Popen(
                ["java", "-cp", f"{kafka_libs()}/*", str(SOURCE), *arguments], stdout=log, stderr=errors
            )

    def lines(self, kind: str) -> list[str]:
        """Return the lines of one kind that it has printed."""
        return [line.partition(" ")[2] for line in self._log.read_text().splitlines() if line.startswith(kind)]

    @property
    def owned(self) -> set[int]:
        said = self.lines("owns")
        return {int(number) for number in said[-1].split(",") if number} if said else set()

    async def stop(self) -> None:
        """Let it commit and leave."""
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, PATIENCE)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def java(kafka: SharedKafka, topic: str, group: str, tmp_path: Path) -> Iterator[Callable[[str], JavaMember]]:
    """Starts a member of a protocol, which ends with the test."""
    started: list[JavaMember] = []

    def start(protocol: str) -> JavaMember:
        started.append(JavaMember(tmp_path, kafka.bootstrap, group, topic, protocol))
        return started[-1]

    yield start
    for member in started:
        member.kill()


def ours(kafka: SharedKafka, topic: str, group: str, settings: dict[str, Any]) -> tuple[App, Counter[str]]:
    app = App(group, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", commit_interval=0.1, **settings)
    processed: Counter[str] = Counter()

    @app.consume(topic)
    async def handle(record: Record) -> None:
        processed[f"{record.partition}/{record.offset}"] += 1

    return app, processed


@pytest.mark.parametrize(
    ("settings", "protocol"),
    [
        ({"assignor": "range", "session_timeout": 10}, "classic"),
        ({}, "consumer"),
        pytest.param({}, "classic", marks=pytest.mark.chaos),
    ],
    ids=["classic", "consumer", "mixed"],
)
async def test_a_java_member_shares_takes_over_and_hands_back(
    kafka: SharedKafka,
    topic: str,
    group: str,
    java: Callable[[str], JavaMember],
    settings: dict[str, Any],
    protocol: str,
) -> None:
    await kafka.create_topic(topic, PARTITIONS)
    app, processed = ours(kafka, topic, group, settings)
    sent = 0

    async def send() -> None:
        nonlocal sent
        for number in range(PARTITIONS):
            await kafka.produce(topic, [(b"", b"")] * 5, number)
        sent += 5

    def expected() -> set[str]:
        return {f"{number}/{offset}" for number in range(PARTITIONS) for offset in range(sent)}

    async with app:
        await send()
        await until(lambda: processed.keys() == expected(), app.explain)

        theirs = java(protocol)
        await until(lambda: len(theirs.owned) == len(app.assignment()) == PARTITIONS // 2, app.explain, PATIENCE)
        assert theirs.owned | {at.partition for at in app.assignment()} == set(range(PARTITIONS))
        await send()
        await until(lambda: processed.keys() | set(theirs.lines("record")) == expected(), app.explain)

        await theirs.stop()
        await until(lambda: len(app.assignment()) == PARTITIONS, app.explain, PATIENCE)
        await send()
        await until(lambda: processed.keys() | set(theirs.lines("record")) == expected(), app.explain)
        await kafka.wait_for_lag(group, topic)
    assert Counter(theirs.lines("record")) + processed == dict.fromkeys(expected(), 1), "nothing lost, nothing twice"
    assert theirs.lines("lost") == []
