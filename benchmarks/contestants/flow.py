"""A process of P9: consumes with one concurrency while the back end that it calls changes, and prints what it saw.

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
"""Of the time that a call is served in, as the standard deviation of its logarithm."""
_SAMPLE = 0.1
_END = 0.99


@dataclass(frozen=True, slots=True)
class Phase:
    """A time in which the back end serves so many calls at once."""

    servers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process does."""

    bootstrap: str
    topic: str
    group: str
    concurrency: int | None
    """None is adaptive."""
    maximum: int
    service: float
    """Seconds in which an idle back end serves a call, as a rule."""
    settling: float
    """Seconds at the beginning of each phase that are not counted."""
    phases: tuple[Phase, ...]

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The other direction."""
        values: dict[str, Any] = json.loads(text)
        return cls(**(values | {"phases": tuple(Phase(**phase) for phase in values["phases"])}))


@dataclass(frozen=True, slots=True)
class Seen:
    """What one phase showed, once it had settled; latencies in seconds."""

    servers: int
    rate: float
    median: float
    late: float
    """99 % of the calls took no longer."""
    concurrency: float
    over_time: tuple[int, ...]
    """The concurrency at each second of the whole phase."""


class BackEnd:
    """Serves so many calls at a time; the others wait in line."""

    def __init__(self, service: float) -> None:
        self.servers = 1
        self.latencies: list[float] = []
        self._service = service
        self._chance = random.Random(9)
        self._busy = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def call(self, _: Record) -> None:
        """Be served."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._busy >= self.servers or self._line:
            turn = loop.create_future()
            self._line.append(turn)
            await turn
        else:
            self._busy += 1
        try:
            await asyncio.sleep(self._service * math.exp(self._chance.gauss(0.0, _NOISE)))
        finally:
            self._busy -= 1
            self.serve()
        self.latencies.append(loop.time() - began)

    def serve(self) -> None:
        """Let those in line come in, as far as there are places."""
        while self._line and self._busy < self.servers:
            turn = self._line.popleft()
            if not turn.done():
                self._busy += 1
                turn.set_result(None)


async def _consume(plan: Plan) -> list[Seen]:
    app = App(plan.group, bootstrap_servers=plan.bootstrap, auto_offset_reset="earliest", shutdown_timeout=3.0)
    back_end = BackEnd(plan.service)
    concurrency = Adaptive(1, plan.maximum) if plan.concurrency is None else plan.concurrency
    app.consume(plan.topic, concurrency=concurrency)(back_end.call)
    back_end.servers = plan.phases[0].servers
    async with app:
        return [await _watch(app, back_end, phase, plan.settling) for phase in plan.phases]


async def _watch(app: App, back_end: BackEnd, phase: Phase, settling: float) -> Seen:
    back_end.servers = phase.servers
    back_end.serve()
    early = await _sample(app, settling)
    back_end.latencies.clear()
    began = asyncio.get_running_loop().time()
    limits = await _sample(app, phase.seconds - settling)
    seconds = asyncio.get_running_loop().time() - began
    latencies = sorted(back_end.latencies)
    if not latencies:
        raise SystemExit("no call ended: the topic has too few records, or the back end stands still")
    return Seen(
        phase.servers,
        len(latencies) / seconds,
        statistics.median(latencies),
        latencies[int(_END * len(latencies))],
        statistics.mean(limits),
        tuple((early + limits)[:: round(1 / _SAMPLE)]),
    )


async def _sample(app: App, seconds: float) -> list[int]:
    """The concurrency, ten times a second."""
    found = []
    for _ in range(round(seconds / _SAMPLE)):
        await asyncio.sleep(_SAMPLE)
        found.append(app.statistics().handlers[0].concurrency)
    return found


def main() -> None:
    """Run the plan that the first argument describes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(_consume(Plan.from_json(sys.argv[1])))
    print(json.dumps([asdict(one) for one in seen]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
