"""A client that was fenced by a newer process with its transactional id."""

import asyncio

import pytest

from aioshard.errors import ClientLostError, CommitError
from aioshard.kafka.wire.requests import INIT_PRODUCER_ID
from tests.unit.kafka.transactions.one_client import ID, OneClient, scenario

BOTH = pytest.mark.parametrize("level", [1, 2])


@BOTH
def test_a_fenced_client_sends_nothing_more(level: int) -> None:
    """It must not request an epoch as a new process does, because that would fence the process that has fenced it."""

    async def test(client: OneClient) -> None:
        await client.commit(1, b"first")
        await asyncio.sleep(1)  # for its markers
        rival = client.model.coordinator.init(ID, 8.0, None)
        with pytest.raises(CommitError):
            await client.commit(2, b"second")
        for _ in range(3):
            with pytest.raises(ClientLostError):
                await client.commit(2, b"second")
        with pytest.raises(ClientLostError):
            await client.transactions.settle()
        known = client.model.coordinator.transactions[ID]
        assert rival == (0, (known.producer_id, known.epoch))
        requested = [request.values.epoch for request in client.received(INIT_PRODUCER_ID)]
        assert requested.count(-1) == 1, "that of its start"

    scenario(test, level=level)
