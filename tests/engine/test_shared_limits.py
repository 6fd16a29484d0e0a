"""The next token of a limit goes to the shards that have waited longest."""

import asyncio
from typing import Any, cast

import pytest

from aioshard import Limit
from aioshard.engine.limits import Alarm, SharedLimit
from aioshard.testing import VirtualTimeLoop, run


class Asking:
    """Shards that ask a limit for a token, and when they were called."""

    def __init__(self, limit: SharedLimit, *, takes: bool = True, accepts: bool = True) -> None:
        self.limit = limit
        self.takes = takes
        self.accepts = accepts
        self.called: list[float] = []
        self.taken = 0

    def ask(self) -> bool:
        """Take a token if the limit allows it; return whether it did."""
        allowed = self.limit.allows(self.call)
        if allowed:
            self.limit.take(self.call)
            self.taken += 1
        return allowed

    def call(self) -> bool:
        self.called.append(asyncio.get_running_loop().time())
        if not self.takes:
            return self.accepts
        while self.ask():
            pass
        return True


def limit_of(per_second: float, burst: int, **options: Any) -> SharedLimit:
    return SharedLimit(Limit("stripe", per_second, burst, **options), asyncio.get_running_loop().time)


def test_no_token_is_taken_for_which_others_have_waited_longer() -> None:
    async def test() -> None:
        limit = limit_of(1.0, 1)
        quick, waiting = Asking(limit), Asking(limit)
        assert quick.ask()
        assert not waiting.ask()
        cast("VirtualTimeLoop", asyncio.get_running_loop()).pass_time(1.0)  # no timer fires
        assert not quick.ask()
        assert waiting.ask()

    run(test())


def test_a_token_beyond_those_that_others_wait_for_is_free() -> None:
    async def test() -> None:
        limit = limit_of(1.0, 3)
        quick, waiting = Asking(limit), Asking(limit)
        assert [quick.ask(), quick.ask(), quick.ask()] == [True, True, True]
        assert not waiting.ask()
        cast("VirtualTimeLoop", asyncio.get_running_loop()).pass_time(3.0)
        assert [quick.ask(), quick.ask(), quick.ask()] == [True, True, False]
        assert [waiting.ask(), waiting.ask()] == [True, False]

    run(test())


def test_shards_that_ask_themselves_when_it_is_their_turn_join_the_end_of_the_queue() -> None:
    async def test() -> None:
        limit = limit_of(1.0, 1)
        first, second = Asking(limit), Asking(limit)
        assert [first.ask(), first.ask(), second.ask()] == [True, False, False]
        for turn in (first, second, first, second):
            cast("VirtualTimeLoop", asyncio.get_running_loop()).pass_time(1.0)
            other = second if turn is first else first
            assert [other.ask(), turn.ask(), turn.ask()] == [False, True, False]

    run(test())


def test_a_token_is_kept_for_shards_that_were_called() -> None:
    """A worker that they wake needs a few steps of the event loop until it asks."""

    async def test() -> None:
        limit = limit_of(1.0, 1)
        first, called, quick = Asking(limit), Asking(limit, takes=False), Asking(limit)
        assert [first.ask(), limit.allows(called.call)] == [True, False]
        await asyncio.sleep(1.001)
        assert called.called == pytest.approx([1.0])
        assert [quick.ask(), called.ask()] == [False, True]

    run(test())


@pytest.mark.parametrize(("accepts", "delay"), [(False, 0.0), (True, 0.005)])
def test_shards_that_start_nothing_lose_their_turn(accepts: bool, delay: float) -> None:
    """Immediately if they say so, and soon if it only shows."""

    async def test() -> None:
        limit = limit_of(1.0, 1)
        first, idle, busy = Asking(limit), Asking(limit, takes=False, accepts=accepts), Asking(limit)
        assert first.ask()
        assert not idle.limit.allows(idle.call)
        assert not busy.ask()
        await asyncio.sleep(1.5)
        assert idle.called == pytest.approx([1.0])
        assert busy.called == pytest.approx([1.0 + delay])
        assert busy.taken == 1

    run(test())


def test_shards_that_wait_get_every_token_of_a_high_rate_in_turn() -> None:
    async def test() -> None:
        limit = limit_of(2_000.0, 1)
        asking = [Asking(limit) for _ in range(10)]
        for shards in asking:
            shards.call()
        await asyncio.sleep(1.0)
        assert sum(shards.taken for shards in asking) == pytest.approx(2_000, abs=3)
        assert {shards.taken for shards in asking} <= {199, 200, 201}

    run(test())


def test_the_next_shards_need_not_wait_until_the_first_ask_again() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        limit = limit_of(1_000.0, 1)
        first, waiting = Asking(limit), Asking(limit)
        called: list[float] = []

        def take_soon() -> bool:
            called.append(loop.time())
            loop.call_soon(limit.take, take_soon)
            return True

        assert [first.ask(), limit.allows(take_soon), waiting.ask()] == [True, False, False]
        await asyncio.sleep(0.1)
        assert called == pytest.approx([0.001])
        assert waiting.called[0] == pytest.approx(0.002)

    run(test())


def test_shards_that_wait_without_a_share_are_called_once_there_is_one() -> None:
    async def test() -> None:
        limit = limit_of(1.0, 1, per="group")
        waiting = Asking(limit)
        assert not waiting.ask()
        await asyncio.sleep(10.0)
        statistics = limit.statistics()
        assert (statistics.waiting, statistics.waiting_seconds) == (0, 0.0), "it has nothing to start"
        limit.use_share(0.5)
        assert limit.statistics().waiting == 1
        await asyncio.sleep(1.9)
        assert waiting.called == []
        limit.use_share(0.1)  # 0.95 tokens so far
        await asyncio.sleep(0.4)
        assert waiting.called == []
        await asyncio.sleep(0.2)
        assert waiting.called == pytest.approx([12.4])
        assert limit.statistics().waiting_seconds == pytest.approx(2.5, abs=0.2)

    run(test())


def test_an_alarm_rings_once_at_the_earliest_moment() -> None:
    async def test() -> None:
        rung: list[float] = []
        alarm = Alarm(lambda: rung.append(asyncio.get_running_loop().time()))
        for when in (5.0, 3.0, 4.0):
            alarm.ring_at(when)
        await asyncio.sleep(6.0)
        assert rung == pytest.approx([3.0])
        alarm.ring_at(7.0)
        alarm.cancel()
        await asyncio.sleep(2.0)
        alarm.ring_at(9.0)
        await asyncio.sleep(2.0)
        assert rung == pytest.approx([3.0, 9.0])

    run(test())
