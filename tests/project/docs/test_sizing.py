"""The figures and inequalities of docs/sizing.md."""

import asyncio
import os
import re
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from aioshard import App, Context, Record
from aioshard.errors import SettingsError
from aioshard.settings import Settings
from tests.project.docs.tables import DOCS
from tests.support.brokers import SharedKafka
from tests.support.cluster import POLL_INTERVAL
from tests.support.paths import PROJECT

PAGE = DOCS / "sizing.md"
DEADLINE = 30.0


def connection_figures() -> tuple[int, ...]:
    """Connections to one broker, the same with publishing, and to three."""
    (row,) = re.findall(r"^\| connections \| (\d+) \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    return tuple(map(int, row))


def connected(port: int) -> int:
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and bool(connection.raddr) and connection.raddr.port == port
        for connection in found
    )


@pytest.mark.parametrize("partitions", [1, 64])
async def test_connections_do_not_depend_on_the_number_of_partitions(
    kafka: SharedKafka, topic: str, partitions: int
) -> None:
    await kafka.create_topic(topic, partitions)
    await kafka.create_topic(f"{topic}-out")
    reading, publishing, _ = connection_figures()
    port = urlsplit(f"//{kafka.bootstrap}").port
    assert port is not None
    before = connected(port)
    app = App(topic, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest")

    @app.consume(topic)
    async def on_record(record: Record, context: Context) -> None:
        await context.publish(f"{topic}-out", record.value, key=record.key)

    async def until(expected: int) -> None:
        while (found := connected(port) - before) != expected:
            assert found <= publishing
            await asyncio.sleep(POLL_INTERVAL)

    async with asyncio.timeout(DEADLINE), app:
        await until(reading)
        await kafka.produce(topic, [(b"alice", b"first")])
        await until(publishing)


def test_the_concurrency_table_follows_littles_law() -> None:
    lines = PAGE.read_text().partition("| records/s | handler takes 2 ms")[2].partition("\n\n")[0].splitlines()[2:]
    seconds = (0.002, 0.01, 0.05, 0.25, 1)

    assert len(lines) == 4
    for line in lines:
        rate, *cells = (float(cell.replace(",", "")) for cell in line.strip("| ").split("|"))
        assert cells == pytest.approx([rate * each for each in seconds])


def test_the_documented_times_match_the_settings() -> None:
    text, own = PAGE.read_text(), Settings()
    drained = own.drain_timeout + own.commit_timeout + own.heartbeat_interval

    assert own.drain_timeout == 20
    for line in (
        f"{own.session_timeout:g} ≥ {3 * own.heartbeat_interval:g}",
        f"{own.drain_timeout:g} + {own.commit_timeout:g} + {own.heartbeat_interval:g} < {own.rebalance_timeout:g}",
        f"0 + 1 + {own.shutdown_timeout:g} < 30",
        f"< {own.shutdown_timeout - own.commit_timeout:g} |",
        f"≥ {own.stuck_after:g} in the manifest",
    ):
        assert line in text
    assert drained < own.rebalance_timeout


@pytest.mark.parametrize(
    "wrong",
    [
        {"session_timeout": 8.0, "heartbeat_interval": 3.0},
        {"drain_timeout": 60.0, "rebalance_timeout": 60.0},
    ],
    ids="-".join,
)
def test_values_documented_as_refused_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Settings(**wrong)


def test_the_documented_memory_matches_the_benchmark() -> None:
    measured = (PROJECT / "benchmarks" / "README.md").read_text()
    bound = 2 * Settings().max_buffered_bytes / 2**20 + 50

    assert f"over idle, aioshard: at most {bound:g} MiB" in measured
    assert f"With the defaults that is {48 + bound:g} MiB" in PAGE.read_text()
