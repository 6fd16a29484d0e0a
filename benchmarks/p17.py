"""P17: a long tail: 32 unequal partitions of three topics, and four members, one of which dies."""

import asyncio
import itertools
import os
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.contestants.tail import PLAIN, TailSpec
from benchmarks.report import Cell, Report, Verdict
from benchmarks.stage import PROJECT, ContestantFailedError, Stage, with_bytecode

TITLE = "Long tail: 32 unequal partitions, three topics, four members; one is killed after a third of the work"
TOPICS = {"orders": 16, "refunds": 10, "clicks": 6}
MEMBERS = 4
CONCURRENCY = 16
SECONDS = 0.01
RECORDS = 320_000
LAG = "aioshard, lag"
CONTESTANTS = {"aioshard, range": "range", "aioshard, fair": "fair", LAG: "lag", PLAIN: PLAIN}
INTERVAL = 2.0
"""The `balance_interval` of `LAG`: this run takes a minute, while a real backlog takes hours."""
SMALLER = 32
"""A plain group runs one record at a time: its input is divided by this, and its time multiplied."""
STEP_TIMEOUT = 300.0
LOOK_INTERVAL = 0.2

RecordId = tuple[str, int, int]


@dataclass(slots=True)
class Tail:
    """The members of one group, and when each record was processed first."""

    spec: TailSpec
    directory: Path
    members: list[asyncio.subprocess.Process] = field(default_factory=list)
    first: dict[RecordId, int] = field(default_factory=dict)
    """By topic, partition and offset, in nanoseconds of the machine's monotonic clock."""
    _read: dict[Path, int] = field(default_factory=dict)

    async def start(self) -> None:
        """Start one member."""
        journal = self.directory / f"member-{len(self.members)}"
        journal.touch()
        self._read[journal] = 0
        spec = replace(self.spec, journal=str(journal)).to_json()
        command = [sys.executable, "-m", "benchmarks.contestants.tail", spec]
        self.members.append(
            await asyncio.create_subprocess_exec(
                *command,
                cwd=PROJECT,
                env=with_bytecode(os.environ),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
        )

    def look(self) -> int:
        """Read what the members have written since; return how many records were processed."""
        for journal, begin in self._read.items():
            with journal.open("rb") as file:
                file.seek(begin)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[journal] = begin + whole
            for line in data[:whole].splitlines():
                topic, partition, offset, at = line.decode().split()
                self.first.setdefault((topic, int(partition), int(offset)), int(at))
        return len(self.first)

    async def until(self, records: int) -> None:
        """Wait until *records* records were processed."""
        async with asyncio.timeout(STEP_TIMEOUT):
            while self.look() < records:
                if self.members[-1].returncode is not None:
                    raise ContestantFailedError(f"a member of {self.spec.assignor} ended early")
                await asyncio.sleep(LOOK_INTERVAL)


async def run(stage: Stage) -> Report:
    """Measure one run for each contestant."""
    report = Report("P17", TITLE)
    names = [LAG, "aioshard, range"] if stage.quick else list(CONTESTANTS)
    for name in names:
        total = stage.size(RECORDS, 2_000) // (SMALLER if name == PLAIN else 1)
        took, ideal = await _measure(stage, CONTESTANTS[name], total)
        stage.say(f"{name}: the last of {total:,} records after {took:.1f} s, {took / ideal:.2f} times work / workers")
        scaled = f"{SMALLER} times {took:.0f} s" if name == PLAIN else None
        row: dict[str, Cell] = {"contestant": name, "records": total, "s to the last record": took}
        row |= {"work / workers, s": ideal, "times": took / ideal, "of a smaller input": scaled}
        report.rows.append(row)
        if name == LAG:
            report.verdicts.append(
                Verdict(
                    "time to the last record, times work / workers", took / ideal, must=1.15, judged=not stage.quick
                )
            )
    report.notes.append(
        f"A member has {CONCURRENCY} workers, and one of a plain group has one; each needs {SECONDS * 1000:g} ms for a "
        "record. The workers of the killed member count until it dies."
    )
    return report


async def _measure(stage: Stage, assignor: str, total: int) -> tuple[float, float]:
    """Return the seconds to the last record, and the ideal: the work divided by the workers."""
    topics = await _fill(stage, total)
    with tempfile.TemporaryDirectory(prefix="aioshard-bench-") as directory:
        spec = TailSpec(
            bootstrap=stage.cluster.bootstrap,
            group=f"bench-{uuid.uuid4().hex[:8]}",
            topics=topics,
            assignor=assignor,
            interval=INTERVAL,
            concurrency=CONCURRENCY,
            seconds=SECONDS,
            journal="",
            go=str(Path(directory) / "go"),
        )
        async with _group(Tail(spec, Path(directory))) as tail:
            began = time.monotonic_ns()
            Path(spec.go).touch()
            await tail.until(total // 3)
            killed = tail.members.pop(0)
            killed.kill()
            died = time.monotonic_ns()
            await tail.until(total)
        workers = 1 if assignor == PLAIN else CONCURRENCY
        before = (died - began) / 1e9
        left = total * SECONDS / workers - MEMBERS * before
        return (max(tail.first.values()) - began) / 1e9, before + left / (MEMBERS - 1)


@asynccontextmanager
async def _group(tail: Tail) -> AsyncIterator[Tail]:
    """Run four members, which have their partitions when the block begins and end with it."""
    try:
        for _ in range(MEMBERS):
            await tail.start()
            await asyncio.sleep(1.5)  # they join one after the other, as in a deploy
        await asyncio.sleep(8.0)
        yield tail
    finally:
        for member in tail.members:
            if member.returncode is None:
                member.kill()
                await member.wait()


async def _fill(stage: Stage, total: int) -> list[str]:
    """Create the topics; the partition of rank r has a share of 1 / r, and the ranks are spread over all topics."""
    partitions = [(topic, number) for topic, count in TOPICS.items() for number in range(count)]
    shares = [1 / (number * 7 % len(partitions) + 1) for number in range(len(partitions))]
    names = {topic: await stage.begin(f"p17-{topic}", count, {}) for topic, count in TOPICS.items()}
    sizes = [int(total * share / sum(shares)) for share in shares]
    sizes[0] += total - sum(sizes)
    for (topic, number), size in zip(partitions, sizes, strict=True):
        keys = itertools.islice(itertools.cycle(range(1_000)), size)
        messages = [(b"%s-%d-%d" % (topic.encode(), number, key), b"x" * 100) for key in keys]
        if messages:
            await stage.cluster.produce(names[topic], messages, number)
    stage.say(f"filled {len(partitions)} partitions with {min(sizes):,} to {max(sizes):,} records")
    return list(names.values())
