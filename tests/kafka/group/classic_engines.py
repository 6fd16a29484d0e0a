"""A classic member with a clock and connections in the test's event loop, and an engine that releases what it must."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioshard.kafka.group.assignors import GroupAssignor
from aioshard.kafka.group.classic import ClassicEvent, ClassicMember, Elected
from aioshard.kafka.group.classic_messages import ClassicRequest, answer_of, message_of
from aioshard.kafka.group.member import Revoked, Troubled
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.wire.cluster import CoordinatorKind
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import new_cluster
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, settings_for

LOOK = 0.02
"""Seconds between two looks at what has no event, such as the end of an ownership."""


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
        self.cluster = new_cluster(settings_for(bootstrap))
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
        self._versions = versions or {}
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._now = asyncio.get_running_loop().time
        self.cluster.start()
        self._run_task = asyncio.create_task(self._run(), name=f"member of {group}")

    async def _run(self) -> None:
        while not self.member.ended:
            self._woken.clear()
            for request in self.member.poll(self._now()):
                self._spawn(self._send(request))
            self._take_events()
            deadline = self.member.deadline
            try:
                async with asyncio.timeout_at(deadline):
                    await self._woken.wait()
            except TimeoutError:
                continue
        self._take_events()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, request: ClassicRequest) -> None:
        message = message_of(request, self.group)
        message = message.up_to(self._versions.get(message.api, message.most))
        try:
            node = await self.cluster.coordinator(CoordinatorKind.GROUP, self.group)
            response = await self.cluster.ask(node, message, purpose=request.purpose, timeout=request.timeout)
            answer = answer_of(request, response, self.group)
        except WireError:
            self.member.failed(request, self._now())
        else:
            self.errors.setdefault(type(request).__name__, []).append(answer.error)
            self.member.answered(request, answer, self._now())
        self._woken.set()

    def _take_events(self) -> None:
        for event in self.member.take_events():
            self.events.append(event)
            if isinstance(event, Revoked) and not self.holds:
                self.release(event)
            elif isinstance(event, Elected):
                self._spawn(self._lead(event))
            elif isinstance(event, Troubled) and event.coordinator_moved:
                node = self.cluster.known_coordinator(CoordinatorKind.GROUP, self.group)
                if node is not None:
                    self.cluster.forget_coordinator(CoordinatorKind.GROUP, self.group, node)

    def release(self, event: Revoked) -> None:
        self.member.released(event.life, event.partitions, self._now())
        self._woken.set()

    async def _lead(self, election: Elected) -> None:
        numbers = await self.numbers()
        plan = self.assignors[election.protocol].assign(election, numbers, self._now())
        self.member.lead(election, plan.assignments, numbers, self._now(), rejoin_at=plan.rejoin_at)
        self._woken.set()

    async def numbers(self) -> dict[str, list[int]]:
        """Returns the partitions of the topics that the member watches."""
        described = await self.cluster.describe(self.member.watched)
        return {topic: sorted(found.partitions) for topic, found in described.topics.items()}

    async def look_at_partitions(self) -> None:
        self.member.partitions_changed(await self.numbers(), self._now())
        self._woken.set()

    async def commit(self, generation: int | None = None) -> int:
        """Commits all owned partitions; returns the error code."""
        own = self.member.ownership
        member = Member(own.epoch if generation is None else generation, own.member_id, None)
        try:
            await GroupOffsets(self.cluster, self.group).commit(
                {at: CommittedOffset(0, -1, "") for at in own.partitions}, member
            )
        except WireError as error:
            return error.code
        return 0

    def do(self, act: Callable[[ClassicMember, float], None]) -> None:
        act(self.member, self._now())
        self._woken.set()

    async def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until something is true."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - see LOOK
                await asyncio.sleep(LOOK)

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """What a record or a commit may belong to now."""
        own = self.member.ownership
        return own.partitions if self._now() < own.alive_until else frozenset()

    def saw(self, kind: type[Any]) -> list[Any]:
        """Returns the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    async def stop(self) -> None:
        """Ends like a process that was killed."""
        for task in (self._run_task, *self._tasks):
            task.cancel()
        await asyncio.gather(self._run_task, *self._tasks, return_exceptions=True)
        await self.cluster.close()

    async def close(self) -> None:
        """Leaves the group."""
        if not self._run_task.done():
            self.do(lambda member, now: member.leave(now, "the test is over"))
            async with asyncio.timeout(PATIENCE):
                await self._run_task
        await self.stop()
