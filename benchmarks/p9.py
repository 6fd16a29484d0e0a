"""P9: a concurrency that follows what the back end bears, while that changes."""

import asyncio
import json
import os
import sys
import uuid

from benchmarks.contestants.flow import Phase, Plan, Result
from benchmarks.p1 import numbered_messages
from benchmarks.report import Report, Verdict
from benchmarks.stage import PROJECT, ContestantFailedError, Stage, Topic, with_bytecode

TITLE = "Adaptive concurrency: a back end that serves 32, then 8, then 64 calls of 20 ms at a time"
PARTITIONS = 8
KEYS = 20_000
"""So many that the order per key limits nobody."""
SERVICE = 0.02
SERVERS = (32, 8, 64)
SECONDS = 20.0
SETTLING = 5.0
MAXIMUM = 512
FIXED = (8, 64, 512)
ADAPTIVE = f"Adaptive(1, {MAXIMUM})"
RUN_TIMEOUT = 180.0


async def run(stage: Stage) -> Report:
    """Let each concurrency go through all phases, in a separate process."""
    seconds = SECONDS
    settling = SETTLING
    if stage.quick:
        seconds = 1.0
        settling = 0.5
    needed = int(sum(SERVERS) / SERVICE * seconds * 1.2)
    topic = await stage.fill("p9", PARTITIONS, numbered_messages(needed, KEYS))
    contestants = {f"concurrency {number}": number for number in FIXED} | {ADAPTIVE: None}
    results: dict[str, list[Result]] = {}
    for name, concurrency in contestants.items():
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
        results[name] = await _run(name, plan, topic)
        rates = ", ".join(f"{result.rate:,.0f}" for result in results[name])
        stage.say(f"{name}: {rates} records/s")
    return _report(results, judged=not stage.quick)


async def _run(name: str, plan: Plan, topic: Topic) -> list[Result]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.contestants.flow",
        plan.to_json(),
        cwd=PROJECT,
        env=with_bytecode(os.environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise ContestantFailedError(f"{name} did not end with {topic.name}") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ContestantFailedError(f"{name} ended with {process.returncode}:\n{err.decode(errors='replace')[-4000:]}")
    return [Result(**result) for result in json.loads(out.decode().splitlines()[-1])]


def _report(results: dict[str, list[Result]], *, judged: bool) -> Report:
    report = Report("P9", TITLE)
    for name, phases in results.items():
        report.rows += [
            {
                "contestant": name,
                "servers": result.servers,
                "records/s": result.rate,
                "median, ms": result.median * 1e3,
                "p99, ms": result.p99 * 1e3,
                "concurrency": result.concurrency,
            }
            for result in phases
        ]
    ours = results[ADAPTIVE]
    best = [max(phases[number].rate for phases in results.values()) for number in range(len(ours))]
    idle = min(result.median for phases in results.values() for result in phases)
    report.verdicts = [
        Verdict(
            "records/s in the worst phase, times those of the best concurrency for it",
            min(result.rate / rate for result, rate in zip(ours, best, strict=True)),
            must=0.77,
            aim=0.9,
            at_least=True,
            judged=judged,
        ),
        Verdict(
            "median latency in the worst phase, times that of an idle back end",
            max(result.median for result in ours) / idle,
            must=1.5,
            aim=1.3,
            judged=judged,
        ),
    ]
    report.notes.append(f"The first {SETTLING:g} s of each phase of {SECONDS:g} s are not counted.")
    for result in ours:
        course = " ".join(map(str, result.over_time))
        report.notes.append(f"The adaptive concurrency at each second with {result.servers} servers: {course}")
    return report
