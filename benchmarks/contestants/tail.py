"""One member of a group with a long tail: `python -m benchmarks.contestants.tail JSON`; it runs until it is ended."""

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
    """What a member is told.

    Attributes:
        assignor: `PLAIN` is aiokafka's consumer with a loop, else aioshard with this assignor.
        interval: Its `balance_interval`, with `lag`.
        journal: The file to which it writes topic, partition, offset and time of each record that it has processed.
        go: A file: no record is processed before it exists.
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
        """The other direction."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Journal:
    """What the member has processed; a line is written at once, for who is killed."""

    def __init__(self, spec: TailSpec) -> None:
        self._file = Path(spec.journal).open("ab", buffering=0)  # noqa: SIM115 - as long as the process
        self._go, self._seconds, self._began = Path(spec.go), spec.seconds, False

    async def process(self, topic: str, partition: int, offset: int) -> None:
        """Handle a record, once records may be processed."""
        while not self._began:
            self._began = self._go.exists()
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._seconds)
        self._file.write(b"%s %d %d %d\n" % (topic.encode(), partition, offset, time.monotonic_ns()))


async def aioshard(spec: TailSpec, journal: Journal) -> None:
    """A member with one handler for all topics."""
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
    """A loop that processes one record after the other and commits once a second."""
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
    told = TailSpec.from_json(sys.argv[1])
    asyncio.run((plain if told.assignor == PLAIN else aioshard)(told, Journal(told)))
