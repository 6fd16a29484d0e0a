"""Three brokers evict fetch sessions all the time while leaders move: nothing is repeated or skipped."""

import asyncio

import pytest

from tests.kafka.faults.test_fetch_sessions import PARTITIONS, Rounds
from tests.support.three_brokers import ThreeBrokers

ROUNDS = 6
EVICTION_INTERVAL = 2.0
_NO_SUCH_SESSION = 70


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_evicted_sessions_repeat_and_skip_nothing_while_leaders_move(
    brokers: ThreeBrokers, topic: str, group: str
) -> None:
    async def evict_again_and_again() -> None:
        while True:
            await rounds.evict()
            await asyncio.sleep(EVICTION_INTERVAL)

    async with Rounds(brokers, topic, group) as rounds:
        evicting = asyncio.create_task(evict_again_and_again(), name="evict sessions")
        for number in range(ROUNDS):
            await asyncio.gather(rounds.publish_and_read(), brokers.move_leader(topic, number % PARTITIONS))
            await rounds.publish_and_read()
        evicting.cancel()
        rounds.assert_each_record_once()
    assert all(any(one.error == _NO_SUCH_SESSION for one in responses) for responses in rounds.responses)
