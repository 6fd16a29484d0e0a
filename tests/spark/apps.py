"""Apps in their own modules, as users write them: a plan names them, and other processes import them."""

import asyncio
import dataclasses
import importlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from aioshard import App
from tests.support.cluster import DEADLINE, KafkaCluster

QUICK: dict[str, Any] = {
    "auto_offset_reset": "earliest",
    "commit_interval": 0.1,
    "heartbeat_interval": 0.2,
    "session_timeout": 2.0,
    "rebalance_timeout": 10.0,
    "drain_timeout": 3.0,
    "metadata_max_age": 1.0,
    "fetch_max_wait": 0.05,
    "start_timeout": 20.0,
}

_HEAD = """
from aioshard import App, CircuitBreaker, DeadLetter, Park, Record

app = App({group!r}, bootstrap_servers={bootstrap!r}, **{settings!r})
seen = []
"""
_HANDLER = """
@app.consume({topic!r})
async def handle(record: Record) -> None:
    seen.append((record.partition, record.offset))
"""


@dataclasses.dataclass(frozen=True)
class AppModule:
    """A module with an app, imported."""

    name: str
    path: Path
    module: ModuleType

    @property
    def target(self) -> str:
        """As it is named on the command line."""
        return f"{self.name}:app"

    @property
    def app(self) -> App:
        """The app."""
        found: App = self.module.app
        return found

    @property
    def seen(self) -> list[tuple[int, int]]:
        """Partition and offset of the records that the handler of `write_app` got."""
        found: list[tuple[int, int]] = self.module.seen
        return found

    async def until_seen(self, count: int) -> None:
        """Return when the handler got that number of records."""
        async with asyncio.timeout(DEADLINE):
            while len(self.seen) < count:  # noqa: ASYNC110 - the module is a user's: it has no event
                await asyncio.sleep(0.01)


def write_app(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: KafkaCluster,
    group: str,
    topic: str = "",
    handlers: str = "",
    **settings: Any,
) -> AppModule:
    """Writes a module with an app, and imports it.

    Args:
        directory: Where.
        monkeypatch: Makes the directory importable.
        cluster: The app's brokers.
        group: The app's.
        topic: The topic of its only handler, unless *handlers* says otherwise.
        handlers: The source of its handlers.
        settings: Instead of quick ones.
    """
    head = _HEAD.format(group=group, bootstrap=cluster.bootstrap, settings=QUICK | settings)
    return write_module(directory, monkeypatch, head + (handlers or _HANDLER.format(topic=topic)))


def write_module(directory: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> AppModule:
    """Writes a module with this source, and imports it; it has an app by the name of `app`."""
    name = f"app_{uuid.uuid4().hex[:8]}"
    path = directory / f"{name}.py"
    path.write_text(source)
    monkeypatch.syspath_prepend(str(directory))
    return AppModule(name, path, importlib.import_module(name))


async def produce_at(cluster: KafkaCluster, topic: str, timestamps: Sequence[float], partition: int = 0) -> None:
    """Appends a record for each of *timestamps*, in seconds since the epoch."""
    producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap)
    async with asyncio.timeout(DEADLINE), producer:
        for number, timestamp in enumerate(timestamps):
            await producer.send_and_wait(
                topic, b"%d" % number, partition=partition, timestamp_ms=round(timestamp * 1000)
            )
