"""A client's view of the offsets of a group, which a model coordinator keeps. With virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aioshard.kafka.offsets import NO_MEMBER, GroupOffsets, Member
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import FIND_COORDINATOR
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import connect
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received, hold
from tests.support.model_cluster import ModelCluster
from tests.support.model_group import ModelGroup

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)


class Group:
    """A group, in a cluster whose first partition node 1 leads, and the other node 2.

    Attributes:
        model: The brokers.
        coordinator: What they keep of the group.
        cluster: The client's view of them.
        offsets: The offsets of the group.
    """

    def __init__(self, model: ModelCluster, coordinator: ModelGroup, cluster: Cluster) -> None:
        self.model = model
        self.coordinator = coordinator
        self.cluster = cluster
        self.offsets = GroupOffsets(cluster, "billing")

    @property
    def lookups(self) -> int:
        """How often the coordinator was looked up."""
        return len(self.coordinator.received(FIND_COORDINATOR))

    def hold(self, api: Api, node: int = 1) -> list[Received]:
        """Collect the next requests of a kind at a broker."""
        held: list[Received] = []
        self.model.brokers[node].on(api, hold(held))
        return held

    async def commit(self, offsets: Mapping[TopicPartition, CommittedOffset], member: Member = NO_MEMBER) -> None:
        """Commit offsets; raise the first error, if there is one."""
        for error in (await self.offsets.commit(offsets, member)).values():
            raise error

    @property
    def sent(self) -> list[int]:
        """The offset of the first partition in each commit that the brokers have handled."""
        return [offsets[ONE].offset for _, offsets in self.coordinator.commits]


def scenario(
    test: Callable[[Group], Awaitable[None]], *, versions: Mapping[Api, tuple[int, int]] | None = None
) -> None:
    """Run a test; the brokers speak only these versions."""

    async def live(network: MemoryNetwork) -> None:
        model = ModelCluster(network, 3)
        model.create("orders", 2)
        coordinator = ModelGroup(model, versions)
        cluster = await connect(model.settings, ["orders"])
        try:
            async with asyncio.timeout(1_000):
                await test(Group(model, coordinator, cluster))
        finally:
            await cluster.close()
            await model.close()

    run_on_network(live)
