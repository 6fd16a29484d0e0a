"""The transport of a group member without brokers, with a driver that only says what the test tells it."""

import asyncio
import uuid
from collections.abc import Collection, Mapping
from typing import Any, cast

import pytest

from aioshard.errors import TransportError
from aioshard.kafka.group.classic import ClassicEvent
from aioshard.kafka.group.consumer_driver import ConsumerDriver
from aioshard.kafka.group.member import Assigned, Ownership
from aioshard.kafka.group.transport import MemberTransport
from aioshard.kafka.groups import GroupMember
from aioshard.kafka.offsets import Member
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.wire.codes import error_for
from aioshard.ports import Committed, Membership
from aioshard.records import TopicPartition
from aioshard.settings import Settings

FIRST, SECOND = TopicPartition("orders", 0), TopicPartition("orders", 1)
BOTH = frozenset({FIRST, SECOND})


class Driver:
    """Stands for the thread."""

    session = 6.0
    is_alive = False
    watched = frozenset[str]()
    session_text = "session_timeout=6 s"
    last_heartbeat = None

    def __init__(self, protocol: str, *, is_incremental: bool = True) -> None:
        self.protocol = protocol
        self.is_incremental = is_incremental
        self.inherits_within = self.session if protocol == "consumer" else 0.0
        self.refused: list[int] = []
        self.now = 0.0
        self.ownership = Ownership(1, "one", 5, BOTH, 10.0)
        self.subscribed: list[Collection[str]] = []
        self.unnamed: dict[uuid.UUID, float] = {}
        self.let_go: list[tuple[int, Collection[TopicPartition]]] = []

    def clock(self) -> float:
        return self.now

    def released(self, life: int, partitions: Collection[TopicPartition]) -> None:
        self.let_go.append((life, partitions))

    def commit_refused(self, ownership: Ownership, code: int) -> None:
        assert ownership.epoch == 5
        self.refused.append(code)

    def subscribe(self, topics: Collection[str]) -> None:
        self.subscribed.append(topics)

    async def close(self, timeout: float, reason: str) -> None:
        """Nothing runs."""

    def begin_another_life(self) -> None:
        self.ownership = Ownership(2, "two", 8, BOTH, 20.0)


class Engine:
    """Records what a transport tells its engine."""

    def __init__(self) -> None:
        self.told: list[tuple[str, frozenset[TopicPartition]]] = []
        self.draining = asyncio.Event()
        self.drained = asyncio.Event()

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        self.told.append(("revoked", frozenset(partitions)))
        self.draining.set()
        await self.drained.wait()

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        self.told.append(("lost", frozenset(partitions)))

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        del membership
        self.told.append(("assigned", frozenset(partitions)))


class Alone(MemberTransport):
    """Without brokers; its group does not rebalance, unless it has *others*, or an empty list of them."""

    def __init__(
        self,
        protocol: Any = "consumer",
        *,
        is_incremental: bool = True,
        transactional: TransactionalId | None = None,
        **settings: Any,
    ) -> None:
        chosen = Settings(bootstrap_servers="127.0.0.1:1", group_protocol=protocol, **settings)
        super().__init__(chosen, "billing", transactional)
        self.driver = Driver(protocol, is_incremental=is_incremental)
        self._driver = cast("ConsumerDriver", self.driver)
        self.refusal: int | None = None
        """The error code that answers commits."""
        self.ends_meanwhile = False
        """Whether another life begins before a commit is answered."""
        self.engine = Engine()
        self._listener = self.engine
        self._lifetime.is_started = True
        self._subscription.driver = self._driver
        self.others: list[GroupMember] | None = None
        self._tasks.append(asyncio.create_task(self._pass_on_changes(), name="assignments"))

    async def _look_up_rebalance(self) -> list[GroupMember] | None:
        return self.others

    async def _send_commit(self, offsets: Mapping[TopicPartition, Committed], member: Member) -> None:
        if self.refusal is None:
            raise AssertionError(f"{member} commits {offsets}")
        if self.ends_meanwhile:
            self.driver.begin_another_life()
        raise error_for(self.refusal)

    async def tell(self, *events: ClassicEvent) -> None:
        for event in events:
            self._on_event(event)
        for _ in range(5):
            await asyncio.sleep(0)

    async def assign(self) -> Membership:
        own = self.driver.ownership
        await self.tell(Assigned(own.life, own.partitions, own))
        assert self.engine.told[-1] == ("assigned", own.partitions)
        return self.membership()

    async def failure(self) -> TransportError:
        with pytest.raises(TransportError) as raised:
            await self.poll(lambda _: pytest.fail("nothing is asked for"), 0.0)
        return raised.value
