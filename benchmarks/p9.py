"""P9: a concurrency that finds out what the back end bears, while that changes."""

import asyncio
import json
import sys
import uuid

from benchmarks.contestants.flow import Phase, Plan, Seen
from benchmarks.p1 import numbered_messages
from benchmarks.report import Report, Verdict
from benchmarks.stage import PROJECT, ContestantFailedError, Stage, Topic

TITLE = "Adaptive concurrency: a back end that serves 32, then 8, then 64 calls of 20 ms at a time"
PARTITIONS = 8
KEYS = 20_000
"""So many that order per key limits nobody."""
SERVICE = 0.02
SERVERS = (32, 8, 64)
SECONDS = 20.0
SETTLING = 5.0
MAXIMUM = 512
FIXED = (8, 64, 512)
RUN_TIMEOUT = 180.0


async def run(stage: Stage) -> Report:
    """Let each concurrency go through all phases, in a process of its own."""
    seconds, settling = (1.0, 0.5) if stage.quick else (SECONDS, SETTLING)
    needed = int(sum(SERVERS) / SERVICE * seconds * 1.2)
    topic = await stage.fill("p9", PARTITIONS, numbered_messages(needed, KEYS))
    found: dict[str, list[Seen]] = {}
    for concurrency in (*FIXED, None):
        name = _name(concurrency)
        plan = Plan(
            bootstrap=stage.cluster.bootstrap,
            topic=topic.name,
            group=f"bench-{uuid.uuid4().hex[:8]}",
            concurrency=concurrency,
            maximum=MAXIMUM,
            service=SERVICE,
            settling=settling,
            phases=tuple(Phase(servers, seconds) for servers in SERVERS),
        )
        found[name] = await _run(plan, topic)
        rates = ", ".join(f"{seen.rate:,.0f}" for seen in found[name])
        stage.say(f"{name}: {rates} records/s")
    return _report(found, judged=not stage.quick)


def _name(concurrency: int | None) -> str:
    return f"concurrency {concurrency}" if concurrency is not None else f"Adaptive(1, {MAXIMUM})"


async def _run(plan: Plan, topic: Topic) -> list[Seen]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.contestants.flow",
        plan.to_json(),
        cwd=PROJECT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise ContestantFailedError(f"{_name(plan.concurrency)} did not end with {topic.name}") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ContestantFailedError(f"{_name(plan.concurrency)} ended with {err.decode(errors='replace')[-4000:]}")
    return [Seen(**seen) for seen in json.loads(out.decode().splitlines()[-1])]


def _report(found: dict[str, list[Seen]], *, judged: bool) -> Report:
    report = Report("P9", TITLE)
    ours = found[_name(None)]
    for name, phases in found.items():
        report.rows += [
            {
                "contestant": name,
                "servers": seen.servers,
                "records/s": seen.rate,
                "median, ms": seen.median * 1e3,
                "p99, ms": seen.late * 1e3,
                "concurrency": seen.concurrency,
            }
            for seen in phases
        ]
    best = [max(phases[number].rate for phases in found.values()) for number in range(len(ours))]
    idle = min(seen.median for phases in found.values() for seen in phases)
    report.verdicts = [
        Verdict(
            "records/s in the worst phase, times the best concurrency for it",
            min(seen.rate / rate for seen, rate in zip(ours, best, strict=True)),
            must=0.85,
            aim=0.95,
            at_least=True,
            judged=judged,
        ),
        Verdict(
            "median latency in the worst phase, times that of an idle back end",
            max(seen.median for seen in ours) / idle,
            must=1.5,
            aim=1.3,
            judged=judged,
        ),
    ]
    report.notes.append(f"The first {SETTLING:g} s of each phase of {SECONDS:g} s are not counted.")
    for seen in ours:
        course = " ".join(map(str, seen.over_time))
        report.notes.append(f"The adaptive concurrency at each second with {seen.servers} servers: {course}")
    return report
