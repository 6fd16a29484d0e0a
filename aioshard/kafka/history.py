"""Broker requests of a backfill: log bounds, offsets by time, and a group's commits."""

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
"""Milliseconds that brokers keep offsets committed without a member."""
_COMMIT_TIMEOUT = 5.0
_NEWEST, _OLDEST = 0.1, 100 * 366 * 24 * 3600.0
"""Bounds, in seconds, for the search by a record's age."""
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
"""Errors for a commit without a member id that mean the group has members."""


class LogBounds(NamedTuple):
    """The bounds of a partition's log."""

    start: int
    stable: int
    """The last stable offset: the end for readers of committed records."""
    end: int
    """The offset after the last record."""


class GroupMember(NamedTuple):
    """A member of a group, as the brokers describe it."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    """None for a dynamic member."""

    def __str__(self) -> str:
        """Describe the member for an error message."""
        static = f"static member {self.instance_id!r}" if self.instance_id else f"member {self.member_id!r}"
        return f"{static} (client {self.client_id!r} at {self.host.lstrip('/')})"


class GroupDescription(NamedTuple):
    """The brokers' description of a group. Do not rely on it: a KIP-848 group looks dead and empty."""

    state: str
    members: tuple[GroupMember, ...]


class HistoryBrokers(Administration):
    """A connection for planning a backfill and handing it over to a group. Owned by one event loop.

    Example:
        ```python
        async with HistoryBrokers(settings) as brokers:
            bounds = await brokers.bounds([TopicPartition("orders", 0)])
        ```
    """

    # Topics and logs ------------------------------------------------------------------

    async def topics(self) -> frozenset[str]:
        """Return every topic that this user may see, without internal topics.

        Raises:
            TransportError: The brokers did not return them.
        """

        async def ask() -> frozenset[str]:
            answer = await self._client.send(self._client.get_random_node(), MetadataRequest(None))
            return existing_topics(answer)

        return await self._patiently(ask, "tell the topics")

    async def bounds(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogBounds]:
        """Fetch the current bounds of each partition's log.

        Raises:
            TransportError: The brokers did not return them, or a topic does not exist.
        """
        # In this order, so that each bound is at or after the ones requested before it.
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
        """Return the first offset of each partition whose record is not older than a time; None if there is none.

        Args:
            partitions: The partitions to search.
            timestamp: Seconds since the epoch; not negative.
            isolation: Whether records of open transactions count.

        Raises:
            TransportError: The brokers did not return them, or a topic does not exist.
        """
        found = await self._offsets(dict.fromkeys(partitions, round(timestamp * 1000)), isolation)
        return {one: offset if offset >= 0 else None for one, offset in found.items()}

    async def written(self, offsets: Mapping[TopicPartition, int], now: float) -> dict[TopicPartition, float]:
        """Estimate when the record at each offset was written, to within a hundredth of its age.

        A binary search over times, with all partitions in each round. It fetches no records, so permission
        to describe the topic is enough. If timestamps are not in offset order, the result is the time of the first
        record at or after the offset.

        Args:
            offsets: Offsets below the ends of their logs.
            now: Seconds since the epoch.

        Raises:
            TransportError: The brokers did not answer.
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
        """Return the group's committed offset of each of *partitions*, or None.

        Raises:
            AuthorizationError: This user may not read with the group.
            TransportError: The brokers did not return them.
        """

        async def ask() -> dict[TopicPartition, Committed | None]:
            found: dict[TopicPartition, Committed | None] = dict.fromkeys(partitions)
            if found:
                found.update(await self._stored(group_id, partitions))
            return found

        return await self._patiently(ask, f"tell what group {group_id!r} has committed", group_id)

    async def all_commits(self, group_id: str) -> dict[TopicPartition, Committed]:
        """Return all committed offsets of a group.

        Raises:
            AuthorizationError: This user may not read with the group.
            TransportError: The brokers did not return them.
        """
        ask = functools.partial(self._stored, group_id, None)
        return await self._patiently(ask, f"tell what group {group_id!r} has committed", group_id)

    async def describe_group(self, group_id: str) -> GroupDescription:
        """Describe a group and its members; for messages, not for decisions.

        Raises:
            AuthorizationError: This user may not see the group.
            TransportError: The brokers did not describe it.
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
        """Fetch the coordinator's description of a classic group. Sends one request."""
        node = await self._client.coordinator_lookup(CoordinationType.GROUP, group_id)
        answer = await self._client.send(node, DescribeGroup(group_id))
        group: dict[str, Any] = only_part(answer.to_object()["groups"], f"group {group_id!r}")
        raise_for(group["error_code"])
        return group

    async def commit_without_member(self, group_id: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit for a group that has no members; sends one request, without retries.

        Brokers refuse it if the group has a member of any kind; no other check is reliable.

        Brokers keep the offsets for a year although the group has no members. Otherwise `offsets.retention.minutes`,
        a week by default, would count from the time the group lost its last member: a commit after that week would
        be deleted within minutes.

        Raises:
            CommitRefusedError: The group has a member, or a dead one that has not expired. Nothing was stored.
            AuthorizationError: This user may not read with the group or may not see a topic; offsets of other topics
                may have been stored.
            CommitError: The commit was not acknowledged; all or part of it may have been stored. If the error is
                retriable, the cause is transient.
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
