"""The stage of a benchmark: a broker, topics that are filled once, and one process per run of a contestant."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers import PEERS, TRANSACTIONAL, ParallelConsumerUnavailableError, command, find_peers
from benchmarks.peers.prosody import PROSODY, ProsodyUnavailableError, find_prosody
from benchmarks.spec import Measurement, Spec, Work
from tests.support.cluster import BATCH_BYTES, KafkaCluster, Message
from tests.support.kafka import KafkaBroker
from tests.tools.compiled import CompilerUnavailableError, compiled_package, environment

PROJECT = Path(__file__).resolve().parents[1]
RUN_TIMEOUT = 600.0
COMPILED = "aioshard, compiled"
"""The contestant that runs on the compiled package."""
CHUNK_BYTES = 32 * 1024 * 1024
"""Bytes that are produced in one call."""

Runs = dict[str, list[Measurement]]
"""The measurements of each contestant, in the order of the rounds."""


class ContestantFailedError(RuntimeError):
    """A measured process failed; the message contains its output."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A filled topic."""

    name: str
    ends: tuple[int, ...]

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(self.ends)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A participant of a benchmark, with its share of the topic and its number of rounds."""

    name: str
    records: int | None = None
    """Number of records that it processes; None for all."""
    rounds: int | None = None
    """Number of rounds in which it takes part; None for all."""
    package: str | None = None
    """Package that it needs; without it the contestant is left out."""
    peer: bool = False
    """Whether it runs in a JVM; left out without Java."""
    compiled: bool = False
    """Whether it runs on the compiled package; left out without a C compiler."""
    prosody: bool = False
    """Whether it runs on Prosody; left out if its environment cannot be made."""


class Stage:
    """A broker for one command.

    Attributes:
        quick: Whether inputs are tiny, to test that everything works; figures mean nothing then.
    """

    def __init__(self, cluster: KafkaCluster, *, quick: bool, progress: Console) -> None:
        self.quick = quick
        self.cluster = cluster
        self._progress = progress
        self._topics: list[str] = []
        self._whole_runs: list[Spec] = []

    def say(self, text: str) -> None:
        """Print progress on standard error."""
        self._progress.print(text, style="dim", highlight=False)

    def size(self, full: int, quick: int) -> int:
        """Return a number of records or rounds, small in a quick run."""
        return quick if self.quick else full

    def lineup(self, needed: Sequence[Contestant], others: Sequence[Contestant]) -> list[Contestant]:
        """Return the contestants that can run here; in a quick run only those that the verdict needs."""
        contestants = [*needed, *([] if self.quick else others)]
        for what, needs, provide, unavailable in (
            ("contestants in a JVM", attrgetter("peer"), find_peers, ParallelConsumerUnavailableError),
            ("the compiled package", attrgetter("compiled"), compiled_package, CompilerUnavailableError),
            ("Prosody", attrgetter("prosody"), find_prosody, ProsodyUnavailableError),
        ):
            if any(map(needs, contestants)):
                try:
                    provide()
                except unavailable as missing:
                    self.say(f"without {what}: {missing}")
                    contestants = [contestant for contestant in contestants if not needs(contestant)]
        return [
            contestant
            for contestant in contestants
            if contestant.package is None or importlib.util.find_spec(contestant.package) is not None
        ]

    async def begin(self, name: str, partitions: int, config: Mapping[str, str]) -> str:
        """Create an empty topic, which `tidy` deletes; return its name."""
        unique = f"bench-{name}-{uuid.uuid4().hex[:8]}"
        await self.cluster.create_topic(unique, partitions, config)
        self._topics.append(unique)
        return unique

    async def fill(
        self, name: str, partitions: int, messages: Iterator[Message], *, batch_bytes: int = BATCH_BYTES
    ) -> Topic:
        """Create a topic and produce *messages* in batches of at most *batch_bytes*; keys choose the partition."""
        unique = await self.begin(name, partitions, {})
        chunk: list[Message] = []
        size = 0
        for message in messages:
            chunk.append(message)
            size += 100 + len(message[1] or b"")
            if size >= CHUNK_BYTES:
                await self.cluster.produce(unique, chunk, batch_bytes=batch_bytes, deadline=RUN_TIMEOUT)
                chunk, size = [], 0
        if chunk:
            await self.cluster.produce(unique, chunk, batch_bytes=batch_bytes, deadline=RUN_TIMEOUT)
        ends = await self.cluster.end_offsets(unique)
        topic = Topic(unique, tuple(ends[partition] for partition in range(partitions)))
        self.say(f"filled {unique}: {topic.records:,} records in {partitions} partitions")
        return topic

    async def tidy(self) -> None:
        """Delete the topics that were created."""
        while self._topics:
            await self.cluster.delete_topic(self._topics.pop())
        self._whole_runs.clear()

    async def contest(
        self,
        contestants: Sequence[Contestant],
        topic: Topic,
        *,
        rounds: int,
        work: Work,
        concurrency: int,
        run: Callable[[Spec], Awaitable[Measurement]] | None = None,
        **handler: float,
    ) -> Runs:
        """Let the contestants run in turn, round after round: A B A B.

        Every second round goes backwards, so a change of the machine's load affects all of them. Each run has a
        separate process, unless *run* is given.
        """
        runs: Runs = {contestant.name: [] for contestant in contestants}
        for number in range(rounds):
            order = contestants if number % 2 == 0 else list(reversed(contestants))
            for contestant in order:
                if contestant.rounds is not None and number >= contestant.rounds:
                    continue
                records = topic.records if contestant.records is None else min(contestant.records, topic.records)
                spec = self.spec(contestant.name, topic, records=records, work=work, concurrency=concurrency, **handler)
                measured = await (run or self.run)(spec)
                runs[contestant.name].append(measured)
                self.say(
                    f"round {number + 1}/{rounds}  {contestant.name}: {measured.cpu_per_record:.2f} µs CPU/record, "
                    f"{measured.rate:,.0f} records/s"
                )
        return runs

    def spec(self, contestant: str, topic: Topic, *, records: int, work: Work, concurrency: int, **more: float) -> Spec:
        """Return the spec of one run, in a new consumer group."""
        spec = Spec(
            contestant=contestant,
            bootstrap=self.cluster.bootstrap,
            topic=topic.name,
            group=f"bench-{uuid.uuid4().hex[:8]}",
            ends=topic.ends,
            records=records,
            concurrency=concurrency,
            work=work,
        )
        changes: dict[str, Any] = more
        return replace(spec, **changes)

    async def run(self, spec: Spec, timeout: float = RUN_TIMEOUT) -> Measurement:
        """Run one contestant in a separate process, for at most *timeout* seconds.

        Raises:
            ContestantFailedError: It ended with an error or not at all.
        """
        process = await self.start(spec)
        try:
            measured = await process.measurement(timeout)
        finally:
            await process.kill()
        if spec.work in {"count", "check"} and spec.records == sum(spec.ends):
            self._whole_runs.append(spec)
        return measured

    async def start(self, spec: Spec) -> "Process":
        """Start one contestant; the caller must end it."""
        return Process(spec, await _start(replace(spec, spawned_at=time.monotonic())))

    async def uncommitted(self, contestant: str) -> list[str]:
        """Return sentences about records that a contestant consumed to the end of a topic and did not commit."""
        sentences = []
        for spec in self._whole_runs:
            if spec.contestant != contestant:
                continue
            committed = await self.cluster.committed(spec.group, spec.topic)
            short = sum(end - committed.get(partition, 0) for partition, end in enumerate(spec.ends))
            if short:
                sentences.append(f"{contestant} did not commit {short} of {sum(spec.ends)} records of {spec.topic}")
        return sentences


class Process:
    """One running contestant."""

    def __init__(self, spec: Spec, process: asyncio.subprocess.Process) -> None:
        self._spec = spec
        self._process = process

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def check(self) -> None:
        """Check that it is still running.

        Raises:
            ContestantFailedError: It has ended.
        """
        if self._process.returncode is not None:
            message = f"{self._spec.contestant} ended early, with {self._process.returncode}"
            raise ContestantFailedError(message)

    async def measurement(self, timeout: float = RUN_TIMEOUT) -> Measurement:
        """Wait for the end, for at most *timeout* seconds.

        Raises:
            ContestantFailedError: It ended with an error or not at all.
        """
        try:
            async with asyncio.timeout(timeout):
                out, err = await self._process.communicate()
        except TimeoutError as error:
            message = f"{self._spec.contestant} did not end within {timeout:g} s"
            raise ContestantFailedError(message) from error
        if self._process.returncode != 0:
            output = err.decode(errors="replace")[-4000:]
            message = f"{self._spec.contestant} ended with {self._process.returncode}:\n{output}"
            raise ContestantFailedError(message)
        return Measurement(**json.loads(out.decode().splitlines()[-1]))

    async def kill(self) -> None:
        """Kill it, if it is still running."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def with_bytecode(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which Python stores bytecode.

    The packages that pip installed have theirs; ours, imported from the sources, would be compiled at each start.
    """
    return {name: value for name, value in variables.items() if name != "PYTHONDONTWRITEBYTECODE"}


async def _start(spec: Spec) -> asyncio.subprocess.Process:
    if spec.contestant in (*PEERS, TRANSACTIONAL):
        arguments = await asyncio.to_thread(command, spec)
    else:
        python = str(await asyncio.to_thread(find_prosody)) if spec.contestant == PROSODY else sys.executable
        arguments = [python, "-m", "benchmarks.contestants", spec.to_json()]
    return await asyncio.create_subprocess_exec(
        *arguments,
        cwd=PROJECT,
        env=with_bytecode(environment() if spec.contestant == COMPILED else os.environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def stage(bootstrap: str | None, *, quick: bool, progress: Console) -> AsyncIterator[Stage]:
    """Provide a stage on the cluster at *bootstrap*, or on a new broker that ends with it.

    Raises:
        BrokerUnavailableError: *bootstrap* is None, and no broker can be started here.
    """
    if bootstrap is not None:
        yield Stage(KafkaCluster(bootstrap), quick=quick, progress=progress)
        return
    with tempfile.TemporaryDirectory(prefix="aioshard-bench-", ignore_cleanup_errors=True) as directory:
        broker = KafkaBroker(Path(directory))
        try:
            await broker.start()
            yield Stage(broker, quick=quick, progress=progress)
        finally:
            await broker.kill()
