"""One client that commits in transactions on a model cluster, in virtual time.

async def test(client: OneClient) -> None:
    client.model.choose_fault = lambda request: HELD if request.api is END_TXN else NO_FAULT
    await client.commit(1, b"first")

scenario(test)
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from unittest import mock

from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import new_cluster
from aioshard.ports import Message
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster
from tests.support.model_transactions import ModelTransactions
from tests.unit.kafka.transactions.transaction_world import GROUP, INPUTS, OUTPUTS, TIMEOUT

ID = "group:one"
MEMBER = Member(1, "member")
INPUT = INPUTS[0]


class OneClient:
    """A client, and the brokers that it talks to.

    Attributes:
        model: The brokers, with the faults that a test chooses.
        transactional: Its transactional id.
        offsets: Reads what the group has committed.
        transactions: The producer that is tested.
    """

    def __init__(self, brokers: ModelCluster, model: ModelTransactions, transactional: TransactionalId) -> None:
        self.model = model
        self.transactional = transactional
        self.cluster = new_cluster(brokers.settings)
        self.cluster.start()
        self.offsets = GroupOffsets(self.cluster, GROUP)
        self.transactions = Transactions(self.cluster, transactional, self.offsets, GROUP, timeout=TIMEOUT)

    async def commit(self, offset: int, *values: bytes, inputs: int = 1) -> None:
        """Commits messages together with an offset of the input, or of several inputs."""
        messages = [Message(OUTPUTS, value) for value in values]
        offsets = dict.fromkeys(INPUTS[:inputs], CommittedOffset(offset, -1, ""))
        await self.transactions.commit(messages, offsets, MEMBER)

    async def until_calm(self) -> None:
        """Waits for the markers of all transactions."""
        while not self.model.is_calm:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.01)

    def received(self, api: Api) -> list[Received]:
        """The requests of a kind, in the order of their arrival."""
        return [request for broker in self.model.cluster.brokers.values() for request in broker.received(api)]

    async def close(self) -> None:
        """Ends the client, and then the brokers."""
        await self.transactions.close()
        await self.cluster.close()
        await self.model.close()


def scenario(
    test: Callable[[OneClient], Awaitable[None]], *, level: int = 2, id_kind: type[TransactionalId] = TransactionalId
) -> None:
    """Runs a test with a client that has no epoch yet, on brokers with a level of `transaction.version`."""

    async def live(network: MemoryNetwork) -> None:
        brokers = ModelCluster(network)
        brokers.create(OUTPUTS)
        model = ModelTransactions(brokers, GROUP, level=level)
        model.group.set_members(MEMBER)
        with mock.patch.object(time, "monotonic", asyncio.get_running_loop().time):
            client = OneClient(brokers, model, id_kind(ID))
            try:
                await test(client)
            finally:
                await client.close()

    run_on_network(live)
