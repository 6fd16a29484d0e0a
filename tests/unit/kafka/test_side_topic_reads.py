"""Side topics: which result of a fetch counts, and where a log ends."""

from typing import Any

import pytest
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED

from aioshard.errors import TransportError
from aioshard.kafka.aiokafka.client import END, Fetched
from aioshard.kafka.side_topics import KafkaSideTopics
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings

ONE = TopicPartition("orders.parked", 0)


def made() -> KafkaSideTopics:
    return KafkaSideTopics(Settings(bootstrap_servers="127.0.0.1:9"))


def test_a_result_from_before_a_seek_is_dropped() -> None:
    topics = made()
    record = Record(*ONE, 0, None, b"", (), 0.0)
    topics.watch([ONE])
    topics.seek(ONE, 5)
    topics._fetched = [(ONE, 0, Fetched([record], 1, 9))]

    assert topics._take(0.0) == ([], False)
    assert topics.position(ONE) == 5
    topics._fetched = [(ONE, 5, Fetched([record], 6, 9))]
    assert topics._take(0.0) == ([record], True)
    assert topics.position(ONE) == 6


@pytest.mark.parametrize("stable", [9, 7])
async def test_an_open_transaction_at_the_end_leaves_the_end_undecided(stable: int) -> None:
    """A state restored up to an earlier end would lack its records once it is committed."""

    class Client:
        leader = staticmethod(lambda _: 1)

        async def log_offset(self, _: int, __: object, which: int, isolation: int = READ_COMMITTED) -> int:
            assert which == END
            return 9 if isolation == READ_UNCOMMITTED else stable

    topics: Any = made()

    async def connected() -> Client:
        return Client()

    topics._connected = connected
    if stable == 9:
        assert await topics.end(ONE) == 9
    else:
        with pytest.raises(TransportError, match=r"a transaction in orders\.parked/0 is still open"):
            await topics.end(ONE)
