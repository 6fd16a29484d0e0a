"""I13: requests of a transaction that arrive during the next one neither end it nor change its offsets.

A proxy keeps a request and cuts the connection of the client, which sends the request again. So the transaction ends as
it should; but the brokers get the request a second time, when the app has begun another transaction. A congested
path or a paused broker does that.
"""

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

import pytest

from aioshard import App, Context, Record
from tests.kafka.faults.support import DEADLINE, quick_app, until
from tests.support.kafka import KafkaBroker
from tests.support.proxies import (
    ADD_OFFSETS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    TXN_OFFSET_COMMIT,
    Proxies,
    Request,
    Rule,
    code_after_throttle,
)

FEW, MANY = 2, 100
"""Transactions with a request that arrives late."""
KINDS = ("late_commit", "late_abort", "late_offsets", "late_messages", "late_start")
VERSIONS = [
    pytest.param({"transaction.version": 1}, id="v1", marks=pytest.mark.chaos),
    pytest.param({"transaction.version": 2}, id="v2"),
]
"""Of transactions, on the cluster."""
RECORDS = 300
"""In the next transaction, so that the client has sent their outputs before it sends the offsets."""
ILLEGAL_GENERATION = 22
WRITTEN_WITHIN = 2.0
"""Seconds until the outputs are in the log, unless the client sends them after the offsets."""
FENCED = frozenset({47, 90})
"""Invalid producer epoch; producer fenced."""


def is_commit(request: Request) -> bool:
    """Whether an EndTxn is a commit: the last field, which one empty set of tags may follow."""
    flexible = request.api_version >= 3
    return request.frame[-2 if flexible else -1] == 1


def refused(_: Request, answer: bytes) -> bytes:
    """Change the answer to a TxnOffsetCommit of one partition: the group has rebalanced.

    The code is followed by the empty tags of the partition, its topic and the answer.
    """
    return answer[:-5] + struct.pack(">h", ILLEGAL_GENERATION) + answer[-3:]


@dataclass
class LateRequests:
    """An app that publishes one output for each record, and a proxy before its broker.

    Attributes:
        sent: How many records the app has to read.
        codes: The error codes in the answers to late EndTxn requests.
    """

    broker: KafkaBroker
    proxies: Proxies
    app: App
    sent: int = 0
    codes: list[int] = field(default_factory=list)

    async def send(self, records: int) -> None:
        """Let the app have more records; each has the next number."""
        numbers = range(self.sent, self.sent + records)
        await self.broker.produce(self.topic, [(b"key-%d" % (number % 7), b"%d" % number) for number in numbers])
        self.sent = numbers.stop

    @property
    def topic(self) -> str:
        """The topic of the records."""
        return f"{self.app.group_id}.in"

    @property
    def outputs(self) -> str:
        """The topic of the outputs."""
        return f"{self.app.group_id}.out"

    async def until_committed(self) -> None:
        """Wait until all records are committed."""
        await until(
            lambda: sum(partition.committed or 0 for partition in self.app.statistics().partitions) == self.sent
        )

    async def written(self) -> int:
        """Return the end of the log of the outputs, with messages of open and aborted transactions."""
        return sum((await self.broker.end_offsets(self.outputs)).values())

    # Late requests -----------------------------------------------------------------------------

    async def late_commit(self) -> None:
        """Let a commit arrive during a transaction that is then refused, so that its messages are sent again."""
        late = self.proxies.strand(api_key=END_TXN)
        await self.send(1)
        await self._met(late)
        assert is_commit(late.requests[0])
        await self._arrives_before_the_offsets_of_the_next(late, is_refused=True)

    async def late_abort(self) -> None:
        """Let an abort arrive during a transaction that is then committed."""
        late = self.proxies.strand(api_key=END_TXN)
        refusal = self._refuse_offsets()
        await self.send(1)
        await self._met(late)
        refusal.lift()
        assert not is_commit(late.requests[0])
        await self._arrives_before_the_offsets_of_the_next(late, is_refused=False)

    async def late_offsets(self) -> None:
        """Let the offsets of a transaction arrive between those of the next one and its end."""
        late = self.proxies.strand(api_key=TXN_OFFSET_COMMIT)
        await self.send(1)
        await self._met(late)
        await self.until_committed()
        await self._arrives_before_the_end_of_the_next(late)
        await self.broker.wait_for_lag(self.app.group_id, self.topic)

    async def late_messages(self) -> None:
        """Let the messages of a transaction arrive before the end of the next one."""
        late = self.proxies.strand(api_key=PRODUCE)
        await self.send(1)
        await self._met(late)
        await self.until_committed()
        await self._arrives_before_the_end_of_the_next(late)

    async def late_start(self) -> None:
        """Let the start of a client arrive in a transaction of that client; the brokers then abort it."""
        late = self.proxies.strand(api_key=INIT_PRODUCER_ID)
        refusal = self._refuse_offsets()
        await self.send(1)
        await self._met(late)
        refusal.lift()
        await self._arrives_before_the_end_of_the_next(late)

    async def _arrives_before_the_end_of_the_next(self, late: Rule) -> None:
        held = self.proxies.hold(api_key=END_TXN)
        await self.send(RECORDS)
        await self._met(held)
        await late.arrive()
        held.lift()
        await self.until_committed()

    async def _arrives_before_the_offsets_of_the_next(self, late: Rule, *, is_refused: bool) -> None:
        before = await self.written()
        held = [self.proxies.hold(api_key=api) for api in (ADD_OFFSETS_TO_TXN, TXN_OFFSET_COMMIT)]
        await self.send(RECORDS)
        await self._met(*held)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + WRITTEN_WITHIN
        while await self.written() < before + RECORDS and loop.time() < give_up:  # noqa: ASYNC110 - brokers send no event
            await asyncio.sleep(0.01)
        answer = await late.arrive()
        self.codes.append(code_after_throttle(late.requests[0], answer))
        refusal = self._refuse_offsets() if is_refused else None
        for rule in held:
            rule.lift()
        if refusal is not None:
            await self._met(refusal)
            refusal.lift()
        await self.until_committed()

    def _refuse_offsets(self) -> Rule:
        """Refuse the offsets of transactions, as after a rebalance."""
        return self.proxies.answer(refused, api_key=TXN_OFFSET_COMMIT)

    async def _met(self, *rules: Rule) -> None:
        waits = [asyncio.create_task(rule.met.wait()) for rule in rules]
        done, pending = await asyncio.wait(waits, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        assert done, f"no such request came: {self.app.explain()}"


@pytest.fixture
async def late(own_kafka: KafkaBroker, group: str) -> AsyncIterator[LateRequests]:
    """A running app behind a proxy."""
    ports = own_kafka.ports
    settings = {"client": "confluent", "processing_guarantee": "exactly_once", "rebalance_timeout": 20}
    app = quick_app(f"127.0.0.1:{ports.proxy}", group, **settings)
    async with Proxies({1: (ports.proxy, ports.proxied)}) as proxies:
        late = LateRequests(own_kafka, proxies, app)
        for topic in (late.topic, late.outputs):
            await own_kafka.create_topic(topic)

        @app.consume(late.topic, concurrency=128)
        async def publish(record: Record, context: Context) -> None:
            await context.publish(late.outputs, record.value, key=record.key)

        async with app:
            yield late


async def verify(late: LateRequests) -> None:
    """Compare what a `read_committed` reader sees with the records."""
    outputs = Counter(int(record.value or b"") for record in await late.broker.read(late.outputs))
    lost = late.sent - len(outputs)
    doubled = outputs.total() - len(outputs)
    assert (lost, doubled) == (0, 0), f"lost and doubled outputs; late requests were answered {late.codes}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("own_kafka", VERSIONS, indirect=True)
@pytest.mark.parametrize(
    ("kinds", "times"),
    [
        pytest.param(KINDS, FEW, id="few"),
        *(pytest.param((kind,), MANY, id=kind, marks=pytest.mark.chaos) for kind in KINDS),
    ],
)
async def test_late_requests_of_a_transaction_do_not_change_the_next(
    late: LateRequests, kinds: Collection[str], times: int
) -> None:
    for kind in kinds:
        for _ in range(times):
            await getattr(late, kind)()
        await verify(late)
        assert set(late.codes) <= FENCED
