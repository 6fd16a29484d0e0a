"""A process of P9: consumes with one concurrency while the back end that it calls changes, and prints the results.

`python -m benchmarks.contestants.flow '{"bootstrap": ...}'`
"""

import asyncio
import json
import math
import os
import random
import statistics
import sys
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from aioshard import Adaptive, App, Record

_NOISE = 0.2
"""Standard deviation of the logarithm of the time in which a call is served."""
_SAMPLE = 0.1
_P99 = 0.99


@dataclass(frozen=True, slots=True)
class Phase:
    """A period in which the back end serves this many calls concurrently."""

    servers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Instructions for one process.

    Attributes:
        concurrency: A fixed one; None is adaptive, up to *maximum*.
        service: Seconds in which an idle back end usually serves a call.
        settling: Seconds at the beginning of each phase that are not counted.
    """

    bootstrap: str
    topic: str
    group: str
    concurrency: int | None
    maximum: int
    service: float
    settling: float
    phases: tuple[Phase, ...]

    def to_json(self) -> str:
        """Return the plan for the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Parse the output of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        return cls(**(values | {"phases": tuple(Phase(**phase) for phase in values["phases"])}))


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one phase after it has settled; latencies in seconds.

    Attributes:
        concurrency: The average.
        over_time: The concurrency at each second of the whole phase.
    """

    servers: int
    rate: float
    median: float
    p99: float
    concurrency: float
    over_time: tuple[int, ...]


class BackEnd:
    """Serves a number of calls at a time; the others wait in line."""

    def __init__(self, service: float) -> None:
        self.servers = 1
        self.latencies: list[float] = []
        self._service = service
        self._rng = random.Random(9)
        self._busy = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def call(self, _: Record) -> None:
        """Wait for a server, and until it has served the call."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._busy >= self.servers or self._line:
            turn = loop.create_future()
            self._line.append(turn)
            await turn
        else:
            self._busy += 1
        try:
            await asyncio.sleep(self._service * math.exp(self._rng.gauss(0.0, _NOISE)))
        finally:
            self._busy -= 1
            self.serve()
        self.latencies.append(loop.time() - began)

    def serve(self) -> None:
        """Serve those in line as far as servers are free."""
        while self._line and self._busy < self.servers:
            turn = self._line.popleft()
            if not turn.done():
                self._busy += 1
                turn.set_result(None)


async def _consume(plan: Plan) -> list[Result]:
    app = App(plan.group, bootstrap_servers=plan.bootstrap, auto_offset_reset="earliest", shutdown_timeout=3.0)
    back_end = BackEnd(plan.service)
    concurrency = Adaptive(1, plan.maximum) if plan.concurrency is None else plan.concurrency
    app.consume(plan.topic, concurrency=concurrency)(back_end.call)
    back_end.servers = plan.phases[0].servers
    async with app:
        return [await _measure(app, back_end, phase, plan.settling) for phase in plan.phases]


async def _measure(app: App, back_end: BackEnd, phase: Phase, settling: float) -> Result:
    back_end.servers = phase.servers
    back_end.serve()
    early = await _sample(app, settling)
    back_end.latencies.clear()
    loop = asyncio.get_running_loop()
    began = loop.time()
    limits = await _sample(app, phase.seconds - settling)
    seconds = loop.time() - began
    latencies = sorted(back_end.latencies)
    if not latencies:
        raise SystemExit("no call ended: the topic has too few records, or the back end has stopped")
    return Result(
        servers=phase.servers,
        rate=len(latencies) / seconds,
        median=statistics.median(latencies),
        p99=latencies[int(_P99 * len(latencies))],
        concurrency=statistics.mean(limits),
        over_time=tuple((early + limits)[:: round(1 / _SAMPLE)]),
    )


async def _sample(app: App, seconds: float) -> list[int]:
    """Return the concurrency, ten times a second."""
    limits = []
    for _ in range(round(seconds / _SAMPLE)):
        await asyncio.sleep(_SAMPLE)
        limits.append(app.statistics().handlers[0].concurrency)
    return limits


def main() -> None:
    """Run the plan that the first argument describes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(_consume(Plan.from_json(sys.argv[1])))
    print(json.dumps([asdict(result) for result in results]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
