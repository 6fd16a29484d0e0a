"""An app with exactly-once processing behind a proxy, and the proof that its outputs are exact."""

import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from aioshard import App, Context, DeadLetter, Record
from aioshard.observe import TransactionStatistics
from tests.kafka.faults.support import quick_app, until
from tests.support.kafka import KafkaBroker
from tests.support.proxies import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    TXN_OFFSET_COMMIT,
    Proxies,
    Rule,
)

FIRST, SECOND = 1, 2
"""The protocols of transactions, by the level of the feature `transaction.version`."""
VERSIONS = [pytest.param({"transaction.version": version}, id=f"v{version}") for version in (FIRST, SECOND)]
"""Brokers with each of them."""
NAMES = {
    PRODUCE: "Produce",
    TXN_OFFSET_COMMIT: "TxnOffsetCommit",
    END_TXN: "EndTxn",
    INIT_PRODUCER_ID: "InitProducerId",
    ADD_PARTITIONS_TO_TXN: "AddPartitionsToTxn",
    ADD_OFFSETS_TO_TXN: "AddOffsetsToTxn",
}
"""The requests of a transaction."""
_OF_FIRST_ONLY = frozenset({ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN})


def requests_of(version: int) -> list[int]:
    """Return the requests of a transaction with a protocol."""
    return [api for api in NAMES if version == FIRST or api not in _OF_FIRST_ONLY]


@dataclass
class Transacting:
    """An app that publishes one output for each record, and a proxy before its broker.

    Attributes:
        ends: All EndTxn requests.
        sent: How many records the app has to read.
    """

    broker: KafkaBroker
    proxies: Proxies
    app: App
    ends: Rule
    sent: int = 0

    @property
    def topic(self) -> str:
        """The topic of the records."""
        return f"{self.app.group_id}.in"

    @property
    def outputs(self) -> str:
        """The topic of the outputs, with two partitions."""
        return f"{self.app.group_id}.out"

    @property
    def dead_letters(self) -> str:
        """The topic of the records whose output was refused."""
        return f"{self.app.group_id}.dlt"

    @property
    def counts(self) -> TransactionStatistics:
        """How transactions have ended."""
        found = self.app.statistics().transactions
        assert found is not None
        return found

    @property
    def ended(self) -> dict[str, int]:
        """How many transactions have ended, by outcome, without the outcomes that did not happen."""
        counts = dataclasses.asdict(self.counts)
        names = ("committed", "aborted", "decided_committed", "decided_aborted", "undecided")
        return {name: counts[name] for name in names if counts[name]}

    async def send(self, records: int) -> None:
        """Let the app have more records; each has the next number."""
        numbers = range(self.sent, self.sent + records)
        await self.broker.produce(self.topic, [(b"key-%d" % (number % 7), b"%d" % number) for number in numbers])
        self.sent = numbers.stop

    def committed(self) -> bool:
        """Whether the app has committed all records."""
        return sum(partition.committed or 0 for partition in self.app.statistics().partitions) == self.sent

    async def until_committed(self) -> None:
        """Wait until the app has committed all records."""
        await until(self.committed, self.app.explain)

    async def verify(self) -> None:
        """Compare what a `read_committed` reader and the group see with the records."""
        outputs = Counter(int(record.value or b"") for record in await self.broker.read(self.outputs))
        outputs.update(int(record.value or b"") for record in await self.broker.read(self.dead_letters))
        lost = set(range(self.sent)) - set(outputs)
        doubled = {number for number, count in outputs.items() if count > 1}
        assert (lost, doubled) == (set(), set())
        assert await self.broker.committed(self.app.group_id, self.topic) == {0: self.sent}


@asynccontextmanager
async def transacting(broker: KafkaBroker, group: str, **settings: Any) -> AsyncIterator[Transacting]:
    """Run such an app on a broker that only it uses."""
    ports = broker.ports
    chosen = {"processing_guarantee": "exactly_once", "rebalance_timeout": 20, "commit_interval": 0.02, **settings}
    app = quick_app(f"127.0.0.1:{ports.proxy}", group, **chosen)
    async with Proxies({1: (ports.proxy, ports.proxied)}) as proxies:
        found = Transacting(broker, proxies, app, proxies.watch(api_key=END_TXN))
        await broker.create_topic(found.topic)
        await broker.create_topic(found.outputs, 2)
        await broker.create_topic(found.dead_letters)

        @app.consume(found.topic, concurrency=128, on_failure=DeadLetter(found.dead_letters, breaker=None))
        async def publish(record: Record, context: Context) -> None:
            await context.publish(found.outputs, record.value, key=record.key)

        async with app:
            yield found
