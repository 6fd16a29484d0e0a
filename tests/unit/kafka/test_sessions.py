"""When a member on aiokafka counts as lost; without a broker."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.testing import run

SESSION = 10.0


class Coordinator:
    """The parts of aiokafka's group coordinator that count here; a heartbeat is answered when a test says so."""

    def __init__(self) -> None:
        self.generation = 3
        self.member_id = "me"
        self.rejoins = 0
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def _do_heartbeat(self) -> bool:
        return await self.answer

    def reset_generation(self) -> None:
        self.generation = -1

    def request_rejoin(self) -> None:
        self.rejoins += 1


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
