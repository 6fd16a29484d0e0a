"""The ceiling: the handler without Kafka."""

import asyncio
from typing import NamedTuple

from benchmarks.contestants.meter import Meter
from benchmarks.spec import Spec


class RecordId(NamedTuple):
    """The part of a record that the handler uses."""

    partition: int
    offset: int


async def bare_loop(spec: Spec, meter: Meter) -> None:
    """Run *concurrency* coroutines that call the handler in a loop."""
    record_ids = iter([RecordId(partition, offset) for partition, end in enumerate(spec.ends) for offset in range(end)])
    handler = meter.handler

    async def work() -> None:
        for record_id in record_ids:
            await handler(record_id)

    await asyncio.gather(meter.watch(), *(work() for _ in range(spec.concurrency)))
