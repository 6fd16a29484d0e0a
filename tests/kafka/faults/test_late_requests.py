"""I13: requests of a transaction that arrive during the next one neither end it nor change its offsets.

A proxy keeps a request and cuts the connection of the client, which sends the request again. So the transaction ends as
it should; but the brokers get the request a second time, when the app has begun another transaction. A congested
path or a paused broker does that.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum

import pytest

from aioshard import App, Context, Record
from tests.kafka.faults.support import DEADLINE, quick_app, until
from tests.kafka.faults.transacting import FIRST, NAMES, SECOND, VERSIONS, requests_of
from tests.support.kafka import KafkaBroker
from tests.support.messages import answer_with, body, codes
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

logger = logging.getLogger("tests.late_requests")

MANY = 1_000
"""Transactions of an app, under the mark `chaos`."""
RECORDS = 20
"""In the next transaction."""
ILLEGAL_GENERATION = 22
OUTDATED = frozenset({47, 48, 51, 90})
"""Invalid producer epoch; invalid transaction state; concurrent transactions; producer fenced: nothing was done."""


class Phase(Enum):
    """The moment in the next transaction at which a late request arrives."""

    START = "before its first request"
    ADDED = "before its first Produce"
    WRITTEN = "after its messages"
    STORED = "after its offsets"
    END = "after its end"


def phases(version: int) -> list[Phase]:
    """With the second protocol, a transaction begins with Produce."""
    return [phase for phase in Phase if version == FIRST or phase is not Phase.ADDED]


@dataclass
class LateRequests:
    """An app that publishes one output for each record, and a proxy before its broker.

    Attributes:
        sent: How many records the app has to read.
        refused: How many transactions the group has refused.
        late: How many requests have arrived late.
        codes: The error codes in the answers to them, by the kind of request.
    """

    broker: KafkaBroker
    proxies: Proxies
    app: App
    version: int
    ends: Rule
    sent: int = 0
    refused: int = 0
    late: int = 0
    codes: dict[int, Counter[int]] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        """The topic of the records."""
        return f"{self.app.group_id}.in"

    @property
    def outputs(self) -> str:
        """The topic of the outputs."""
        return f"{self.app.group_id}.out"

    @property
    def transactions(self) -> int:
        """How many transactions have ended."""
        statistics = self.app.statistics()
        return statistics.commits + statistics.commit_failures

    async def send(self, records: int) -> None:
        """Let the app have more records; each has the next number."""
        numbers = range(self.sent, self.sent + records)
        await self.broker.produce(self.topic, [(b"key-%d" % (number % 7), b"%d" % number) for number in numbers])
        self.sent = numbers.stop

    async def until_committed(self) -> None:
        """Wait until all records are committed."""
        await until(
            lambda: sum(partition.committed or 0 for partition in self.app.statistics().partitions) == self.sent,
            self.app.explain,
        )

    # Late requests -----------------------------------------------------------------------------

    async def repeat(self, api: int, phase: Phase, *, is_refused: bool) -> None:
        """Let a request of a transaction arrive once more in the next one, which the group may refuse then."""
        late = await self._strand(api)
        await self.until_committed()
        stop = self._hold_back_end_of(phase, is_refused=is_refused)
        if is_refused:
            self._refuse_offsets()
        await self.send(RECORDS)
        if stop is None:
            await self.until_committed()
        else:
            await self._met(stop)
        if stop is not None and phase is Phase.END:
            stop = await self._hold_back_next_attempt(stop)
        answer = await late.arrive()
        if stop is not None:
            stop.lift()
        self.late += 1
        self.codes.setdefault(api, Counter()).update(codes(late.requests[0], answer))
        await self.until_committed()

    async def _strand(self, api: int) -> Rule:
        """Commit one record, in a transaction of which the proxy keeps a request that the client sends again."""
        late = self.proxies.strand(api_key=api)
        if api == INIT_PRODUCER_ID:
            self._refuse_offsets()  # the client sends one after a transaction that failed
        await self.send(1)
        await self._met(late)
        return late

    def _hold_back_end_of(self, phase: Phase, *, is_refused: bool) -> Rule | None:
        """Hold back the request with which the next transaction leaves a phase; None if there is none."""
        is_first = self.version == FIRST
        abort = END_TXN if is_first else INIT_PRODUCER_ID
        held = {
            Phase.START: ADD_PARTITIONS_TO_TXN if is_first else PRODUCE,
            Phase.ADDED: PRODUCE,
            Phase.WRITTEN: ADD_OFFSETS_TO_TXN if is_first else TXN_OFFSET_COMMIT,
            Phase.STORED: abort if is_refused else END_TXN,
            Phase.END: abort if is_refused else None,
        }[phase]
        return None if held is None else self.proxies.hold(api_key=held)

    async def _hold_back_next_attempt(self, end: Rule) -> Rule:
        """Let a refused transaction end, and hold back the first request of the next one."""
        begin = self.proxies.hold(api_key=ADD_PARTITIONS_TO_TXN if self.version == FIRST else PRODUCE)
        end.lift()
        await self._met(begin)
        return begin

    def _refuse_offsets(self) -> Rule:
        """Refuse the offsets of one transaction, as after a rebalance."""
        self.refused += 1
        return self.proxies.answer(answer_with(ILLEGAL_GENERATION), api_key=TXN_OFFSET_COMMIT, times=1)

    async def _met(self, rule: Rule) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                await rule.met.wait()
        except TimeoutError:
            raise TimeoutError(f"no such request came: {self.app.explain()}") from None

    # Proof -------------------------------------------------------------------------------------

    async def verify(self) -> None:
        """Compare what a `read_committed` reader and the group see with the records."""
        outputs = Counter(int(record.value or b"") for record in await self.broker.read(self.outputs))
        lost = self.sent - len(outputs)
        doubled = outputs.total() - len(outputs)
        codes = {NAMES[api]: dict(found) for api, found in self.codes.items()}
        counts = self.app.statistics().transactions
        assert counts is not None
        aborted = counts.aborted - self.refused
        figures = (
            f"{self.transactions} transactions, {self.late} late requests, {codes}, {lost=}, {doubled=}, {aborted=}"
        )
        logger.info("version %d: %s", self.version, figures)
        assert (lost, doubled) == (0, 0), figures
        assert await self.broker.committed(self.app.group_id, self.topic) == {0: self.sent}, figures
        for api, found in self.codes.items():
            assert set(found) <= harmless(api, self.version), figures
        late_starts = self.late if INIT_PRODUCER_ID in self.codes else 0  # those end an open transaction
        assert 0 <= aborted <= late_starts, figures
        if self.version == SECOND:
            assert all(body(end).commit for end in self.ends.requests), "a new epoch aborts"
            assert self.app.statistics().client_losses == 0, "no other process has the id"


def harmless(api: int, version: int) -> frozenset[int]:
    """The codes in answers to a late request of that kind."""
    if api == INIT_PRODUCER_ID:
        return OUTDATED | {0}  # it gives us the epoch that we have, or ends our transaction as a time-out does
    if api == END_TXN and version == SECOND:
        return OUTDATED | {0}  # the brokers remember the latest end, until another transaction begins
    return OUTDATED


@pytest.fixture
async def late(own_kafka: KafkaBroker, group: str) -> AsyncIterator[LateRequests]:
    """A running app behind a proxy."""
    ports = own_kafka.ports
    settings = {"processing_guarantee": "exactly_once", "rebalance_timeout": 20, "commit_interval": 0.02}
    app = quick_app(f"127.0.0.1:{ports.proxy}", group, **settings)
    async with Proxies({1: (ports.proxy, ports.proxied)}) as proxies:
        ends = proxies.watch(api_key=END_TXN)
        late = LateRequests(own_kafka, proxies, app, own_kafka.features["transaction.version"], ends)
        await own_kafka.create_topic(late.topic)
        await own_kafka.create_topic(late.outputs, 2)

        @app.consume(late.topic, concurrency=128)
        async def publish(record: Record, context: Context) -> None:
            await context.publish(late.outputs, record.value, key=record.key)

        async with app:
            yield late


@pytest.mark.parametrize("own_kafka", VERSIONS, indirect=True)
async def test_late_requests_of_a_transaction_do_not_change_the_next(late: LateRequests) -> None:
    for number, api in enumerate(requests_of(late.version)):
        for is_refused in (False, True):
            later = phases(late.version)
            await late.repeat(api, later[(number + is_refused) % len(later)], is_refused=is_refused)
    await late.verify()


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("own_kafka", VERSIONS, indirect=True)
@pytest.mark.parametrize("api", [pytest.param(api, id=name) for api, name in NAMES.items()])
async def test_late_requests_of_many_transactions_do_not_change_the_next(late: LateRequests, api: int) -> None:
    if api not in requests_of(late.version):
        pytest.skip("the second protocol has no such request")
    while late.transactions < MANY:
        for phase in phases(late.version):
            for is_refused in (False, True):
                await late.repeat(api, phase, is_refused=is_refused)
    await late.verify()
