"""A member that no longer reaches its coordinator loses its partitions when its session expires."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
from aiokafka import AIOKafkaProducer

from aioshard import App, Record
from tests.kafka.faults.support import BROKERS_SESSION, quick_app, until
from tests.support.proxies import FIND_COORDINATOR, GROUP_APIS, SYNC_GROUP, Rule
from tests.support.three_brokers import ThreeBrokers

SESSION = 4.0
GRACE = 1.0
"""Seconds after the session within which the member must have ended what it had."""
SESSIONS_CUT_OFF = 2
KEYS = 20
PAUSE = 0.02
TAKES = 0.05

CUT_OFF_APIS = (FIND_COORDINATOR, *GROUP_APIS)


class Run(NamedTuple):
    member: str
    key: bytes | None
    value: bytes | None
    began: float
    ended: float
    finished: bool


class Group:
    """Two members of one group, what they run, and a producer that never pauses.

    Attributes:
        session: Seconds after which the group removes a member that is cut off.
    """

    def __init__(self, brokers: ThreeBrokers, topic: str, group: str, protocol: str = "classic") -> None:
        self.brokers = brokers
        self.topic = topic
        self.session = SESSION if protocol == "classic" else BROKERS_SESSION
        self.runs: list[Run] = []
        self.published = 0
        self.cut_off, self.other = (
            self._member(name, group=group, group_protocol=protocol) for name in ("cut-off", "other")
        )

    def _member(self, name: str, *, group: str, **settings: str) -> App:
        app = quick_app(
            self.brokers.proxied_bootstrap,
            group,
            client_id=name,
            session_timeout=SESSION,
            heartbeat_interval=0.5,
            **settings,
        )

        @app.consume(self.topic)
        async def handle(record: Record) -> None:
            now = asyncio.get_running_loop().time
            began, finished = now(), False
            try:
                await asyncio.sleep(TAKES)
                finished = True
            finally:
                self.runs.append(Run(name, record.key, record.value, began, now(), finished))

        return app

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Publish all the time."""
        publishing = asyncio.create_task(self._publish(), name="publish")
        try:
            yield
        finally:
            publishing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await publishing

    async def _publish(self) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self.brokers.bootstrap, enable_idempotence=True)
        async with producer:
            while True:
                number = self.published
                await producer.send_and_wait(self.topic, b"%d" % number, key=b"%d" % (number % KEYS))
                self.published += 1
                await asyncio.sleep(PAUSE)

    def last_of(self, member: str) -> float:
        return max((run.ended for run in self.runs if run.member == member), default=0.0)

    def overlaps(self, after: float) -> list[tuple[Run, Run]]:
        """Runs of one key in both members concurrently, later than *after*."""
        ours = [run for run in self.runs if run.member == "cut-off" and run.ended > after]
        theirs = [run for run in self.runs if run.member == "other" and run.ended > after]
        return [
            (run, two)
            for run in ours
            for two in theirs
            if run.key == two.key and min(run.ended, two.ended) > max(run.began, two.began, after)
        ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.chaos)])
async def test_no_key_runs_in_two_members_after_the_session_expires(
    brokers: ThreeBrokers, topic: str, group: str, protocol: str
) -> None:
    await brokers.create_topic(topic, 6)
    pair = Group(brokers, topic, group, protocol)

    async with pair.publishing(), pair.cut_off:
        async with pair.other:
            await until(lambda: pair.last_of("cut-off") and pair.last_of("other"))
            cut = [brokers.proxies.swallow(api_key=api, client_id="cut-off") for api in CUT_OFF_APIS]
            await ends_in_time_and_comes_back(pair, cut)
        published = pair.published
        await until(lambda: len({run.value for run in pair.runs if run.finished}) >= published)


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_a_member_cut_off_while_rejoining_gives_up_its_kept_partitions(
    brokers: ThreeBrokers, topic: str, group: str
) -> None:
    """With an incremental assignor, a member keeps its partitions while a rebalance is under way."""
    await brokers.create_topic(topic, 6)
    pair = Group(brokers, topic, group)

    async def cut_off() -> list[Rule]:
        rules = [brokers.proxies.swallow(api_key=SYNC_GROUP, client_id="cut-off")]
        await rules[0].met.wait()
        return [*rules, *(brokers.proxies.swallow(api_key=api, client_id="cut-off") for api in CUT_OFF_APIS)]

    async with pair.publishing(), pair.cut_off:
        await until(lambda: pair.last_of("cut-off"))
        cutting = asyncio.create_task(cut_off(), name="cut off")
        async with pair.other:
            await ends_in_time_and_comes_back(pair, await cutting)


async def ends_in_time_and_comes_back(pair: Group, cut: Sequence[Rule]) -> None:
    """Check that the member that *cut* has just cut off gives up in time, and rejoins when the rules are lifted."""
    now = asyncio.get_running_loop().time
    cut_at = now()
    await until(lambda: len(pair.other.statistics().partitions) == 6)
    await until(lambda: now() > cut_at + SESSIONS_CUT_OFF * pair.session)
    assert pair.last_of("cut-off") < cut_at + pair.session + GRACE, "its partitions are another member's"
    for rule in cut:
        rule.lift()
    back = now()
    await until(lambda: pair.last_of("cut-off") > back, pair.cut_off.explain)
    assert pair.overlaps(after=cut_at + pair.session + GRACE) == []
