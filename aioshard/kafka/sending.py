"""aiokafka's idempotent producer, fixed to survive a rejected batch. Only this module uses its private attributes.

aiokafka's own behaviour, observed on a real broker, and some of the fixes:

* A rejected batch (too large, not authorized) has used up its sequence numbers, so every later batch of its partition
  fails with OutOfOrderSequenceNumber, forever. Here, the client requests a new producer id.
* An error does not say whether it is about one record or about everything that happened to be in the same batch.
* A broker receives nothing while a batch for it waits for a retry, or while any partition has no leader.
* A batch whose callers have all given up is retried forever. Here, it is dropped.
* A batch that fails while it waits for a retry is removed from a set that no longer has it: a KeyError in the log.
* An assertion rejects messages whose key and value are both None, although Kafka stores them.
* `stop` waits for brokers that are gone.
"""
# ruff: noqa: SLF001 - see above; the canary tests say when one of them changes

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka
from aiokafka.producer.sender import Sender, SendProduceReqHandler
from aiokafka.producer.transaction_manager import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, PidAndEpoch
from aiokafka.structs import TopicPartition
from aiokafka.util import create_future

from aioshard.errors import AuthorizationError
from aioshard.kafka.connecting import advertised_by, connected
from aioshard.kafka.connections import close_client, is_connected, pace_look_ups, refuse_useless_connections
from aioshard.kafka.translate import publish_error, reason
from aioshard.ports import Message

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["RefusedError", "SendingClient", "connect"]

logger = logging.getLogger("aioshard.kafka.sending")

_LONG = 86_400.0
"""Seconds, practically infinite, where aiokafka requires a time-out; callers have their own deadlines."""
_EXPLAINED = {
    76: "UNSUPPORTED_COMPRESSION_TYPE: The broker does not know the compression",
    87: "INVALID_RECORD: The record itself is not taken; a topic that is compacted takes none without a key",
    89: "THROTTLING_QUOTA_EXCEEDED: The quota is used up",
}
"""Error codes that aiokafka does not know."""


class RefusedError(Exception):
    """A broker's error for a batch that it rejected.

    Attributes:
        error: aiokafka's class for the error; `UnknownError` if it has none.
        code: The broker's error code.
        records: The number of records in the batch.
    """

    def __init__(self, error: type[kafka.KafkaError], code: int, records: int) -> None:
        super().__init__(error, code, records)
        self.error = error
        self.code = code
        self.records = records

    def __str__(self) -> str:
        if self.error is kafka.UnknownError:
            return _EXPLAINED.get(self.code, f"error {self.code}")
        return f"{self.error.message}: {self.error.description}".rstrip(".")


class SendingClient(AIOKafkaProducer):  # type: ignore[misc]
    """One life of aiokafka's producer, connected by `start`; unusable after `tear_down`.

    Used from one event loop.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Make a client; connects to nothing yet.

        Args:
            options: aiokafka's options, with `enable_idempotence`.

        Raises:
            ValueError: aiokafka rejects the value of an option.
            RuntimeError: The compression needs a missing package.
        """
        super().__init__(**options)
        backoff: float = self.client._retry_backoff
        self._sender: Any = _Sender(
            self.client,
            acks=-1,
            txn_manager=self._txn_manager,
            message_accumulator=self._message_accumulator,
            retry_backoff_ms=round(backoff * 1000),
            request_timeout_ms=self._request_timeout_ms,
        )
        self._message_accumulator._pending_batches = _Pending()
        self._drain_by_nodes = self._message_accumulator.drain_by_nodes
        self._message_accumulator.drain_by_nodes = self._drain_and_look_up
        refuse_useless_connections(self.client)
        pace_look_ups(self.client, backoff)

    def _drain_and_look_up(self, *arguments: Any, **options: Any) -> tuple[Any, bool]:
        """Look up missing leaders while sending to known ones; aiokafka would first wait for the look-up."""
        batches, leaders_missing = self._drain_by_nodes(*arguments, **options)
        if leaders_missing:
            waiter = self._message_accumulator.waiter()
            self.client.force_metadata_update().add_done_callback(lambda _: self._message_accumulator._wakeup(waiter))
        return batches, False

    @property
    def connected(self) -> bool:
        """Whether a connection to any broker is open."""
        return is_connected(self.client)

    @property
    def lost(self) -> BaseException | None:
        """Why the client can no longer send, even if the brokers are fine; None while it can."""
        for task in (self._sender.sender_task, self.client._sync_task):
            if task is not None and task.done():
                error: BaseException | None = None if task.cancelled() else task.exception()
                return error or kafka.ProducerClosed()
        return None

    def partition_count(self, topic: str) -> int:
        """Return the last known number of partitions; 0 if unknown."""
        return len(self.client.cluster.partitions_for_topic(topic) or ())

    def led_partitions(self, topic: str) -> list[int]:
        """Return the partitions that, as last known, have a leader."""
        return sorted(self.client.cluster.available_partitions_for_topic(topic) or ())

    def may_not_see(self, topic: str) -> bool:
        """Whether the brokers refused access to a topic in the latest look-up."""
        return topic in self.client.cluster.unauthorized_topics

    async def look_up(self, topic: str) -> bool:
        """Look up a topic, and all others in use; return whether the brokers answered."""
        self.client.add_topic(topic)
        return bool(await self.client.force_metadata_update())

    def forget_topic(self, topic: str) -> None:
        """Stop looking up a missing topic. Keeps the last one, because without any, aiokafka looks up all topics."""
        if len(self.client._topics) > 1:
            self.client._topics.discard(topic)

    async def add(self, message: Message, partition: int, *, alone: bool = False) -> asyncio.Future[Any]:
        """Add a message to the next batch of its partition; wait until a batch has room.

        Waits without a deadline. You can safely cancel the returned future.

        Args:
            message: Its `partition` is ignored.
            partition: The target; must exist.
            alone: Whether the message gets a batch to itself. Add nothing else to the partition meanwhile.

        Raises:
            Exception: The error passed to `give_up`.
        """
        accumulator = self._message_accumulator
        at = TopicPartition(message.topic, partition)
        timestamp = None if message.timestamp is None else round(message.timestamp * 1000)
        if alone and (pending := accumulator._batches.get(at)):
            batch = pending[-1]
            batch._builder.close()
        added: asyncio.Future[Any] = await accumulator.add_message(
            at, message.key, message.value, _LONG, timestamp_ms=timestamp, headers=list(message.headers)
        )
        if alone:
            batch = accumulator._batches[at][-1]
            batch._builder.close()
        return added

    def forget_producer_id(self) -> None:
        """Request a new producer id before the next batch is sent, and restart its sequence numbers at 0.

        Batches in flight keep their id; each partition has at most one of them, so records stay in order.
        """
        self._sender.forget_producer_id()

    def give_up(self, error: Exception) -> None:
        """Fail all pending messages, and all added from now on, with *error*."""
        accumulator = self._message_accumulator
        waiting = [batch for batches in accumulator._batches.values() for batch in batches]
        waiting += accumulator._pending_batches
        accumulator.fail_all(error)
        for batch in waiting:
            waiter = batch._drain_waiter
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # Retrieve it, so that the event loop does not log it.

    async def tear_down(self) -> None:
        """End every task and connection, in any state; takes at most 2 s."""
        self._closed = True
        await close_client(self.client, [self._sender.sender_task, *self._sender.requests])


class _Pending(set[Any]):
    """The batches in flight. A batch that waits for a retry was removed already, but may still end."""

    def remove(self, batch: Any) -> None:
        self.discard(batch)


class _Sender(Sender):  # type: ignore[misc]
    """Sends with `_Request`; keeps sending to a broker while other batches wait for a retry."""

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.requests: set[asyncio.Task[Any]] = set()
        """Requests in flight, or with batches that wait for a retry."""

    async def _send_produce_req(self, node_id: int, batches: Mapping[Any, Any]) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for mypy
        self.requests.add(task)
        try:
            again = await _Request(self, batches).ask(node_id)
            self._in_flight.remove(node_id)
            self._muted_partitions.difference_update(batches.keys() - {batch.tp for batch in again})
            if any(batch.future.done() and batch.future.exception() is not None for batch in batches.values()):
                self.forget_producer_id()  # Before the partition's next batch gets its sequence number.
            if again:
                await self._send_again(again)
        finally:
            self.requests.discard(task)

    async def _maybe_wait_for_pid(self) -> None:
        """Before anything is sent, drop batches that no caller waits for."""
        waiting = self._message_accumulator._batches
        for partition in list(waiting):
            batches = waiting[partition]
            while batches and not _is_wanted(batches[0]):
                batch = batches.popleft()
                if batch.retry_count:
                    self.forget_producer_id()  # Its sequence numbers are used up.
                batch.drain_ready()
                batch.failure(kafka.KafkaTimeoutError("given up"))
            if not batches:
                del waiting[partition]
        await super()._maybe_wait_for_pid()

    async def _send_again(self, batches: Sequence[Any]) -> None:
        """Requeue batches after a pause; later batches of their partitions wait for them."""
        accumulator = self._message_accumulator
        accumulator._wakeup(accumulator.waiter())
        await asyncio.sleep(self._retry_backoff)
        for batch in batches:
            accumulator.reenqueue(batch)
        await self.client._maybe_wait_metadata()
        self._muted_partitions.difference_update(batch.tp for batch in batches)

    def forget_producer_id(self) -> None:
        transactions = self._txn_manager
        if transactions.has_pid():
            transactions._pid_and_epoch = PidAndEpoch(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
            transactions._pid_waiter = create_future()
            transactions._sequence_numbers.clear()


class _Request(SendProduceReqHandler):  # type: ignore[misc]
    """One request to one broker, with at most one batch per partition."""

    async def ask(self, node_id: int) -> Sequence[Any]:
        """Send the request, resolve acknowledged and rejected batches, and return those to retry."""
        try:
            answer = await self._client.send(node_id, self.create_request())
        except kafka.KafkaError as error:
            logger.debug("a request to broker %d failed: %s", node_id, reason(error))
            if getattr(error, "invalid_metadata", False):
                self._client.force_metadata_update()
            for batch in self._batches.values():
                if self._can_retry(error, batch):
                    self._to_reenqueue.append(batch)
                else:
                    batch.failure(error)
        else:
            self.handle_response(answer)
        again: Sequence[Any] = self._to_reenqueue
        return again

    def handle_response(self, response: Any) -> None:
        """Fail rejected batches with the details we need, before aiokafka fails them without.

        Batches missing from the response are retried with the same sequence numbers.
        """
        for topic, answers in response.topics:
            for partition, code, *_ in answers:
                batch = self._batches.get(TopicPartition(topic, partition))
                error = kafka.for_code(code)
                if not code or batch is None or error is kafka.DuplicateSequenceNumber or self._can_retry(error, batch):
                    continue
                batch.failure(RefusedError(error, code, batch.record_count))
        super().handle_response(response)
        answered = {TopicPartition(topic, partition) for topic, answers in response.topics for partition, *_ in answers}
        self._to_reenqueue += [batch for name, batch in self._batches.items() if name not in answered]

    def _can_retry(self, error: Any, batch: Any) -> bool:
        return bool(error.retriable) and _is_wanted(batch)


def _is_wanted(batch: Any) -> bool:
    """Whether a caller still waits for the batch; always true for a batch that was added as a whole."""
    return not batch._msg_futures or any(not message.done() for message, _ in batch._msg_futures)


async def connect(settings: "Settings", options: Mapping[str, Any], topic: str) -> SendingClient:
    """Return a connected client with a producer id; takes at most three and a half times `CONNECT_TIMEOUT`.

    Args:
        settings: For the error messages.
        options: The producer's options.
        topic: The topic to publish to; for the error message if this user may not write to any topic.

    Raises:
        ConnectError: No broker could be reached.
        AuthenticationError: The brokers rejected our credentials, or we rejected their certificate.
        AuthorizationError: This user may not publish.
        TransportError: The brokers did not assign a producer id.
        SettingsError: The client refused an option.
    """

    async def begin(client: SendingClient) -> bool:
        try:
            await client.start()
        except kafka.KafkaError as error:
            refused = publish_error(error, topic)
            if isinstance(refused, AuthorizationError):
                raise refused from error
            return False
        return True

    return await connected(
        settings,
        options,
        SendingClient,
        begin=begin,
        end=SendingClient.tear_down,
        advertised=lambda client: advertised_by(client.client.cluster),
    )
