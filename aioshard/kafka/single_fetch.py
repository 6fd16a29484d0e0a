"""Read one fetch from one partition, without a `Fetcher`: to look at a record, or to find where a log goes on."""

from typing import Any, NamedTuple

from aioshard.kafka.offsets import LOCAL_START, READ_UNCOMMITTED, START, offsets_at
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.codes import raise_for
from aioshard.kafka.wire.errors import IncompleteResponseError
from aioshard.kafka.wire.fetch_answers import Deliver, Faulted, OutOfRange, Retry, decide_fetch, passing_error
from aioshard.kafka.wire.fetch_session import (
    FIRST_BY_ID,
    FetchSession,
    PartitionRequest,
    fetch_request,
    outside_session,
)
from aioshard.kafka.wire.metadata import Leader
from aioshard.kafka.wire.records import Chunk
from aioshard.kafka.wire.requests import FETCH
from aioshard.records import Record, TopicPartition

_MOST_BYTES = 1024 * 1024
"""Bytes of a response, unless a single batch is larger; decoding a response blocks the event loop."""
_PATIENCE = 5.0
"""Seconds for a broker to answer, beyond the time for which it may wait for records."""
_EVERYTHING = 1 << 62


class SingleFetch(NamedTuple):
    """The result of one fetch from one partition.

    Invariants:
        * `records` has everything readable from the requested offset up to `next_offset`.
        * `next_offset` is below the requested offset only if the log ends before that one.
    """

    records: list[Record]
    next_offset: int
    is_at_end: bool = False
    """Whether nothing is left to read, neither at the requested offset nor after it. Otherwise that is not known."""


async def fetch_once(
    cluster: Cluster,
    topic_partition: TopicPartition,
    offset: int,
    *,
    read_committed: bool,
    wait: float = 0.0,
    max_bytes: int | None = None,
) -> SingleFetch | None:
    """Fetch from one partition once, outside of any session. An offset outside the log leads to the start of the log.

    It uses a connection that carries no fetch that waits for records.

    Args:
        cluster: The cluster, started.
        topic_partition: The partition.
        offset: The first offset to return.
        read_committed: Whether to hide records of open and aborted transactions.
        wait: Seconds that the broker may wait for records.
        max_bytes: Bytes of the response, by default a megabyte, unless the first batch is larger.

    Returns:
        None if the leader is unknown.

    Raises:
        CorruptRecordError: The first batch cannot be read.
        AuthorizationError: This user may not read the topic.
        WireError: The broker did not answer, or it answered with an error that may pass.
    """
    leader = cluster.metadata.leader(topic_partition)
    if leader is None:
        return None
    most = _MOST_BYTES if max_bytes is None else min(max_bytes, _MOST_BYTES)
    wanted = PartitionRequest(cluster.metadata.topic_id(topic_partition.topic), offset, leader.epoch, -1, most)
    part, is_throttled = await _ask(cluster, leader, topic_partition, wanted, read_committed=read_committed, wait=wait)
    if part is None:
        return SingleFetch([], offset)
    decision = decide_fetch(
        topic_partition, part, wanted, node=leader.node, leader=leader.node, brokers=cluster.metadata.brokers
    )
    # 1. Records, or none.
    if isinstance(decision, Deliver):
        if decision.records:
            return _decoded(topic_partition, offset, decision, read_committed=read_committed)
        end = decision.stable_end if read_committed else decision.high_watermark
        return await _empty(cluster, topic_partition, offset, None if is_throttled else end)
    # 2. The log does not have the offset.
    if isinstance(decision, OutOfRange):
        start = await _bound(cluster, topic_partition, START)
        return SingleFetch([], offset) if start is None else SingleFetch([], start, is_at_end=start < offset)
    # 3. The partition cannot be read, for now or for good.
    if isinstance(decision, Faulted):
        raise decision.error
    if isinstance(decision, Retry) and decision.code:
        raise passing_error(decision.code, topic_partition)
    return SingleFetch([], offset)


async def _ask(
    cluster: Cluster,
    leader: Leader,
    topic_partition: TopicPartition,
    wanted: PartitionRequest,
    *,
    read_committed: bool,
    wait: float,
) -> tuple[Any | None, bool]:
    """Return the part of the response about the partition, if it counts, and whether the broker throttles us.

    A broker that throttles us may leave out records, or everything.
    """
    by_id_allowed = await cluster.supports(leader.node, FETCH, FIRST_BY_ID)
    fetch = outside_session({topic_partition: wanted}, ids_allowed=by_id_allowed)
    request = fetch_request(fetch, max_bytes=_MOST_BYTES, wait=wait, read_committed=read_committed)
    response = await cluster.ask(leader.node, request, timeout=wait + _PATIENCE)
    raise_for(response.error)
    outcome = FetchSession().answered(fetch, response)
    is_throttled = response.throttle_ms > 0
    if outcome.parts is None and not is_throttled:
        raise IncompleteResponseError(outcome.problem)
    return (outcome.parts or {}).get(topic_partition), is_throttled


def _decoded(topic_partition: TopicPartition, offset: int, answer: Deliver, *, read_committed: bool) -> SingleFetch:
    chunk = Chunk(topic_partition, answer.records, offset, aborted=answer.aborted if read_committed else ())
    records, _ = chunk.take(_EVERYTHING, _EVERYTHING, alone=True)
    if chunk.error is not None and chunk.next_offset == offset:
        raise chunk.error
    return SingleFetch(records, chunk.next_offset)


async def _empty(cluster: Cluster, topic_partition: TopicPartition, offset: int, end: int | None) -> SingleFetch:
    """Return the result of a fetch without records from a log that ends at *end*; None if it may be further on."""
    if end is None:
        return SingleFetch([], offset)
    if end <= offset:
        return SingleFetch([], offset, is_at_end=True)
    # The last batches of the log are gone, or they are in tiered storage, which did not return them in time.
    local_start = await _bound(cluster, topic_partition, LOCAL_START)
    if local_start is None or local_start > offset:
        return SingleFetch([], offset)
    return SingleFetch([], end, is_at_end=True)


async def _bound(cluster: Cluster, topic_partition: TopicPartition, which: int) -> int | None:
    """Return a bound of a log; None if its leader cannot say it now."""
    return (await offsets_at(cluster, {topic_partition: which}, READ_UNCOMMITTED)).get(topic_partition)
