"""One member of a group with a long tail: `python -m benchmarks.contestants.tail JSON`; it runs until it is killed."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from aiokafka import AIOKafkaConsumer

from aioshard import App, Record

PLAIN = "plain group"
SESSION = 6.0


@dataclass(frozen=True, slots=True)
class TailSpec:
    """The input of a member.

    Attributes:
        assignor: `PLAIN` is aiokafka's consumer in a loop; any other is aioshard with this assignor.
        interval: Its `balance_interval`, with `lag`.
        journal: File for topic, partition, offset and time of each processed record.
        go: File that starts the processing when it appears.
    """

    bootstrap: str
    group: str
    topics: Sequence[str]
    assignor: str
    interval: float
    concurrency: int
    seconds: float
    journal: str
    go: str

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the spec for the command line."""
        return json.dumps(asdict(self))


class Journal:
    """The processed records of a member; written without a buffer, because the member may be killed."""

    def __init__(self, spec: TailSpec) -> None:
        self._file = Path(spec.journal).open("ab", buffering=0)  # noqa: SIM115 - as long as the process
        self._go, self._seconds, self._began = Path(spec.go), spec.seconds, False

    async def process(self, topic: str, partition: int, offset: int) -> None:
        """Process a record, once the file `go` exists."""
        while not self._began:
            self._began = self._go.exists()
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._seconds)
        self._file.write(b"%s %d %d %d\n" % (topic.encode(), partition, offset, time.monotonic_ns()))


async def aioshard(spec: TailSpec, journal: Journal) -> None:
    """Run a member with one handler for all topics."""
    options: dict[str, Any] = {"assignor": spec.assignor}
    if spec.assignor == "lag":
        options["balance_interval"] = spec.interval
    app = App(
        spec.group,
        bootstrap_servers=spec.bootstrap,
        auto_offset_reset="earliest",
        session_timeout=SESSION,
        heartbeat_interval=1.0,
        rebalance_timeout=20.0,
        **options,
    )

    @app.consume(*spec.topics, concurrency=spec.concurrency)
    async def handle(record: Record) -> None:
        await journal.process(record.topic, record.partition, record.offset)

    await app.serve()


async def plain(spec: TailSpec, journal: Journal) -> None:
    """Run a loop that processes one record after the other and commits once a second."""
    consumer = AIOKafkaConsumer(
        *spec.topics,
        bootstrap_servers=spec.bootstrap,
        group_id=spec.group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=round(SESSION * 1000),
        heartbeat_interval_ms=1000,
    )
    async with consumer:
        committed = time.monotonic()
        while True:
            for partition, records in (await consumer.getmany(timeout_ms=500, max_records=100)).items():
                for record in records:
                    await journal.process(partition.topic, partition.partition, record.offset)
            if time.monotonic() > committed + 1.0 and consumer.assignment():
                await consumer.commit()
                committed = time.monotonic()


if __name__ == "__main__":
    tail_spec = TailSpec.from_json(sys.argv[1])
    asyncio.run((plain if tail_spec.assignor == PLAIN else aioshard)(tail_spec, Journal(tail_spec)))
