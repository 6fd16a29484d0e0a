"""What a run over history asks of the brokers, and tells them: bounds of logs, times, the offsets of a group."""

import asyncio
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from aiokafka import errors as kafka
from aiokafka.client import CoordinationType
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest

from aioshard.errors import AuthorizationError, CommitError, CommitRefusedError, TransportError
from aioshard.kafka.administration import Administration
from aioshard.kafka.answers import by_topic, existing_topics, log_offsets, only_part
from aioshard.kafka.group_protocol import DescribeGroup
from aioshard.kafka.translate import raise_for, reason, request_error
from aioshard.ports import Committed
from aioshard.records import TopicPartition

__all__ = [
    "HAS_MEMBERS",
    "RETENTION_MS",
    "GroupDescription",
    "GroupMember",
    "HistoryBrokers",
    "LogBounds",
]

_EARLIEST, _LATEST = -2, -1
_ISOLATION = {"read_uncommitted": 0, "read_committed": 1}
RETENTION_MS = 366 * 24 * 3600 * 1000
"""How long the brokers keep what is committed without a member."""
_COMMIT_TIMEOUT = 5.0
_NEWEST, _OLDEST = 0.1, 100 * 366 * 24 * 3600.0
"""Ages of records in seconds, between which one is looked for."""
_PRECISION = 1.01

HAS_MEMBERS = {
    22: "illegal generation",
    23: "inconsistent group protocol",
    25: "unknown member id",
    27: "rebalance in progress",
    68: "the group is not empty",
    82: "fenced instance id",
    110: "fenced member epoch",
    113: "stale member epoch",
}
"""Answers to a commit without a member id which say that the group has members."""


class LogBounds(NamedTuple):
    """Where a partition's log begins and ends."""

    start: int
    stable: int
    """The last stable offset: one past what a reader of committed records may read."""
    end: int
    """One past the last record."""


class GroupMember(NamedTuple):
    """A member of a group, as the brokers describe it."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    """Of a static member."""

    def __str__(self) -> str:
        """For people."""
        static = f"static member {self.instance_id!r}" if self.instance_id else f"member {self.member_id!r}"
        return f"{static} (client {self.client_id!r} at {self.host.lstrip('/')})"


class GroupDescription(NamedTuple):
    """What the brokers say of a group. It proves nothing: a group of the newer protocol looks dead and empty."""

    state: str
    members: tuple[GroupMember, ...]


class HistoryBrokers(Administration):
    """A connection for planning a run over history, and for handing it over. Owned by one event loop.

    Example:
        ```python
        async with HistoryBrokers(settings) as brokers:
            bounds = await brokers.bounds([TopicPartition("orders", 0)])
        ```
    """

    # Topics and logs ------------------------------------------------------------------

    async def topics(self) -> frozenset[str]:
        """Every topic that we may see, without those of the brokers themselves.

        Raises:
            TransportError: The brokers did not tell.
        """

        async def ask() -> frozenset[str]:
            answer = await self._client.send(self._client.get_random_node(), MetadataRequest(None))
            return existing_topics(answer)

        return await self._patiently(ask, "tell the topics")

    async def bounds(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogBounds]:
        """The bounds of each partition's log, asked now.

        Raises:
            TransportError: They were not told, or there is no such topic.
        """
        # One after the other: no bound lies behind one that was asked for before it.
        starts = await self._offsets(dict.fromkeys(partitions, _EARLIEST), "read_uncommitted")
        stable = await self._offsets(dict.fromkeys(partitions, _LATEST), "read_committed")
        ends = await self._offsets(dict.fromkeys(partitions, _LATEST), "read_uncommitted")
        return {one: LogBounds(starts[one], stable[one], ends[one]) for one in partitions}

    async def offsets_at(
        self,
        partitions: Collection[TopicPartition],
        timestamp: float,
        isolation: Literal["read_committed", "read_uncommitted"],
    ) -> dict[TopicPartition, int | None]:
        """The first offset of each partition whose record is not older than a time; None where there is none.

        Args:
            partitions: Of which.
            timestamp: Seconds since the epoch; not before it.
            isolation: Whether records of open transactions count.

        Raises:
            TransportError: They were not told, or there is no such topic.
        """
        found = await self._offsets(dict.fromkeys(partitions, round(timestamp * 1000)), isolation)
        return {one: offset if offset >= 0 else None for one, offset in found.items()}

    async def written(self, offsets: Mapping[TopicPartition, int], now: float) -> dict[TopicPartition, float]:
        """About when the record at an offset was written, to a hundredth of its age.

        Found by halving times, in some requests for all of them: no record is fetched, so seeing the topic is enough.
        Where timestamps are not in the order of the offsets it is when the first record from there on was written.

        Args:
            offsets: Each below the end of its log.
            now: Seconds since the epoch.

        Raises:
            TransportError: The brokers did not tell.
        """
        ages = dict.fromkeys(offsets, (_NEWEST, _OLDEST))
        while wide := {one: math.sqrt(low * high) for one, (low, high) in ages.items() if high > low * _PRECISION}:
            times = {one: max(round((now - age) * 1000), 0) for one, age in wide.items()}
            found = await self._offsets(times, "read_uncommitted")
            for one, age in wide.items():
                low, high = ages[one]
                not_older = 0 <= found[one] <= offsets[one]
                ages[one] = (low, age) if not_older else (age, high)
        return {one: max(now - math.sqrt(low * high), 0.0) for one, (low, high) in ages.items()}

    async def _offsets(self, times: Mapping[TopicPartition, int], isolation: str) -> dict[TopicPartition, int]:
        ask = functools.partial(self._ask_offsets, times, _ISOLATION[isolation])
        return await self._patiently(ask, f"tell the offsets of {_named(times)}")

    async def _ask_offsets(self, times: Mapping[TopicPartition, int], isolation: int) -> dict[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        for leader, partitions in (await self._by_leader(times)).items():
            asked = by_topic({one: (one.partition, times[one]) for one in partitions})
            found |= log_offsets(await self._client.send(leader, OffsetRequest(-1, isolation, asked)), partitions)
        return found

    # The group ------------------------------------------------------------------------

    async def group_commits(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, Committed | None]:
        """What the group has committed on each of *partitions*.

        Raises:
            AuthorizationError: We may not read with the group.
            TransportError: It was not told.
        """

        async def ask() -> dict[TopicPartition, Committed | None]:
            found: dict[TopicPartition, Committed | None] = dict.fromkeys(partitions)
            if found:
                found.update(await self._stored(group_id, partitions))
            return found

        return await self._patiently(ask, f"tell what group {group_id!r} has committed", group_id)

    async def all_commits(self, group_id: str) -> dict[TopicPartition, Committed]:
        """Everything that a group has committed.

        Raises:
            AuthorizationError: We may not read with the group.
            TransportError: It was not told.
        """
        ask = functools.partial(self._stored, group_id, None)
        return await self._patiently(ask, f"tell what group {group_id!r} has committed", group_id)

    async def describe_group(self, group_id: str) -> GroupDescription:
        """What the brokers say of the group's members; for sentences, not for decisions.

        Raises:
            AuthorizationError: We may not see the group.
            TransportError: It was not told.
        """

        async def ask() -> GroupDescription:
            group = await self._described(group_id)
            members = [
                GroupMember(one["member_id"], one["client_id"], one["client_host"], one.get("group_instance_id"))
                for one in group["members"]
            ]
            return GroupDescription(group["state"], tuple(sorted(members)))

        return await self._patiently(ask, f"describe group {group_id!r}", group_id)

    async def _described(self, group_id: str) -> dict[str, Any]:
        """A group of the classic protocol, as its coordinator describes it; asked once."""
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
        answer = await self._client.send(node, DescribeGroup(group_id))
        group: dict[str, Any] = only_part(answer.to_object()["groups"], f"group {group_id!r}")
        raise_for(group["error_code"])
        return group

    async def commit_without_member(self, group_id: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit for a group that nobody is a member of: one request, once.

        Brokers refuse it when the group has a member of any kind; nothing else tells that for certain.

        What is stored is kept for a year although the group has no member. `offsets.retention.minutes` counts from when
        a group lost its last member, a week by default: a commit after that would be deleted within minutes.

        Raises:
            CommitRefusedError: The group has a member, or had one that has not expired. Nothing was stored.
            AuthorizationError: We may not read with the group, or not see a topic; the topics that we may see can
                have been stored.
            CommitError: Not acknowledged; it may have been stored, also in part. Where it is retriable, what went
                wrong passes.
        """
        try:
            async with asyncio.timeout(_COMMIT_TIMEOUT):
                refused = await self._store(group_id, offsets, RETENTION_MS)
        except (kafka.KafkaError, TimeoutError) as error:
            raise _not_stored(error, group_id) from error
        for why in refused.values():
            if (told := HAS_MEMBERS.get(getattr(why, "errno", 0))) is not None:
                raise CommitRefusedError(
                    f"the broker refused a commit of group {group_id!r} from outside: it has members ({told})"
                )
            raise _not_stored(why, group_id, refused)


def _not_stored(error: BaseException, group_id: str, refused: Collection[TopicPartition] = ()) -> TransportError:
    what = f"the offsets of group {group_id!r}"
    known = request_error(error, what, group_id)
    if isinstance(known, AuthorizationError):
        return known
    where = f" of {_named(refused)}" if refused else ""
    failed = CommitError(f"{what}{where} were not stored: {reason(error)}")
    failed.retriable = isinstance(error, TimeoutError) or bool(getattr(error, "retriable", False))
    return failed


def _named(partitions: Collection[TopicPartition]) -> str:
    first, *others = sorted(partitions)
    return f"{first} and {len(others)} other partition(s)" if others else str(first)
