"""Offsets: what a group has committed, and where logs begin and end. The one place that asks for them.

Members of a group, manual assignment, side topics, backfills and commands use it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from aioshard.kafka.wire.cluster import QUICK_TIMEOUT, Cluster, CoordinatorKind
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import (
    BrokerError,
    ConnectionLostError,
    RequestTimedOutError,
    UnsupportedVersionError,
    WireError,
)
from aioshard.kafka.wire.pool import Purpose
from aioshard.kafka.wire.requests import LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH, OFFSET_FOR_LEADER_EPOCH
from aioshard.kafka.wire.responses import (
    Answers,
    CommittedOffset,
    EpochEnd,
    committed_offsets,
    listed_offsets,
    refused_offsets,
)
from aioshard.kafka.wire.responses import epoch_ends as read_epoch_ends
from aioshard.ports import LogRange
from aioshard.records import TopicPartition

logger = logging.getLogger("aioshard.kafka.offsets")

T = TypeVar("T")

START: Final = -2
END: Final = -1
LOCAL_START: Final = -4
"""Bounds of a log, to ask for in place of a time. The last is the first offset that the broker has on its own disk:
earlier ones may be in tiered storage (KIP-405). For a broker without tiered storage it is a time that every record is
after."""
READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
_CONSUMER: Final = -1
"""The replica number of a client."""
_STABLE_TIMEOUT = 30.0
"""Seconds for a coordinator to return offsets: it waits until earlier commits are replicated."""
_COMMIT_TIMEOUT = 30.0
"""Seconds after which an unanswered commit ends its connection. The callers have shorter deadlines of their own."""
_RETENTION_MS = 10 * 365 * 24 * 3600 * 1000
"""Milliseconds that brokers keep offsets committed without a member. Otherwise `offsets.retention.minutes`, a week by
default, would count from the time the group lost its last member: a group with manual assignment has none."""
_LAST_WITH_RETENTION = 4
"""The last version of OffsetCommit that says how long to keep offsets."""
_LAST_BY_NAME = 9
"""The last version of OffsetCommit and OffsetFetch that names topics, not their ids."""
_NO_LEADER = 5
_AWAY = frozenset({7, 15, 16})
"""Error codes of a broker that does not coordinate the group, or cannot do so now."""


class Member(NamedTuple):
    """As whom a commit is made."""

    generation: int
    """The generation, or the member epoch under KIP-848."""
    member_id: str
    instance_id: str | None = None


NO_MEMBER: Final = Member(-1, "")
"""A commit without a member; brokers accept it while the group has none."""


class GroupOffsets:
    """The committed offsets of one group.

    Invariants:
        * A commit is sent once, and never while the one before it is unanswered on a live connection: it can be
          overtaken only by one whose connection was lost.
        * `committed` returns offsets after the commits that the coordinator has received are replicated, when no open
          transaction can change them any more, unless *stable* is false. It does not wait behind a commit that is not
          answered.
    """

    def __init__(self, cluster: Cluster, group_id: str, patience: float = _STABLE_TIMEOUT) -> None:
        """Serve one group.

        Args:
            cluster: The cluster, started.
            group_id: The group.
            patience: Seconds for a coordinator to return offsets; another broker may coordinate the group by then.
        """
        self._cluster = cluster
        self._group_id = group_id
        self._patience = patience
        self._turn = asyncio.Lock()
        """Held by the commit that is sent next: it is fair, so they are sent in the order of the calls."""
        self._unanswered: asyncio.Task[Mapping[TopicPartition, WireError]] | None = None
        """The commit in flight; it outlives a caller that gave up, because its answer tells what is stored."""

    # Commits --------------------------------------------------------------------------

    async def commit(
        self, offsets: Mapping[TopicPartition, CommittedOffset], member: Member = NO_MEMBER
    ) -> Mapping[TopicPartition, WireError]:
        """Send one commit and wait for its response. Has no deadline; cancelling it does not take back what was sent.

        Returns:
            The error of each partition that was not acknowledged, those of single topics last.

        Raises:
            WireError: The coordinator did not answer.
        """
        async with self._turn:
            while self._unanswered is not None:
                await asyncio.wait([self._unanswered])
            # A commit whose caller gives up during this look-up must not be sent later.
            node = await self._coordinator()
            commit = asyncio.create_task(
                self._send_commit(node, offsets, member), name=f"commit of group {self._group_id}"
            )
            commit.add_done_callback(self._end_commit)
            self._unanswered = commit
        return await asyncio.shield(commit)

    def _end_commit(self, commit: "asyncio.Task[Mapping[TopicPartition, WireError]]") -> None:
        self._unanswered = None
        if not commit.cancelled():
            commit.exception()  # raised in the caller; one that gave up is not an error

    async def _send_commit(
        self, node: int, offsets: Mapping[TopicPartition, CommittedOffset], member: Member
    ) -> Mapping[TopicPartition, WireError]:
        request = OFFSET_COMMIT(
            group=self._group_id,
            generation=member.generation,
            member=member.member_id,
            instance=member.instance_id,
            retention_ms=_RETENTION_MS,
            topics=_by_topic(
                offsets,
                lambda at: {
                    "partition": at.partition,
                    "offset": offsets[at].offset,
                    "epoch": offsets[at].epoch,
                    "metadata": offsets[at].metadata,
                },
            ),
        ).up_to(_LAST_WITH_RETENTION if member == NO_MEMBER else _LAST_BY_NAME)
        response = await self._ask_coordinator(node, request, Purpose.COMMIT, timeout=_COMMIT_TIMEOUT)
        refused = refused_offsets(response, offsets)
        if any(error.code in _AWAY for error in refused.values()):
            self._forget_coordinator(node)
        return refused

    # Queries --------------------------------------------------------------------------

    async def committed(
        self, partitions: Collection[TopicPartition], *, stable: bool = True
    ) -> dict[TopicPartition, CommittedOffset]:
        """Fetch committed offsets, with one request; leave out partitions without one.

        Args:
            partitions: The partitions.
            stable: Whether an offset that an open transaction may change is an error; otherwise it is as before.

        Raises:
            WireError: The coordinator did not answer, or a partition has an error. Code 88 means that a transaction is
                open that may change the offset.
        """
        return await self._fetch(partitions, stable=stable)

    async def all_committed(self) -> dict[TopicPartition, CommittedOffset]:
        """Fetch all committed offsets of the group, to be shown: open transactions may still change them.

        Raises:
            WireError: The coordinator did not answer, or a partition has an error.
        """
        return await self._fetch(None, stable=False)

    async def _fetch(
        self, partitions: Collection[TopicPartition] | None, *, stable: bool
    ) -> dict[TopicPartition, CommittedOffset]:
        node = await self._coordinator()
        topics = None
        if partitions is not None:
            topics = [
                {"topic": part["topic"], "partitions": [at["partition"] for at in part["partitions"]]}
                for part in _by_topic(partitions, lambda at: {"partition": at.partition})
            ]
        request = OFFSET_FETCH(
            group=self._group_id,
            topics=topics,
            groups=[{"group": self._group_id, "member": None, "epoch": -1, "topics": topics}],
            stable=stable,
        ).up_to(_LAST_BY_NAME)
        # A commit without an answer must not keep us from leaving a coordinator that hangs.
        response = await self._ask_coordinator(node, request, Purpose.GROUP, timeout=self._patience)
        try:
            return committed_offsets(response, self._group_id, partitions)
        except WireError as error:
            if error.code in _AWAY:
                self._forget_coordinator(node)
            raise

    # The coordinator ------------------------------------------------------------------

    async def _coordinator(self) -> int:
        return await self._cluster.coordinator(CoordinatorKind.GROUP, self._group_id)

    async def _ask_coordinator(self, node: int, request: Any, purpose: Purpose, *, timeout: float) -> Any:
        try:
            return await self._cluster.ask(node, request, purpose=purpose, timeout=timeout)
        except (ConnectionLostError, RequestTimedOutError):
            self._forget_coordinator(node)
            raise

    def _forget_coordinator(self, node: int) -> None:
        self._cluster.forget_coordinator(CoordinatorKind.GROUP, self._group_id, node)


# Logs -------------------------------------------------------------------------------------


async def log_ranges(
    cluster: Cluster, partitions: Collection[TopicPartition], isolation: int, patience: float
) -> dict[TopicPartition, LogRange]:
    """Fetch the bounds of logs; partitions whose leader does not answer are left out.

    Takes at most twice *patience* seconds: one metadata look-up, then requests to all leaders concurrently.

    Args:
        cluster: The cluster, started.
        partitions: The partitions.
        isolation: `READ_COMMITTED` or `READ_UNCOMMITTED`; decides which end counts.
        patience: Seconds to wait for the brokers.

    Raises:
        WireError: A broker refused, for good.
    """
    await _try_to_look_up_leaders(cluster, partitions, patience)

    async def ranges_at(leader: int, led: Sequence[TopicPartition]) -> Answers[LogRange]:
        try:
            async with asyncio.timeout(patience):
                return await _ranges_at(cluster, leader, led, isolation)
        except TimeoutError:
            error = RequestTimedOutError(f"broker {leader} did not answer within {patience:g} s")
            return Answers({}, dict.fromkeys(led, error))

    return _without_transient(await _ask_leaders(cluster, partitions, ranges_at))


async def try_log_ranges(cluster: Cluster, partitions: Collection[TopicPartition], isolation: int) -> Answers[LogRange]:
    """Fetch the bounds of logs, and the error of each partition whose bounds are unknown now.

    Raises:
        WireError: The leaders are unknown, because no broker answered.
    """
    await _look_up_leaders(cluster, partitions)

    async def ranges_at(leader: int, led: Sequence[TopicPartition]) -> Answers[LogRange]:
        return await _ranges_at(cluster, leader, led, isolation)

    return await _ask_leaders(cluster, partitions, ranges_at)


async def _ranges_at(
    cluster: Cluster, leader: int, partitions: Sequence[TopicPartition], isolation: int
) -> Answers[LogRange]:
    # In this order, so that no end is older than its start. The end is asked for last: records that are written between
    # two requests would otherwise look like those of an open transaction.
    starts = await _offsets_at(cluster, leader, dict.fromkeys(partitions, START), isolation)
    newest: Answers[int] = Answers({}, {})
    if isolation == READ_COMMITTED:
        newest = await _offsets_at(cluster, leader, dict.fromkeys(partitions, END), READ_UNCOMMITTED)
    ends = await _offsets_at(cluster, leader, dict.fromkeys(partitions, END), isolation)
    errors = {**ends.errors, **newest.errors, **starts.errors}
    ranges = {}
    for at in partitions:
        if at not in errors:
            end = ends.values[at]
            ranges[at] = LogRange(starts.values[at], end, max(newest.values.get(at, end), end))
    return Answers(ranges, errors)


async def offsets_at(
    cluster: Cluster, times: Mapping[TopicPartition, int], isolation: int
) -> dict[TopicPartition, int]:
    """Fetch offsets by time, in milliseconds since the epoch, or the bounds of logs; -1 if none is as recent.

    One attempt: partitions without a leader, and those with an error that passes, are left out.

    Raises:
        WireError: A broker refused, or no broker knows the leaders.
    """
    return _without_transient(await try_offsets_at(cluster, times, isolation))


async def try_offsets_at(cluster: Cluster, times: Mapping[TopicPartition, int], isolation: int) -> Answers[int]:
    """Fetch offsets like `offsets_at`, and the error of each partition whose offset is unknown now.

    Raises:
        WireError: The leaders are unknown, because no broker answered.
    """
    await _look_up_leaders(cluster, times)

    async def offsets(leader: int, led: Sequence[TopicPartition]) -> Answers[int]:
        return await _offsets_at(cluster, leader, {partition: times[partition] for partition in led}, isolation)

    return await _ask_leaders(cluster, times, offsets)


async def _offsets_at(
    cluster: Cluster, leader: int, times: Mapping[TopicPartition, int], isolation: int
) -> Answers[int]:
    request = LIST_OFFSETS(
        replica=_CONSUMER,
        isolation=isolation,
        topics=_by_topic(
            times,
            lambda at: {
                "partition": at.partition,
                "leader_epoch": _leader_epoch(cluster, at),
                "timestamp": times[at],
            },
        ),
        timeout_ms=round(QUICK_TIMEOUT * 1000),
    )
    response = await cluster.ask(leader, request, timeout=QUICK_TIMEOUT)
    answers = listed_offsets(response, times)
    return Answers({at: listed.offset for at, listed in answers.values.items()}, answers.errors)


async def epoch_ends(
    cluster: Cluster, epochs: Mapping[TopicPartition, int], patience: float
) -> dict[TopicPartition, EpochEnd | None]:
    """Fetch where the logs leave leader epochs; partitions whose leader does not answer are left out.

    Takes at most twice *patience* seconds: one metadata look-up, then requests to all leaders concurrently.

    Args:
        cluster: The cluster, started.
        epochs: A leader epoch for each partition.
        patience: Seconds to wait for the brokers.

    Returns:
        None for a log whose leader does not know: it has no history of that epoch, or is too old.

    Raises:
        WireError: A broker refused, for good.
    """
    await _try_to_look_up_leaders(cluster, epochs, patience)

    async def ends_at(leader: int, led: Sequence[TopicPartition]) -> Answers[EpochEnd | None]:
        request = OFFSET_FOR_LEADER_EPOCH(
            replica=_CONSUMER,
            topics=_by_topic(
                led,
                lambda at: {
                    "partition": at.partition,
                    "leader_epoch": _leader_epoch(cluster, at),
                    "epoch": epochs[at],
                },
            ),
        )
        try:
            return read_epoch_ends(await cluster.ask(leader, request, timeout=patience), led)
        except UnsupportedVersionError:
            return Answers(dict.fromkeys(led), {})

    return _without_transient(await _ask_leaders(cluster, epochs, ends_at))


# Leaders ----------------------------------------------------------------------------------


async def _look_up_leaders(cluster: Cluster, partitions: Iterable[TopicPartition]) -> None:
    """Look up the topics of partitions without a known leader."""
    unknown = {partition.topic for partition in partitions if cluster.metadata.leader(partition) is None}
    if unknown:
        await cluster.look_up(unknown)


async def _try_to_look_up_leaders(cluster: Cluster, partitions: Iterable[TopicPartition], patience: float) -> None:
    """Look up leaders for *patience* seconds; partitions whose leader stays unknown get no answer."""
    try:
        async with asyncio.timeout(patience):
            await _look_up_leaders(cluster, partitions)
    except (TimeoutError, WireError) as error:
        logger.debug("the leaders of some partitions are unknown: %s", error)


async def _ask_leaders(
    cluster: Cluster,
    partitions: Collection[TopicPartition],
    ask: Callable[[int, Sequence[TopicPartition]], Awaitable[Answers[T]]],
) -> Answers[T]:
    """Ask the leaders of partitions concurrently; a leader that does not answer is an error of its partitions only."""

    async def ask_one(leader: int, led: Sequence[TopicPartition]) -> Answers[T]:
        try:
            return await ask(leader, led)
        except WireError as error:
            return Answers({}, dict.fromkeys(led, error))

    led_by = _by_leader(cluster, partitions)
    values: dict[TopicPartition, T] = {}
    errors: dict[TopicPartition, WireError] = {}
    for answers in await asyncio.gather(*(ask_one(leader, led) for leader, led in led_by.items())):
        values |= answers.values
        errors |= answers.errors
    for partition in partitions:
        if partition not in values and partition not in errors:
            errors[partition] = _no_leader(partition)
    if errors:
        cluster.request_refresh()
    return Answers(values, errors)


def _no_leader(partition: TopicPartition) -> BrokerError:
    return error_for(_NO_LEADER, message=f"no broker is the leader of {partition} now")


def _without_transient(answers: Answers[T]) -> dict[TopicPartition, T]:
    """Return what is known; raise the first error that does not pass."""
    for error in answers.errors.values():
        if not error.retriable:
            raise error
    return answers.values


def _leader_epoch(cluster: Cluster, partition: TopicPartition) -> int:
    leader = cluster.metadata.leader(partition)
    return -1 if leader is None else leader.epoch


def _by_leader(cluster: Cluster, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
    """Group partitions by the broker that leads them; leave out those without a leader."""
    led: dict[int, list[TopicPartition]] = {}
    for partition in partitions:
        leader = cluster.metadata.leader(partition)
        if leader is not None:
            led.setdefault(leader.node, []).append(partition)
    return led


def _by_topic(partitions: Iterable[TopicPartition], describe: Any) -> list[dict[str, Any]]:
    """Arrange partitions as requests do: by topic, each described by a function."""
    topics: dict[str, list[Any]] = {}
    for partition in partitions:
        topics.setdefault(partition.topic, []).append(describe(partition))
    return [{"topic": topic, "partitions": described} for topic, described in topics.items()]
