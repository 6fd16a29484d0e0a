"""The engine's side of a classic member, as a test drives it: it releases what it must, and assigns as the leader."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioshard.kafka.group.assignors import GroupAssignor
from aioshard.kafka.group.classic import ClassicEvent, ClassicMember, Elected
from aioshard.kafka.group.classic_driver import ClassicDriver, ClassicProtocol
from aioshard.kafka.group.classic_messages import ClassicAnswer, ClassicRequest
from aioshard.kafka.group.member import Revoked
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.wire.notation import Api, Request
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import new_cluster
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, settings_for

LOOK = 0.02
"""Seconds between two looks at what has no event, such as the end of an ownership."""


class Recorded(ClassicProtocol):
    """Uses older versions of requests, and records the error codes of the answers by kind of request."""

    def __init__(
        self, group: str, member: ClassicMember, versions: Mapping[Api, int], errors: dict[str, list[int]]
    ) -> None:
        super().__init__(group, member)
        self._versions = versions
        self._errors = errors

    def message(self, request: ClassicRequest) -> Request:
        message = super().message(request)
        return message.up_to(self._versions.get(message.api, message.most))

    def answer(self, request: ClassicRequest, response: Any) -> ClassicAnswer:
        answer = super().answer(request, response)
        self._errors.setdefault(type(request).__name__, []).append(answer.error)
        return answer


class ClassicEngine:
    """A member of a group.

    Attributes:
        events: All that arrived.
        errors: The error codes of the answers, by kind of request.
        holds: Whether it keeps revoked partitions.
    """

    def __init__(
        self,
        bootstrap: str,
        group: str,
        topic: str,
        assignors: Sequence[str] = ("cooperative-sticky",),
        *,
        session_timeout: float = 6.0,
        rebalance_timeout: float = 20.0,
        instance_id: str | None = None,
        versions: Mapping[Api, int] | None = None,
    ) -> None:
        self.group = group
        self.topic = topic
        self.events: list[ClassicEvent] = []
        self.errors: dict[str, list[int]] = {}
        self.holds = False
        self.assignors = {name: GroupAssignor(name, instance_id=instance_id) for name in assignors}
        self.member = ClassicMember(
            [topic],
            list(self.assignors.values()),
            random.SystemRandom(),
            session_timeout=session_timeout,
            heartbeat_interval=0.2,
            rebalance_timeout=rebalance_timeout,
            instance_id=instance_id,
        )
        settings = settings_for(bootstrap)
        self.cluster = new_cluster(settings)
        self.cluster.start()
        self.driver = ClassicDriver(
            Recorded(group, self.member, versions or {}, self.errors),
            lambda: new_cluster(settings),
            self._handle,
            rebalance_timeout=rebalance_timeout,
        )
        self._elections = asyncio.Queue[Elected]()
        self._leading = asyncio.create_task(self._lead(), name=f"leader of {group}")
        self.driver.start()

    def _handle(self, event: ClassicEvent) -> None:
        self.events.append(event)
        if isinstance(event, Revoked) and not self.holds:
            self.release(event)
        elif isinstance(event, Elected):
            self._elections.put_nowait(event)

    def release(self, event: Revoked) -> None:
        self.driver.released(event.life, event.partitions)

    async def _lead(self) -> None:
        while True:
            election = await self._elections.get()
            numbers = await self.numbers()
            plan = self.assignors[election.protocol].assign(election, numbers, self.driver.clock())
            self.driver.lead(election, plan.assignments, numbers, rejoin_at=plan.rejoin_at)

    async def numbers(self) -> dict[str, list[int]]:
        """Returns the partitions of the topics that the member watches."""
        described = await self.cluster.describe(self.driver.watched)
        return {topic: sorted(found.partitions) for topic, found in described.topics.items()}

    async def look_at_partitions(self) -> None:
        self.driver.partitions_changed(await self.numbers())

    async def commit(self, generation: int | None = None) -> int:
        """Commits all owned partitions; returns the error code."""
        own = self.driver.ownership
        member = Member(own.epoch if generation is None else generation, own.member_id, None)
        offsets = GroupOffsets(self.cluster, self.group)
        errors = await offsets.commit({at: CommittedOffset(0, -1, "") for at in own.partitions}, member)
        return next((error.code for error in errors.values()), 0)

    async def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until something is true."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - see LOOK
                await asyncio.sleep(LOOK)

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """The partitions whose records and commits are accepted now."""
        own = self.driver.ownership
        return own.partitions if self.driver.clock() < own.alive_until else frozenset()

    def saw(self, kind: type[Any]) -> list[Any]:
        """Returns the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    async def close(self) -> None:
        """Leaves the group; a static member only falls silent."""
        await self.driver.close(5.0, "the test is over")
        self._leading.cancel()
        await asyncio.wait([self._leading])
        await self.cluster.close()
