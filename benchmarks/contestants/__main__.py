"""The measured process: runs one contestant and prints what it measured as one line of JSON."""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, NoReturn

from benchmarks.contestants.meter import Meter
from benchmarks.spec import Spec

WHERE = {
    "aioshard": "ours:on_demand",
    "aioshard, compiled": "ours:compiled",
    "aioshard, fixed shards": "ours:fixed_shards",
    "aioshard, journal": "ours:journaling",
    "aioshard, classic": "ours:classic_protocol",
    "aioshard, at least once": "ours:at_least_once",
    "aioshard, exactly once": "ours:exactly_once",
    "aioshard, static": "ours:static",
    "aioshard, processes": "ours:processes",
    "aioshard, batches in processes": "ours:batches_in_processes",
    "aioshard, threads": "ours:threads",
    "aioshard, KIP-848": "ours:consumer_protocol",
    "aioshard, JSON": "ours:decoding",
    "bare loop, no Kafka": "bare:bare_loop",
    "plain loop": "handwritten:plain_loop",
    "task per record": "handwritten:task_per_record",
    "fixed queues": "handwritten:fixed_queues",
    "task per partition": "handwritten:task_per_partition",
    "FastStream": "frameworks:faststream_default",
    "FastStream, manual ack": "frameworks:faststream_manual",
    "faststream-concurrent-aiokafka": "frameworks:faststream_concurrent",
    "Prosody": "prosody_pipeline:pipeline",
}
"""Contestants by the name in the tables; each is imported only in its own process, which stays small."""

Contestant = Callable[[Spec, Meter], Coroutine[Any, Any, None]]


def main() -> None:
    """Run the contestant that the first argument describes."""
    spec = Spec.from_json(sys.argv[1])
    module, _, name = WHERE[spec.contestant].partition(":")
    contestant: Contestant = getattr(importlib.import_module(f"benchmarks.contestants.{module}"), name)
    meter = Meter(spec)

    with asyncio.Runner(loop_factory=_loop_factory(uvloop=spec.uvloop)) as runner:
        if spec.warm_up:
            warming_up = Meter(spec.warming_up())
            runner.run(contestant(spec.warming_up(), warming_up))
            meter.first_of_all = warming_up.first_started
        runner.run(_run(contestant, spec, meter))
    _print_result(meter)


async def _run(contestant: Contestant, spec: Spec, meter: Meter) -> None:
    running = asyncio.create_task(contestant(spec, meter), name=spec.contestant)
    if spec.work == "hang":
        over = asyncio.create_task(meter.over.wait(), name="over")
        await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            _print_result(meter)  # a drain would wait for handlers that never return
    await running


def _print_result(meter: Meter) -> NoReturn:
    print(json.dumps(asdict(meter.result())), flush=True)
    # Anything that a contestant leaves running is not measured and must not delay the exit.
    os._exit(0)


def _loop_factory(*, uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    if not uvloop:
        return asyncio.new_event_loop
    import uvloop as faster  # noqa: PLC0415 - not available on every system

    return faster.new_event_loop


if __name__ == "__main__":
    main()
