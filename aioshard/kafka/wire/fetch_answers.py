"""Decide what a broker's answer to a fetch means for one partition.

Nothing here waits, sends or keeps a position: each function takes an answer and returns a decision.
"""

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from aioshard.errors import TransportError
from aioshard.kafka.errors import Cause, corrupt_batch, fetch_error
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.epochs import UNKNOWN, EpochStart, Position, parting
from aioshard.kafka.wire.errors import BrokerError
from aioshard.kafka.wire.fetch_session import PartitionRequest
from aioshard.records import TopicPartition

_OUT_OF_RANGE: Final = 1
_TOPIC_DENIED: Final = 29
_OLD_LEADER_EPOCH: Final = 74
_DAMAGED: Final = {
    2: "the broker found it corrupt, CORRUPT_MESSAGE",
    76: "the broker cannot send its codec, UNSUPPORTED_COMPRESSION_TYPE",
}
_MOVED: Final = frozenset({3, 5, 6, 9, 56, _OLD_LEADER_EPOCH, 100, 103})
"""The topic is unknown, the leader or the replica has moved, its disk has failed, we know an older leader, or the topic
has another id."""
_NAMES_LEADER: Final = frozenset({6, _OLD_LEADER_EPOCH})
"""The errors with which brokers name the new leader (KIP-951)."""

STANDSTILL: Final = 3
"""Answers in a row that have data and do not move the position, until this is reported."""


# Answers that are late --------------------------------------------------------------------


class InFlight(NamedTuple):
    """The state of a partition when a request about it was sent."""

    ownership: int
    """Counts the assignments and the seeks of the partition."""
    offset: int
    fetched_epoch: int
    leader_epoch: int
    session: int
    """Counts the fetch sessions of the partition: with another broker, or opened again."""


def belongs(sent: InFlight, now: InFlight | None) -> bool:
    """Whether the answer to a request may still be used: everything is as it was when the request was sent.

    The offset alone is not enough: after seeks to another offset and back, or a revocation and a new assignment, the
    answer to an older request would come in addition to that of the newer one.

    Args:
        sent: The partition when the request was sent.
        now: The partition now; None if it is not ours any more.
    """
    return sent == now


# Decisions --------------------------------------------------------------------------------


class LeaderHint(NamedTuple):
    """The new leader of a partition, as a broker names it together with an error."""

    node: int
    epoch: int


class Step(Enum):
    """The step before a partition is fetched again from the same position."""

    METADATA = "refresh the metadata; leave the partition out of fetches meanwhile"
    WAIT = "wait, longer each time"
    LEADER = "nothing: ask the leader immediately"
    WITHOUT_EPOCH = "nothing: ask once more immediately, without the epoch of the last record"


class Deliver(NamedTuple):
    """The partition was read: its records, possibly none, may be delivered."""

    records: bytes
    aborted: Sequence[Any]
    """Aborted transactions in the records: producer id and first offset."""
    high_watermark: int | None
    """The end of the replicated log; None if unknown."""
    stable_end: int | None
    """The last stable offset, the end for read committed; None if unknown."""
    log_start: int | None
    from_leader: bool
    """Whether the leader answered. The ends that a follower knows may be behind."""


class Redirect(NamedTuple):
    """Another replica is nearer (KIP-392): fetch there immediately."""

    replica: int


class Diverged(NamedTuple):
    """The log may differ from the one that was read: continue at another position."""

    position: Position
    """Not after the position that was asked about; if it has the same offset, then an older epoch."""
    lost_until: int
    """One past the last offset that the cluster has lost; the first one is that of the new position. The same offset
    if no loss is proven: compaction may have removed the records of an epoch."""
    proven: bool
    """Whether the new position is certain. Otherwise it has an older epoch, and must be validated too."""


class Retry(NamedTuple):
    """Fetch from the same position again, after a step."""

    step: Step
    code: int
    leader: LeaderHint | None = None
    """The leader to ask immediately, while the metadata is refreshed."""


class OutOfRange(NamedTuple):
    """The offset is not in the log of the leader: a policy decides where to continue."""

    offset: int


class Faulted(NamedTuple):
    """The partition cannot be read; its position stays."""

    error: TransportError
    code: int


FetchDecision = Deliver | Redirect | Diverged | Retry | OutOfRange | Faulted
"""Each but the first two ends the use of a nearest replica: the next fetch goes to the leader."""


# Fetch ------------------------------------------------------------------------------------


def decide_fetch(
    topic_partition: TopicPartition,
    part: Any,
    request: PartitionRequest,
    *,
    node: int,
    leader: int,
    brokers: Collection[int],
    read: Iterable[EpochStart] = (),
) -> FetchDecision:
    """Decide what the part of a Fetch response about a partition means.

    Args:
        topic_partition: The partition.
        part: Its part of the decoded response.
        request: Its part of the request.
        node: The broker that answered.
        leader: The leader of the partition, to our knowledge.
        brokers: The brokers that we know.
        read: The leader epochs of the records that were read.
    """
    at_leader = node == leader
    if part.error == 0:
        return _decide_success(part, request, node=node, at_leader=at_leader, brokers=brokers, read=read)
    if part.error == _OUT_OF_RANGE:
        return _decide_out_of_range(request, at_leader=at_leader)
    if part.error in _DAMAGED:
        return Faulted(corrupt_batch(_DAMAGED[part.error], topic_partition, request.offset), part.error)
    hint = _leader_hint(part, request.leader_epoch) if part.error in _NAMES_LEADER else None
    return _decide_error(topic_partition, part.error, request.offset, hint)


def _decide_out_of_range(request: PartitionRequest, *, at_leader: bool) -> Retry | OutOfRange:
    if not at_leader:
        return Retry(Step.LEADER, _OUT_OF_RANGE)  # a follower may be behind
    if request.fetched_epoch != UNKNOWN:
        return Retry(Step.WITHOUT_EPOCH, _OUT_OF_RANGE)  # the leader's history of epochs may not reach back that far
    return OutOfRange(request.offset)


def _decide_success(
    part: Any,
    request: PartitionRequest,
    *,
    node: int,
    at_leader: bool,
    brokers: Collection[int],
    read: Iterable[EpochStart],
) -> FetchDecision:
    # 1. The broker compared the epoch of our last record with its log, and sends no records.
    if part.diverging is not None and request.fetched_epoch != UNKNOWN:
        if not at_leader:
            return Retry(Step.LEADER, 0)  # a follower that is behind reports the same
        position = Position(request.offset, request.fetched_epoch)
        diverged = _compare(position, part.diverging.epoch, part.diverging.end, read)
        if diverged is None or diverged.position == position:
            return Retry(Step.WITHOUT_EPOCH, 0)  # it would come again and again
        return diverged
    # 2. The leader names a nearer replica, and sends no records.
    if part.preferred is not None and part.preferred >= 0 and part.preferred != node:
        # In a fetch of an unknown broker, the partition would be in nobody's.
        return Redirect(part.preferred) if part.preferred in brokers else Retry(Step.METADATA, 0)
    # 3. Records, or none that are new.
    return Deliver(
        part.records or b"",
        part.aborted or (),
        _known(part.high_watermark),
        _known(part.stable_end),
        _known(part.log_start),
        at_leader,
    )


def _compare(position: Position, epoch: int, end: int, read: Iterable[EpochStart]) -> Diverged | None:
    """Compare a position with the end of its epoch, or of the largest epoch below, in the leader's log.

    Returns:
        Where to continue, which may be the same position; None if the leader does not know.
    """
    if epoch <= UNKNOWN or end <= UNKNOWN or epoch > position.epoch:
        return None
    target = parting(position, epoch, end, read)
    lost_until = position.offset if end < position.offset else target.offset
    return Diverged(target, lost_until, epoch == position.epoch)


def _decide_error(
    topic_partition: TopicPartition, code: int, offset: int, leader: LeaderHint | None = None
) -> Retry | Faulted:
    if code == _TOPIC_DENIED:
        return Faulted(fetch_error(Cause(code, "TOPIC_AUTHORIZATION_FAILED"), topic_partition, offset), code)
    if code in _MOVED:
        return Retry(Step.METADATA, code, leader)
    return Retry(Step.WAIT, code)


def passing_error(code: int, topic_partition: TopicPartition) -> BrokerError:
    """Return the error of a `Retry`, for those who wait for the partition."""
    error = error_for(code, topic_partition.topic)
    error.retriable = True
    return error


def _leader_hint(part: Any, known_epoch: int) -> LeaderHint | None:
    """Return the leader that an answer names, if it is newer than the one that we know."""
    if part.leader is None or part.leader.node < 0 or part.leader.epoch <= known_epoch:
        return None
    return LeaderHint(part.leader.node, part.leader.epoch)


def _known(offset: int) -> int | None:
    return None if offset == UNKNOWN else offset


# Standstill -------------------------------------------------------------------------------


class Standstill:
    """Counts the answers in a row that had data and did not move the position of a partition."""

    def __init__(self) -> None:
        self._answers = 0

    def note(self, topic_partition: TopicPartition, offset: int, size: int, *, moved: bool) -> Retry | Faulted | None:
        """Note an answer of which all *size* bytes were read; return what to do if it did not move the position.

        Repeating the request immediately would never end: wait, and report it from the third time on.
        """
        if moved:
            self._answers = 0
        if moved or not size:
            return None
        self._answers += 1
        if self._answers < STANDSTILL:
            return Retry(Step.WAIT, 0)
        reason = f"{self._answers} answers in a row had no record from there on, the last one in {size:,} bytes"
        return Faulted(corrupt_batch(reason, topic_partition, offset), 0)
