"""Rate limits on a real broker."""

import asyncio
import bisect
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aioshard import App, Limit, Record
from tests.kafka.faults.support import Ledger, messages, quick_app, until, with_both_protocols
from tests.support.brokers import SharedKafka


class Timed(Ledger):
    """Notes when each run began."""

    def __init__(self, *, pause: float = 0.0) -> None:
        super().__init__(pause=pause)
        self.times: list[float] = []

    async def handle(self, record: Record) -> None:
        now = asyncio.get_running_loop().time()
        self.times.append(now)
        await super().handle(record)


def assert_keeps(limit: Limit, times: Sequence[float], *, members: int = 1) -> None:
    """No window of a tenth of a second to ten seconds has more starts than the limit allows.

    The burst of a group cannot be divided below one run for each member.
    """
    for window in (0.0, 0.1, 0.5, 2.0, 10.0):
        for first, start in enumerate(times):
            count = bisect.bisect_right(times, start + window) - first
            assert count <= limit.at_once + members - 1 + limit.per_second * window + 1e-3


async def test_ten_thousand_records_are_processed_at_a_limited_rate(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, partitions=4)
    sent = messages(10_000, keys=500)
    await kafka.produce(topic, sent)
    app, ledger, limit = quick_app(kafka, group), Timed(), Limit("pace", 5_000, burst=100)
    app.consume(topic, concurrency=32, limit=limit)(ledger.handle)
    async with app:
        await ledger.until_finished(sent)

    assert_keeps(limit, ledger.times)
    assert ledger.times[-1] - ledger.times[0] >= (10_000 - 100) / 5_000 - 1e-3
    assert ledger.duplicates == []
    ledger.assert_in_order()


GROUP_LIMIT = Limit("stripe", 20, burst=6, per="group")


class Members:
    """Members of one group, and the shares that they have had of its limit."""

    def __init__(self, kafka: SharedKafka, topic: str, group: str, protocol: str) -> None:
        self._kafka, self._topic, self._group, self._protocol = kafka, topic, group, protocol
        self.ledger = Timed()
        self.apps: list[App] = []
        self.joined = 0
        self.allowed = 0.0
        """Starts that the shares of all members have allowed so far."""
        self.most = 0.0
        """The largest sum of their shares."""

    @asynccontextmanager
    async def joining(self) -> AsyncIterator[App]:
        """A member that joins the group, until it leaves."""
        app = quick_app(self._kafka, self._group, group_protocol=self._protocol)
        app.consume(self._topic, concurrency=16, limit=GROUP_LIMIT)(self.ledger.handle)
        self.joined += 1
        async with app:
            self.apps.append(app)
            yield app
            self.apps.remove(app)

    async def watch(self) -> None:
        """Sum up the shares until cancelled."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(0.02)
            now = loop.time()
            shares = sum(app.statistics().limits[0].share or 0.0 for app in self.apps)
            self.most = max(self.most, shares)
            self.allowed += GROUP_LIMIT.per_second * shares * (now - before)
            before = now

    async def share_equally(self) -> None:
        """Wait until the members have all partitions, and work under the limit for five seconds."""
        await until(lambda: sum(len(app.assignment()) for app in self.apps) == PARTITIONS)
        await asyncio.sleep(5.0)


PARTITIONS = 8


@with_both_protocols
async def test_a_group_keeps_its_limit_while_members_join_and_leave(
    kafka: SharedKafka, topic: str, group: str, protocol: str
) -> None:
    await kafka.create_topic(topic, partitions=PARTITIONS)
    await kafka.produce(topic, messages(3_000, keys=500))
    members = Members(kafka, topic, group, protocol)
    watching = asyncio.create_task(members.watch())
    async with AsyncExitStack() as first:
        await first.enter_async_context(members.joining())
        await members.share_equally()
        async with members.joining():
            await members.share_equally()
            async with members.joining():
                await members.share_equally()
                await first.aclose()
                await members.share_equally()
                async with members.joining():
                    await members.share_equally()
            await members.share_equally()
    watching.cancel()

    times = members.ledger.times
    assert_keeps(GROUP_LIMIT, times, members=members.joined)
    assert members.most <= 1.0 + 1e-9
    assert len(times) >= 0.9 * members.allowed
    assert members.ledger.duplicates == []
    members.ledger.assert_in_order()
