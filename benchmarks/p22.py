"""P22: a tenth of the keys fails for a while, with `on_failure=Park(...)`: the rates of the others, and of those."""

import asyncio
import json
import sys
import uuid
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.outage import Outage
from benchmarks.p1 import numbered_messages
from benchmarks.report import Report, Verdict, spread
from benchmarks.stage import PROJECT, RUN_TIMEOUT, ContestantFailedError, Stage, Topic

TITLE = "Parked keys: a tenth of 1,000 keys fails for a while; 5 ms per record, a backlog in 8 partitions"
KEYS = 1_000
WITHOUT, PARKED = "without failure", "Park(delay=5)"
_WARM_UP = 2
"""Seconds at the beginning that do not count."""


class _Rates(NamedTuple):
    """Records per second of one run."""

    during: float
    """Of the keys that never fail, while the others do."""
    after: float
    back: float
    """Of the keys that failed, after that: all of them were parked."""


async def run(stage: Stage) -> Report:
    """Let the app run with and without the failure, in turn."""
    seconds, watch = stage.size(20, 4), stage.size(25, 8)
    topic = await stage.fill("p22", 8, numbered_messages(stage.size(1_300_000, 30_000), KEYS))
    rates: dict[str, list[_Rates]] = {WITHOUT: [], PARKED: []}
    report = Report("P22", TITLE)
    for number in range(stage.size(3, 1)):
        for name in (WITHOUT, PARKED) if number % 2 == 0 else (PARKED, WITHOUT):
            observed = await _observe(stage, topic, seconds, watch, fails=name == PARKED)
            measured = _rates(observed, seconds, seconds + watch)
            rates[name].append(measured)
            stage.say(f"round {number + 1}  {name}: {measured}")
            faults = observed["disordered"], observed["repeated"]
            if any(faults):
                report.problems.append(f"{name}: {faults[0]} records out of order, {faults[1]} run twice")
    for name, runs in rates.items():
        report.rows.append(
            {
                "contestant": name,
                "healthy/s during": spread([measured.during for measured in runs]),
                "healthy/s after": spread([measured.after for measured in runs]),
                "parked keys/s after": spread([measured.back for measured in runs]),
            }
        )
    judged = not stage.quick
    report.verdicts += [
        Verdict(
            "healthy keys during the failure, times without it",
            _ratio([one.during for one in rates[PARKED]], [one.during for one in rates[WITHOUT]]),
            must=0.7,
            at_least=True,
            judged=judged,
        ),
        Verdict(
            "healthy keys after the failure, times without it",
            _ratio([one.after for one in rates[PARKED]], [one.after for one in rates[WITHOUT]]),
            must=0.7,
            at_least=True,
            judged=judged,
        ),
        Verdict(
            "records/s of parked keys after the failure",
            median(one.back for one in rates[PARKED]),
            must=2_000.0,
            unit="records/s",
            at_least=True,
            judged=judged,
        ),
    ]
    report.notes.append(
        f"The keys fail for {seconds} s, and {watch} s follow. Rates are of the seconds {_WARM_UP} to {seconds}, and "
        "from a second after the failure to a second before the end. Broker and app share the machine."
    )
    return report


def _ratio(measured: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios within each round."""
    return median(one / max(other, 1.0) for one, other in zip(measured, base, strict=True))


def healthy_rate(observed: dict[str, Any], seconds: int) -> float:
    """Return the records per second of the keys that never fail, while the others do; without the warm-up."""
    healthy: list[int] = [observed["healthy"].get(str(second), 0) for second in range(_WARM_UP, seconds)]
    return sum(healthy) / len(healthy)


def _rates(observed: dict[str, Any], seconds: int, end: int) -> _Rates:
    after = range(seconds + 1, end - 1)
    healthy = [observed["healthy"].get(str(second), 0) for second in after]
    others = [observed["others"].get(str(second), 0) for second in after]
    return _Rates(healthy_rate(observed, seconds), sum(healthy) / len(after), sum(others) / len(after))


async def _observe(stage: Stage, topic: Topic, seconds: int, watch: int, *, fails: bool) -> dict[str, Any]:
    """Run the app in a separate process, and return what it observed."""
    outage = Outage(
        bootstrap=stage.cluster.bootstrap,
        topic=topic.name,
        side_topic=await stage.begin("p22-parked", len(topic.ends), {"cleanup.policy": "compact"}),
        group=uuid.uuid4().hex[:8],
        delay=5.0 if not stage.quick else 1.0,
        seconds=seconds if fails else 0.0,
        watch=watch if fails else seconds + watch,
    )
    return await observe("aioshard", outage, sys.executable, "benchmarks.parked_keys")


async def observe(name: str, outage: Outage, python: str, module: str) -> dict[str, Any]:
    """Run a contestant in a separate process, and return what it observed.

    Args:
        name: Its name in messages.
        outage: Its input.
        python: The interpreter.
        module: Its module, whose only argument is the input as JSON.

    Raises:
        ContestantFailedError: It ended with an error or not at all.
    """
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", module, json.dumps(outage._asdict())),
        cwd=PROJECT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT):
            out, error = await process.communicate()
    except TimeoutError as late:
        raise ContestantFailedError(f"{name} did not end within {RUN_TIMEOUT:g} s") from late
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ContestantFailedError(f"{name} ended with {process.returncode}:\n{error.decode()[-4_000:]}")
    observed: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return observed
