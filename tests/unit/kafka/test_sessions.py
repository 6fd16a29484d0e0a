"""When a member on aiokafka counts as lost, and which coordinator it trusts; without a broker."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors as kafka

from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.testing import run

SESSION = 10.0
ORDERS = TopicPartition("orders", 0)


class Coordinator:
    """The parts of aiokafka's group coordinator that count here; a heartbeat is answered when a test says so."""

    def __init__(self) -> None:
        self.coordinator_id = 1
        self.generation = 3
        self.member_id = "me"
        self.rejoins = 0
        self.asked: list[int] = []
        self._performed_join_prepare = False
        self._coordinator_dead_fut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def ensure_coordinator_known(self) -> None:
        """It always is."""

    async def _do_heartbeat(self) -> bool:
        return await self.answer

    def reset_generation(self) -> None:
        self.generation = -1

    def request_rejoin(self) -> None:
        self.rejoins += 1

    def move(self, node: int) -> None:
        """Let another broker be found to coordinate the group."""
        self._coordinator_dead_fut.set_result(None)
        self._coordinator_dead_fut = asyncio.get_running_loop().create_future()
        self.coordinator_id = node

    async def _send_req(self, request: Any) -> Any:  # noqa: ARG002 - as theirs
        self.asked.append(self.coordinator_id)
        return SimpleNamespace(topics=[("orders", [(0, 7, "", 0)])], error_code=0)


class Member:
    def __init__(self) -> None:
        self.coordinator = Coordinator()
        client = SimpleNamespace(_get_conn=None, bootstrap=None, get_random_node=None, _conns={})
        consumer: Any = SimpleNamespace(_client=client, _subscription=None, _coordinator=self.coordinator)
        self.internals = Internals(consumer, ConsumerAssignor("range"), "billing")
        self.lost: list[float] = []
        self.internals.watch_session(SESSION, lambda: self.lost.append(asyncio.get_running_loop().time()))

    async def beats(self, answered_after: float) -> None:
        """One heartbeat."""
        loop = asyncio.get_running_loop()
        self.coordinator.answer = loop.create_future()
        loop.call_later(answered_after, lambda: self.coordinator.answer.set_result(True))
        await self.coordinator._do_heartbeat()


def scenario(test: Callable[[Member], Awaitable[None]]) -> None:
    async def live() -> None:
        await test(Member())

    run(live())


def test_a_session_starts_when_the_last_answered_heartbeat_was_sent() -> None:
    async def test(member: Member) -> None:
        began = asyncio.get_running_loop().time()
        member.internals.joined(3)
        await asyncio.sleep(5)
        await member.beats(answered_after=4)
        await asyncio.sleep(20)
        assert [at - began for at in member.lost] == [pytest.approx(5 + SESSION)]
        assert member.coordinator.rejoins == 1, "it is a member still, as far as it knows"

    scenario(test)


def test_an_unknown_member_is_lost_at_once() -> None:
    async def test(member: Member) -> None:
        member.internals.joined(3)
        member.coordinator.reset_generation()
        assert len(member.lost) == 1
        assert member.coordinator.generation == -1

    scenario(test)


def test_a_member_without_partitions_has_no_session_to_lose() -> None:
    async def test(member: Member) -> None:
        member.internals.joined(3)
        member.internals.end_session()
        await member.beats(answered_after=0)
        await asyncio.sleep(3 * SESSION)
        assert member.lost == []

    scenario(test)


def test_the_assigning_coordinator_is_asked_at_once() -> None:
    async def test(member: Member) -> None:
        member.internals.joined(3)
        began = asyncio.get_running_loop().time()
        assert await member.internals.committed_once([ORDERS]) == {ORDERS: Committed(7, "")}
        assert asyncio.get_running_loop().time() - began < 0.1

    scenario(test)


@pytest.mark.parametrize("node", [2, 1], ids=["another", "the same again"])
def test_a_new_coordinator_is_asked_after_a_delay(node: int) -> None:
    async def test(member: Member) -> None:
        member.internals.joined(3)
        member.coordinator.move(node)
        began = asyncio.get_running_loop().time()
        await member.internals.committed_once([ORDERS])
        assert asyncio.get_running_loop().time() - began >= 1.9
        await member.internals.committed_once([ORDERS])
        assert asyncio.get_running_loop().time() - began < 3, "waited for once"

    scenario(test)


def test_a_coordinator_taking_over_during_the_delay_restarts_it() -> None:
    async def test(member: Member) -> None:
        member.internals.joined(3)
        member.coordinator.move(2)
        began = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(1.9, member.coordinator.move, 3)
        await member.internals.committed_once([ORDERS])
        assert asyncio.get_running_loop().time() - began >= 3.8
        assert member.coordinator.asked == [3]

    scenario(test)


def test_a_repeatedly_interrupted_delay_ends() -> None:
    """As with a commit timeout that is shorter than the wait."""

    async def test(member: Member) -> None:
        member.internals.joined(3)
        member.coordinator.move(2)
        for _ in range(3):
            try:
                async with asyncio.timeout(1):
                    await member.internals.committed_once([ORDERS])
            except TimeoutError:
                continue
            break
        assert member.coordinator.asked == [2]

    scenario(test)


def test_an_error_of_the_whole_response_is_raised_and_triggers_a_lookup() -> None:
    async def test(member: Member) -> None:
        dead: list[bool] = []
        member.coordinator.coordinator_dead = lambda: dead.append(True)  # type: ignore[attr-defined]

        async def refuse(request: Any) -> Any:  # noqa: ARG001 - as theirs
            return SimpleNamespace(topics=[], error_code=16)

        member.coordinator._send_req = refuse  # type: ignore[method-assign]
        with pytest.raises(kafka.NotCoordinatorForGroupError):
            await member.internals.committed_once([ORDERS])
        assert dead == [True]

    scenario(test)


@pytest.mark.parametrize(
    ("generation", "named", "refused"),
    [(-1, 2, True), (-1, 1, False), (3, 2, False)],
    ids=["another", "ours", "member"],
)
def test_a_non_member_has_the_coordinator_confirmed_by_another_broker(
    generation: int, named: int, refused: bool
) -> None:
    """One that was frozen answers with old offsets until it learns that another one took over."""

    async def test(member: Member) -> None:
        dead: list[bool] = []

        async def send(node: int, _: object) -> Any:
            assert node == 2
            return SimpleNamespace(error_code=0, coordinator_id=named)

        brokers = [SimpleNamespace(nodeId=1), SimpleNamespace(nodeId=2)]
        member.internals.client.cluster = SimpleNamespace(brokers=lambda: brokers)
        member.internals.client.send = send
        member.coordinator.coordinator_dead = lambda: dead.append(True)  # type: ignore[attr-defined]
        member.coordinator.generation = generation
        if refused:
            with pytest.raises(kafka.NotCoordinatorForGroupError):
                await member.internals.committed_once([ORDERS])
        else:
            assert await member.internals.committed_once([ORDERS]) == {ORDERS: Committed(7, "")}
        assert bool(dead) is refused

    scenario(test)
