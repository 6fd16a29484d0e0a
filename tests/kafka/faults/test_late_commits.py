"""A commit over a lost connection reaches the broker after a newer one, and puts the offset back (I12).

A proxy keeps the commit and cuts the connection of the client, which sends its next commit over another one.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from aioshard import App
from aioshard.engine import late_commits
from tests.kafka.faults.support import (
    DEADLINE,
    Ledger,
    messages,
    quick_app,
    until,
    with_both_protocols,
    with_classic_at_least,
)
from tests.support.kafka import KafkaBroker
from tests.support.proxies import OFFSET_COMMIT, Proxies

CHUNK = 10


@dataclass
class LateCommit:
    """Members of a group behind a proxy; a commit of the first one is late.

    Attributes:
        ledger: What all of them have run.
        sent: How many records they have to read.
    """

    broker: KafkaBroker
    proxies: Proxies
    group: str
    protocol: str
    ledger: Ledger = field(default_factory=Ledger)
    sent: int = 0

    @property
    def topic(self) -> str:
        """The topic of the records; it has two partitions."""
        return f"{self.group}.in"

    def member(self) -> App:
        """Return an app of the group."""
        app = quick_app(f"127.0.0.1:{self.broker.ports.proxy}", self.group, group_protocol=self.protocol)
        app.consume(self.topic)(self.ledger.handle)
        return app

    async def read(self, app: App) -> None:
        """Let an app run more records, and wait until they are committed."""
        await self.broker.produce(self.topic, messages(CHUNK, start=self.sent))
        self.sent += CHUNK
        await until(lambda: sum(part.committed or 0 for part in app.statistics().partitions) == self.sent, app.explain)

    async def put_back(self, app: App) -> None:
        """Let a commit of the app arrive after a newer one."""
        await self.read(app)
        late = self.proxies.strand(api_key=OFFSET_COMMIT)
        await self.read(app)
        assert late.met.is_set()
        await self.read(app)
        await late.arrive()
        assert await self.committed() < self.sent, "it has put the offset back"

    async def committed(self) -> int:
        """Return how many records are committed according to the broker."""
        return sum((await self.broker.committed(self.group, self.topic)).values())


@pytest.fixture
async def late(own_kafka: KafkaBroker, group: str, protocol: str) -> AsyncIterator[LateCommit]:
    ports = own_kafka.ports
    async with Proxies({1: (ports.proxy, ports.proxied)}) as proxies:
        late = LateCommit(own_kafka, proxies, group, protocol)
        await own_kafka.create_topic(late.topic, partitions=2)
        yield late


@with_classic_at_least
async def test_the_next_app_repeats_nothing_after_a_stop(late: LateCommit) -> None:
    first = late.member()
    async with first:
        await late.put_back(first)
    assert await late.committed() == late.sent

    second = late.member()
    async with second:
        await late.read(second)
    assert late.ledger.duplicates == []


@with_both_protocols
async def test_the_next_owner_repeats_nothing_after_a_rebalance(late: LateCommit) -> None:
    first = late.member()
    async with first:
        await late.put_back(first)
        second = late.member()
        async with second:
            await until(lambda: len(second.statistics().partitions) == 1, second.explain)
            await late.broker.produce(late.topic, messages(CHUNK, start=late.sent))
            late.sent += CHUNK
            await late.ledger.until_finished(messages(late.sent))
    assert late.ledger.duplicates == []


@with_classic_at_least
async def test_a_crash_repeats_nothing_once_the_commit_was_repeated(
    late: LateCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_commits, "LONGEST_DELAY", 1.0)
    app = late.member()
    async with app:
        await late.put_back(app)
        async with asyncio.timeout(DEADLINE):
            while await late.committed() != late.sent:  # noqa: ASYNC110 - brokers send no event
                await asyncio.sleep(0.1)
