"""Groups of exactly-once processes, and the comparison of their input and output."""

import asyncio
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from aiokafka.errors import KafkaError

from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, ParkedRecord, Removed, read_parked
from tests.guarantees.exactly_once_member import copies, fails
from tests.support.cluster import KafkaCluster
from tests.support.paths import PROJECT

PARTITIONS = 8
KEYS = 199
"""Prime, so that each key has records that fail and others."""
POLL_INTERVAL = 0.1
SETTLED = 0.3
"""Seconds after which the brokers have ended what a frozen process had asked for."""
SESSION = 6.0
STOP_TIMEOUT = 60.0
SETTINGS = {
    "session_timeout": f"{SESSION:g}",
    "heartbeat_interval": "1",
    "rebalance_timeout": "12",
    "drain_timeout": "2",
    "commit_timeout": "3",
    "transaction_timeout": "8",
    "shutdown_timeout": "8",
    "start_timeout": "60",
    "commit_interval": "0.02",
}

ASSIGNED = re.compile(r"is over \(.*, assigned [1-9]")
"""A rebalance of a process that has given it partitions, in its log."""

Process = subprocess.Popen[bytes]
Protocol = Literal["classic", "consumer"]

with_protocols = pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.chaos)])
"""Run a test with each group protocol; with that of KIP-848 under the mark `chaos`."""


class Group:
    """Processes of one group, and the topics that they read and write.

    Attributes:
        members: The processes that should run, the oldest first.
        produced: How many records the group has to read.
    """

    def __init__(
        self,
        kafka: KafkaCluster,
        directory: Path,
        protocol: Protocol = "classic",
        *,
        keys: int = KEYS,
        parks_beside: bool = False,
        **member: str,
    ) -> None:
        """Start nothing yet.

        Args:
            kafka: The brokers.
            directory: For the logs of the processes.
            protocol: The group protocol.
            keys: Number of keys.
            parks_beside: Whether every second key is in another topic, `parking`, whose failed records are parked,
                while those of the first have dead letters.
            member: Settings of `exactly_once_member`.
        """
        self.kafka = kafka
        self.topic = f"exact-{uuid.uuid4().hex[:8]}"
        self.parking = f"{self.topic}.parking" if parks_beside else None
        self._keys = keys
        self.members: list[Process] = []
        self.produced = 0
        self._directory = directory
        self._logs: dict[int, Path] = {}
        """By process id."""
        ours = {**SETTINGS, "group_protocol": protocol}
        if protocol == "consumer":
            del ours["session_timeout"], ours["heartbeat_interval"]
        settings = {f"AIOSHARD_{name.upper()}": value for name, value in ours.items()}
        self._environment = (
            os.environ
            | settings
            | {
                "PYTHONPATH": str(PROJECT),
                "AIOSHARD_BOOTSTRAP_SERVERS": kafka.bootstrap,
                "EXACTLY_ONCE_TOPIC": self.topic,
                "EXACTLY_ONCE_PARKING": self.parking or "",
                **{f"EXACTLY_ONCE_{name.upper()}": value for name, value in member.items()},
            }
        )

    async def create(self, records: int, partitions: int = PARTITIONS) -> None:
        """Create the topics, and produce the first records."""
        for name in (*self.inputs, f"{self.topic}.out", f"{self.topic}.dlt"):
            await self.kafka.create_topic(name, partitions)
        await self.produce(records)

    async def produce(self, records: int) -> None:
        """Produce more records; each has the next number."""
        numbers = range(self.produced, self.produced + records)
        for topic in self.inputs:
            messages = [
                (b"key-%d" % (number % self._keys), b"%d" % number)
                for number in numbers
                if self.topic_of(number) == topic
            ]
            await self.kafka.produce(topic, messages)
        self.produced = numbers.stop

    @property
    def inputs(self) -> list[str]:
        """The topics that the processes read."""
        return [self.topic] if self.parking is None else [self.topic, self.parking]

    def topic_of(self, number: int) -> str:
        """The topic of a record; the same for all records of a key."""
        return self.inputs[number % self._keys % len(self.inputs)]

    # Processes -------------------------------------------------------------------------------

    def start(self, **more: str) -> Process:
        """Start a process; *more* is added to its environment."""
        path = self._directory / f"{len(self._logs) + 1}.log"
        extra = {f"EXACTLY_ONCE_{name.upper()}": value for name, value in more.items()}
        command = [sys.executable, "-m", "aioshard", "run", "tests.guarantees.exactly_once_member:app"]
        with path.open("ab") as log:
            member = subprocess.Popen(
                command, cwd=PROJECT, env=self._environment | extra, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.members.append(member)
        self._logs[member.pid] = path
        return member

    async def until_assigned(self, member: Process) -> None:
        """Wait until a process has partitions."""
        async with asyncio.timeout(STOP_TIMEOUT):
            while ASSIGNED.search(self._logs[member.pid].read_text()) is None:
                self.check_alive()
                await asyncio.sleep(POLL_INTERVAL)

    async def stop(self, member: Process, codes: Collection[int] = (0,)) -> None:
        """Stop a process as a deploy does; it must end with one of the exit codes."""
        self.members.remove(member)
        member.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(member.wait, STOP_TIMEOUT)
        assert code in codes, f"exit code {code}\n{self.logs()}"

    async def kill(self, member: Process) -> None:
        self.members.remove(member)
        member.kill()
        await asyncio.to_thread(member.wait)

    async def deploy(self, codes: Collection[int] = (0,)) -> None:
        """Replace each process by another one, the next one when that has partitions; see `stop`."""
        for member in tuple(self.members):
            await self.stop(member, codes)
            await self.until_assigned(self.start())

    async def deploy_in_a_hurry(self) -> None:
        """Replace each process without a pause, so that some are stopped in the middle of a rebalance.

        A process may then end with exit code 4: its last transaction was refused, so records run again. One that has
        just been started ends by the signal itself.
        """
        for member in tuple(self.members):
            await self.stop(member, (0, 4, -signal.SIGTERM))
            self.start()

    @asynccontextmanager
    async def frozen_in_a_transaction(self) -> AsyncIterator[None]:
        """Stop all processes with SIGSTOP at a moment at which one has an open transaction; resume them at the end.

        After each try that came at the wrong moment they have more records, and run for longer.
        """
        out = f"{self.topic}.out"
        for tries in itertools.count(1):
            self._signal(signal.SIGSTOP)
            await asyncio.sleep(SETTLED)
            if await self._has_open_transaction(out):
                await asyncio.sleep(SETTLED)  # a commit that was on its way has been executed by now
                if await self._has_open_transaction(out):
                    break
            await self.produce(100)
            self._signal(signal.SIGCONT)
            await asyncio.sleep(random.random() * POLL_INTERVAL * tries)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    async def _has_open_transaction(self, topic: str) -> bool:
        return await self.kafka.end_offsets(topic) != await self.kafka.end_offsets(topic, "read_committed")

    async def kill_in_a_transaction(self) -> None:
        """Kill all processes at a moment at which one has an open transaction, and start as many others."""
        count = len(self.members)
        async with self.frozen_in_a_transaction():
            for member in tuple(self.members):
                await self.kill(member)
        for _ in range(count):
            self.start()

    def _signal(self, number: signal.Signals) -> None:
        for member in self.members:
            member.send_signal(number)

    def check_alive(self) -> None:
        """Fail if a process has ended that nobody stopped."""
        ended = [member.returncode for member in self.members if member.poll() is not None]
        assert not ended, f"processes ended by themselves: {ended}\n{self.logs()}"

    async def end(self) -> None:
        """End all processes."""
        for member in tuple(self.members):
            await self.kill(member)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2_000:] for path in sorted(self._directory.glob("*.log")))

    # Progress --------------------------------------------------------------------------------

    async def committed(self) -> int:
        """How many records the committed offsets cover."""
        committed = [await self.kafka.committed(self.topic, name) for name in self.inputs]
        return sum(sum(offsets.values()) for offsets in committed)

    async def until_committed(self, records: int, timeout: float = 120) -> None:
        """Wait until the offsets of that number of records are committed."""
        async with asyncio.timeout(timeout):
            while True:
                with suppress(KafkaError, TimeoutError):  # brokers that have just come back
                    if await self.committed() >= records:
                        return
                self.check_alive()
                await asyncio.sleep(POLL_INTERVAL)

    async def until_visible(self, outputs: int, timeout: float = 60) -> None:
        """Wait until a reader sees that number of outputs."""
        async with asyncio.timeout(timeout):
            while len(await self.kafka.read(f"{self.topic}.out")) < outputs:  # noqa: ASYNC110 - no event in this process
                await asyncio.sleep(POLL_INTERVAL)


def wrong(outputs: Iterable[Record], expected: Counter[str]) -> dict[str, object]:
    """Return missing and repeated messages, and keys with messages out of order."""
    seen: Counter[str] = Counter()
    order: dict[bytes | None, list[tuple[int, int]]] = defaultdict(list)
    for record in sorted(outputs, key=lambda record: (record.partition, record.offset)):
        text = (record.value or b"").decode()
        seen[text] += 1
        number, _, copy = text.partition("/")
        order[record.key].append((int(number), int(copy) if copy.isdecimal() else -1))
    return {
        name: found
        for name, found in {
            "lost": sorted((expected - seen).elements())[:10],
            "too many": sorted((seen - expected).elements())[:10],
            "out of order": [key for key, found in order.items() if found != sorted(found)][:10],
        }.items()
        if found
    }


class Figures(NamedTuple):
    """How many messages a reader of the topics of a group sees."""

    outputs: int
    dead_letters: int
    aborted: int
    """Outputs that only a `read_uncommitted` reader sees."""


async def verify(group: Group, *, poison: str = "none", cut: bool = False) -> Figures:
    """Every record has had its outputs or its dead letter exactly once, in order; *cut* expects aborted ones too."""
    for member in tuple(group.members):
        await group.stop(member, (0, -signal.SIGTERM))  # one that has just been started ends by the signal
    numbers = [str(number) for number in range(group.produced)]
    outputs = await group.kafka.read(f"{group.topic}.out")
    failed = Counter(
        number for number in numbers if fails(number, poison) and group.topic_of(int(number)) == group.topic
    )
    expected = Counter(
        f"{number}/{copy}" for number in numbers if number not in failed for copy in range(copies(number))
    )
    assert not (found := wrong(outputs, expected)), f"outputs: {found}"
    dead_letters = await group.kafka.read(f"{group.topic}.dlt")
    assert not (found := wrong(dead_letters, failed)), f"dead letters: {found}"
    everything = await group.kafka.read(f"{group.topic}.out", "read_uncommitted")
    assert not cut or len(everything) > len(outputs), "no transaction was ever cut: the test shows nothing"
    return Figures(len(outputs), len(dead_letters), len(everything) - len(outputs))


class Parked(NamedTuple):
    """Counts per record of the side topic: parked, retried without success and removed."""

    stored: Counter[Coordinates]
    attempts: Counter[tuple[Coordinates, int]]
    removed: Counter[Coordinates]


async def read_side_topic(group: Group) -> Parked:
    """Read the side topic of a group."""
    found = Parked(Counter(), Counter(), Counter())
    for record in await group.kafka.read(f"{group.topic}.parked"):
        match read_parked(record):
            case ParkedRecord() as parked:
                found.stored[parked.coordinates] += parked.retries == 0
                found.attempts[parked.coordinates, parked.retries] += 1
            case Removed() as gone:
                found.removed[gone.coordinates] += 1
    return found


async def verify_parked(group: Group, timeout: float = 150) -> int:
    """Wait until nothing is parked; each record was parked once and removed once. Return how many there were."""
    async with asyncio.timeout(timeout):
        while (found := await read_side_topic(group)).stored.keys() != found.removed.keys():  # noqa: ASYNC110 - none here
            await asyncio.sleep(POLL_INTERVAL)
    assert found.stored, "nothing was parked: the test shows nothing"
    for counts in (found.stored, found.attempts, found.removed):
        assert set(counts.values()) == {1}, counts.most_common(3)
    return len(found.stored)
