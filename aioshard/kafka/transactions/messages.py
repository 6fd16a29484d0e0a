"""Writes the messages of a transaction: to the leaders of all partitions at the same time, in rounds."""

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

from aioshard.errors import CommitError, MessagesRefusedError
from aioshard.kafka.produce import REQUEST_BYTES, learn_leaders, produce
from aioshard.kafka.transactions.answers import ON_ADDING, Meaning
from aioshard.kafka.transactions.call import Call
from aioshard.kafka.transactions.coordinator import Coordinator
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.requests import aborted, newest_version, request_of
from aioshard.kafka.transactions.writes import PartitionWrites, Writes, by_leader
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.requests import ADD_PARTITIONS_TO_TXN, PRODUCE
from aioshard.kafka.wire.responses import Answers, refused_indexes, refused_offsets, stored_offsets
from aioshard.records import TopicPartition, by_topic

_NOT_ATTEMPTED: Final = 55
"""Error code of a partition that was not added because of another one."""
_ABOUT_TOPIC: Final = frozenset({17, 29})
"""Error codes that refuse each message for a topic."""


class MessageWriter:
    """Writes the messages of one transaction after the other.

    Invariants:
        * `write` returns only if every message was acknowledged.
    """

    def __init__(self, cluster: Cluster, transactional: TransactionalId, coordinator: Coordinator) -> None:
        """Serve one client.

        Args:
            cluster: The cluster.
            transactional: The transactional id, whose transaction is open whenever something is written.
            coordinator: Its coordinator.
        """
        self._cluster = cluster
        self._id = transactional
        self._coordinator = coordinator

    async def add_partitions(self, call: Call, writes: Writes) -> bool:
        """Add the partitions of messages to the transaction, as the first protocol needs it.

        Returns:
            Whether a request may arrive once more.

        Raises:
            MessagesRefusedError: Some messages can never be written.
            CommitError: The transaction cannot be committed.
        """
        if not writes.partitions:
            return False
        parts = by_topic(writes.partitions)
        request = request_of(
            self._id,
            ADD_PARTITIONS_TO_TXN,
            topics=[{"topic": topic, "partitions": partitions} for topic, partitions in parts],
        )

        def first_error(response: Any) -> WireError | None:
            return next(iter(_causes(response, writes.partitions).values()), None)

        answer = await self._coordinator.ask(call, request, ON_ADDING, first_error)
        if answer.meaning is Meaning.DONE:
            return answer.is_in_doubt
        if answer.response is not None:
            for name, error in _causes(answer.response, writes.partitions).items():
                if error.code in _ABOUT_TOPIC:
                    writes.refuse_topic(name.topic, error)
        if writes.refused:
            raise MessagesRefusedError(writes.refused)
        raise aborted(self._id, "its partitions were refused", answer.error)

    async def write(self, call: Call, writes: Writes) -> None:
        """Write all messages, in rounds: each leader gets one request with the next batch of its partitions.

        Raises:
            MessagesRefusedError: Some can never be written; the others are written, to find all of them.
            CommitError: The transaction cannot be committed.
        """
        call.expect("Produce")
        while pending := writes.pending:
            metadata = self._cluster.metadata
            leaders = {
                part.name: known.leader
                for part in pending
                if (known := metadata.partition(part.name)) is not None and known.leader is not None
            }
            before = len(pending)
            rounds = [self._write_to(node, parts, writes) for node, parts in by_leader(pending, leaders)]
            latest = await _all(rounds)
            if writes.failure is not None:
                raise aborted(self._id, "messages were not stored", writes.failure)
            if len(leaders) < before:
                self._cluster.request_refresh()
            if len(leaders) < before or latest is not None:
                try:
                    await call.pause(latest)
                except CommitError:
                    if writes.refused:
                        break  # those that were found
                    raise
            else:
                call.check()
        call.finish()
        if writes.refused:
            raise MessagesRefusedError(writes.refused)

    async def _write_to(self, node: int, parts: Sequence[PartitionWrites], writes: Writes) -> WireError | None:
        """Send the next batches of partitions to their leader; return an error after which to wait a moment."""
        batches: dict[TopicPartition, bytes] = {}
        sent: list[PartitionWrites] = []
        size = 0
        for part in parts:
            data = writes.next_batch(part, self._id)
            if data is None:
                continue
            size += len(data)
            if batches and size > REQUEST_BYTES:
                break
            batches[part.name] = data
            sent.append(part)
        if not sent:
            return None
        newest = newest_version(PRODUCE, self._id.version)
        moved: set[TopicPartition] = set()
        blamed: Mapping[TopicPartition, Sequence[int]] = {}
        pause = 0.0
        try:
            response = await produce(self._cluster, node, batches, transactional_id=self._id.name, newest=newest)
            pause = max(response.throttle_ms, 0) / 1000
            answers = stored_offsets(response, batches)
            blamed = refused_indexes(response)
            moved = learn_leaders(self._cluster, response)
        except WireError as error:
            answers = Answers({}, dict.fromkeys(batches, error))
        latest: WireError | None = None
        for part in sent:
            failed = answers.errors.get(part.name)
            writes.apply(part, self._id, failed, blamed.get(part.name, ()))
            if part.batch is not None and part.name not in moved:
                latest = failed
        if pause:
            await asyncio.sleep(pause)  # the broker reads nothing from us for so long
        return latest


def _causes(response: Any, partitions: Collection[TopicPartition]) -> dict[TopicPartition, WireError]:
    """Return why partitions were not added, without those that were left out because of others."""
    refused = refused_offsets(response, partitions)
    causes = {name: error for name, error in refused.items() if error.code != _NOT_ATTEMPTED}
    return causes or refused


async def _all(requests: Sequence[Coroutine[Any, Any, WireError | None]]) -> WireError | None:
    """Send requests to several brokers at the same time; return the last error."""
    if len(requests) == 1:
        return await requests[0]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(request, name="write messages of a transaction") for request in requests]
    return next((error for task in tasks if (error := task.result()) is not None), None)
