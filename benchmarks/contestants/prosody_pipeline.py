"""Prosody in its default mode, on the mock broker that it contains; runs in a separate environment.

`python -m benchmarks.contestants.prosody_pipeline OUTAGE` is the contestant whose keys fail for a while; see `p21`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn

import uvloop

from benchmarks.contestants.meter import Meter
from benchmarks.outage import Observed, Outage
from benchmarks.spec import Spec

os.environ["PROSODY_LOG"] = "error"  # read by the import
from prosody import EventHandler, ProsodyClient

PARTITIONS_OF_A_TOPIC = 4
"""The broker's default, which cannot be changed."""
TOPICS = ("first", "second")
"""Together they have eight partitions."""
KEYS = 1_000
PAYLOAD = {"padding": "x" * 86}
"""100 bytes of JSON."""
SENDERS = 2_000
"""Number of records that are sent concurrently."""


class Seen(NamedTuple):
    """The part of a record that the handlers use."""

    partition: int
    offset: int
    key: bytes


class _Handler(EventHandler):  # type: ignore[misc] # Prosody is not where types are checked
    def __init__(self, handle: Callable[[Seen], Awaitable[None]]) -> None:
        self._handle = handle

    async def on_message(self, _context: Any, message: Any) -> None:
        """Handle a record, whose value is already decoded."""
        first = TOPICS.index(message.topic) * PARTITIONS_OF_A_TOPIC
        await self._handle(Seen(first + message.partition, message.offset, message.key.encode()))

    async def on_excise(self, _context: Any, message: Any) -> None:
        """Refuse a deletion: there are none."""
        raise NotImplementedError

    async def on_timer(self, _context: Any, timer: Any) -> None:
        """Refuse a timer: there are none."""
        raise NotImplementedError


async def pipeline(spec: Spec, meter: Meter) -> None:
    """Produce the records, then process them."""
    client = await _client(spec.records, spec.concurrency)
    await client.subscribe(_Handler(meter.handler))
    await meter.watch()


async def _client(records: int, concurrency: int) -> Any:
    """Return a client whose broker has *records* records."""
    client = await ProsodyClient.create(
        mock=True,
        bootstrap_servers="unused:1",
        group_id="benchmark",
        source_system="benchmark-producer",
        subscribed_topics=list(TOPICS),
        mode="pipeline",
        max_concurrency=concurrency,
        # Its defaults of 64 records and 100 ms limit it to a few hundred records per second.
        max_uncommitted=1_000_000,
        poll_interval=0.01,
        idempotence_cache_size=100_000,
        scheduler_cache_size=100_000,
        telemetry_enabled=False,
        probe_port=None,
    )
    numbers = iter(range(records))

    async def send() -> None:
        for number in numbers:
            key = number % KEYS
            await client.send(TOPICS[key // 10 % len(TOPICS)], f"{key:08d}", PAYLOAD)

    await asyncio.gather(*(send() for _ in range(SENDERS)))
    return client


async def observe(outage: Outage) -> NoReturn:
    """Process records of which a tenth fails for a while, print what was observed, and exit."""
    observed = Observed(outage)
    client = await _client(outage.records, outage.concurrency)
    await client.subscribe(_Handler(observed.handle))
    await observed.until_watched()
    print(json.dumps(observed.asdict()), flush=True)
    os._exit(0)  # a client that is dropped blocks the event loop until its records in flight are done


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(observe(Outage(**json.loads(sys.argv[1]))))
