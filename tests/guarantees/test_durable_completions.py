"""Records finished beyond stuck ones do not run again after `kill -9` (I12)."""

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata
from aioshard.records import TopicPartition
from tests.guarantees.durable_member import FOREVER, PATTERNS, PROTOCOLS, Member, settings_for_protocol, stuck_offsets
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

COMMIT_INTERVAL = 0.5
MANY, FEW = 100_000, 10_000
SETTINGS = {
    "auto_offset_reset": "earliest",
    "session_timeout": 6,
    "heartbeat_interval": 1,
    "commit_interval": COMMIT_INTERVAL,
    "start_timeout": 60,
    "stuck_after": FOREVER,
    "max_buffered_records": 1_000_000,
    "max_buffered_bytes": 1 << 30,
}


@contextlib.asynccontextmanager
async def running(member: Member) -> AsyncIterator[asyncio.subprocess.Process]:
    """A member process; it is killed at the end if it lives."""
    text = json.dumps(dataclasses.asdict(member))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.guarantees.durable_member", text, cwd=PROJECT
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def runs_in(file: Path) -> Counter[int]:
    """How often each offset was finished, as a member has reported."""
    content = file.read_bytes() if file.exists() else b""
    return Counter(int.from_bytes(content[start : start + 8], "big") for start in range(0, len(content) // 8 * 8, 8))


class Committed:
    """The commits of the group, read from the broker."""

    def __init__(self, admin: AIOKafkaAdminClient, group: str, topic: str) -> None:
        self._admin = admin
        self._group = group
        self._partition = TopicPartition(topic, 0)

    async def now(self) -> tuple[int, str]:
        """Offset and text."""
        found = await self._admin.list_consumer_group_offsets(self._group)
        for partition, committed in found.items():
            if (partition.topic, partition.partition) == self._partition:
                return committed.offset, committed.metadata
        return 0, ""

    async def finished_ahead(self) -> set[int]:
        """The offsets beyond the committed one that count as finished."""
        offset, text = await self.now()
        assert len(text.removesuffix("\0")) <= MOST_UNITS
        metadata = CommitMetadata.read(text, offset)
        assert not metadata.ignored
        return {offset for run in metadata.finished for offset in range(*run)}


@pytest.fixture
async def committed(kafka: SharedKafka, group: str, topic: str) -> AsyncIterator[Committed]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    yield Committed(admin, group, topic)
    await admin.close()


def cases() -> list[Any]:
    """Pattern, the protocol of the process that is killed, that of its successor, and how many records finish.

    Few where a case is about what one member writes and another reads; many with each protocol in a long run.
    """
    return [
        pytest.param("scattered", "consumer", "classic", FEW),
        pytest.param("alternating", "classic", "consumer", FEW, marks=pytest.mark.chaos),
        *(
            pytest.param(pattern, protocol, protocol, MANY, marks=pytest.mark.chaos)
            for protocol in PROTOCOLS
            for pattern in PATTERNS
        ),
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("pattern", "killed", "successor", "finish"), cases())
async def test_a_kill_repeats_almost_no_finished_records(
    kafka: SharedKafka,
    committed: Committed,
    topic: str,
    group: str,
    tmp_path: Path,
    pattern: str,
    killed: str,
    successor: str,
    finish: int,
) -> None:
    """With full metadata nothing more was taken in, and none of its records runs again."""
    alternating = pattern == "alternating"
    records = 2 * finish if alternating else finish + 300
    overflows = alternating and finish == MANY
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"x")] * records)
    settings = settings_for_protocol(killed, SETTINGS)
    first = Member(kafka.bootstrap, group, topic, records, pattern, str(tmp_path / "first"), settings=settings)
    due = set(range(records)) - set(stuck_offsets(pattern, records))

    async with running(first), asyncio.timeout(120):
        while True:
            finished_ahead = await committed.finished_ahead()
            finished = runs_in(tmp_path / "first")
            if len(finished_ahead) >= len(due) * 0.99 or (
                overflows and finished_ahead and finished_ahead >= finished.keys()
            ):
                break
            await asyncio.sleep(COMMIT_INTERVAL / 5)
    before = runs_in(tmp_path / "first")
    finished_ahead = await committed.finished_ahead()
    offset, text = await committed.now()
    assert offset == 0
    assert finished_ahead <= before.keys()

    second = dataclasses.replace(
        first,
        pattern="",
        file=str(tmp_path / "second"),
        until_caught_up=True,
        settings=settings_for_protocol(successor, SETTINGS),
    )
    async with running(second) as process, asyncio.timeout(120):
        assert await process.wait() == 0

    after = runs_in(tmp_path / "second")
    again = before.keys() & after.keys()
    print(
        f"{pattern}, {killed} and then {successor}: {len(before):,} finished, {len(text):,} characters store "
        f"{len(finished_ahead):,} of them, {len(again):,} ran again after the kill"
    )
    assert set(before) | set(after) == set(range(records)), "none is lost"
    assert not again & finished_ahead, "a stored completion is not run again"
    assert len(again) <= len(before) / 100
    if overflows:
        assert 20_000 < len(before) < len(due), "it stopped where its text was full"
    assert (await committed.now())[0] == records
