"""aiokafka's idempotent producer, with what it lacks to live on after a refusal; its private attributes stay in here.

What it does by itself, seen on a real broker, and what is done here instead:

* a batch that the broker refuses (too large, not allowed) has used up its sequence numbers, and every later batch
  of its partition fails with OutOfOrderSequenceNumber, for ever: here it asks for a new producer id;
* a refusal does not say whether it is meant for one record, or for all that happened to be in the same batch;
* a broker is sent nothing while a batch for it waits to be sent again, or a partition anywhere has no leader;
* a batch whose callers have all given up is sent again and again, for ever: here it is dropped;
* a batch that fails while it waits to be sent again is looked for where it no longer is: a KeyError in the log;
* a key and a value that are both None, which Kafka stores, are refused by an assertion;
* stopping waits for brokers that are gone.
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
"""Seconds without end, for a time-out that must be a number; who waits has one of its own."""
_EXPLAINED = {
    76: "UNSUPPORTED_COMPRESSION_TYPE: The broker does not know the compression",
    87: "INVALID_RECORD: The record itself is not taken; a topic that is compacted takes none without a key",
    89: "THROTTLING_QUOTA_EXCEEDED: The quota is used up",
}
"""Codes that aiokafka does not know."""


class RefusedError(Exception):
    """What a broker answered to a batch that it did not take.

    Attributes:
        error: aiokafka's class for the answer; `UnknownError` for what it has none for.
        code: The broker's number for it.
        records: How many records were in the batch.
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
    """One life of aiokafka's producer, connected by `start`; after `tear_down` it is gone.

    Used from one event loop.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Make a client; nothing connects yet.

        Args:
            options: aiokafka's, with `enable_idempotence`.

        Raises:
            ValueError: An option has a value that aiokafka does not take.
            RuntimeError: A compression needs a package that is missing.
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
        """Look for leaders that are not known while what has one is sent; aiokafka would wait for the answer."""
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
        """Why nothing is sent any more, whatever the brokers do; None while the client lives."""
        for task in (self._sender.sender_task, self.client._sync_task):
            if task is not None and task.done():
                error: BaseException | None = None if task.cancelled() else task.exception()
                return error or kafka.ProducerClosed()
        return None

    def partition_count(self, topic: str) -> int:
        """How many partitions a topic has, as last told; 0 when it is not known."""
        return len(self.client.cluster.partitions_for_topic(topic) or ())

    def led_partitions(self, topic: str) -> list[int]:
        """The partitions of a topic that have a leader now, as last told."""
        return sorted(self.client.cluster.available_partitions_for_topic(topic) or ())

    def may_not_see(self, topic: str) -> bool:
        """Whether the brokers refused to tell of a topic when they were last asked."""
        return topic in self.client.cluster.unauthorized_topics

    async def look_up(self, topic: str) -> bool:
        """Ask the brokers for a topic, and for all others in use; whether they answered."""
        self.client.add_topic(topic)
        return bool(await self.client.force_metadata_update())

    def forget_topic(self, topic: str) -> None:
        """Ask no more for a topic that is not there; without any topic aiokafka would ask for all there are."""
        if len(self.client._topics) > 1:
            self.client._topics.discard(topic)

    async def add(self, message: Message, partition: int, *, alone: bool = False) -> asyncio.Future[Any]:
        """Add a message to the batch that is sent next to its partition, or wait until there is one with room.

        Waits without a deadline. Cancelling the future that is returned does no harm.

        Args:
            message: Its own partition is not looked at.
            partition: Where to, which exists.
            alone: Whether it gets a batch of its own. Nothing else may be added to the partition meanwhile.

        Raises:
            Exception: What `give_up` was told.
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
        """Ask for a new producer id before anything else is sent, and count from 0 again.

        Batches that are being sent keep the id they have; of each partition that is one at most, so order is kept.
        """
        self._sender.forget_producer_id()

    def give_up(self, error: Exception) -> None:
        """Fail everything that waits, and all that is added from now on, with *error*."""
        accumulator = self._message_accumulator
        waiting = [batch for batches in accumulator._batches.values() for batch in batches]
        waiting += accumulator._pending_batches
        accumulator.fail_all(error)
        for batch in waiting:
            waiter = batch._drain_waiter
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # Retrieved, so that the loop does not complain about it.

    async def tear_down(self) -> None:
        """End every task and connection, whatever state they are in; takes at most 2 s."""
        self._closed = True
        await close_client(self.client, [self._sender.sender_task, *self._sender.requests])


class _Pending(set[Any]):
    """The batches that are being sent; one that waits to be sent again was taken out, and may end all the same."""

    def remove(self, batch: Any) -> None:
        self.discard(batch)


class _Sender(Sender):  # type: ignore[misc]
    """Sends with `_Request`, and lets a broker take more while batches wait to be sent again."""

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.requests: set[asyncio.Task[Any]] = set()
        """Those in progress, or with batches that wait to be sent again."""

    async def _send_produce_req(self, node_id: int, batches: Mapping[Any, Any]) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for mypy
        self.requests.add(task)
        try:
            again = await _Request(self, batches).ask(node_id)
            self._in_flight.remove(node_id)
            self._muted_partitions.difference_update(batches.keys() - {batch.tp for batch in again})
            if any(batch.future.done() and batch.future.exception() is not None for batch in batches.values()):
                self.forget_producer_id()  # Before the next batch of the partition is given its number.
            if again:
                await self._send_again(again)
        finally:
            self.requests.discard(task)

    async def _maybe_wait_for_pid(self) -> None:
        """Before anything is sent: first of all drop what nobody wants any more."""
        waiting = self._message_accumulator._batches
        for partition in list(waiting):
            batches = waiting[partition]
            while batches and not _is_wanted(batches[0]):
                batch = batches.popleft()
                if batch.retry_count:
                    self.forget_producer_id()  # Its numbers are used up.
                batch.drain_ready()
                batch.failure(kafka.KafkaTimeoutError("given up"))
            if not batches:
                del waiting[partition]
        await super()._maybe_wait_for_pid()

    async def _send_again(self, batches: Sequence[Any]) -> None:
        """Put batches back after a pause; what is behind them in their partitions waits for them."""
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
    """One request to one broker: at most one batch of each of its partitions."""

    async def ask(self, node_id: int) -> Sequence[Any]:
        """Send it, settle the batches that were taken or refused, and return those to be sent again."""
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
        """Let the batches that are refused fail with what we want to know, before they fail without it.

        A batch that the answer leaves out is sent again, with the sequence numbers that it has.
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
    """Whether anybody still waits for a batch; one that was handed over whole is always wanted."""
    return not batch._msg_futures or any(not message.done() for message, _ in batch._msg_futures)


async def connect(settings: "Settings", options: Mapping[str, Any], topic: str) -> SendingClient:
    """A client that is connected and has a producer id; takes at most three and a half times `CONNECT_TIMEOUT`.

    Args:
        settings: Names for the sentences.
        options: The producer's.
        topic: What is to be published to; for the sentence when the user may write to no topic at all.

    Raises:
        ConnectError: No broker could be reached.
        AuthenticationError: The brokers refused our credentials, or we their certificate.
        AuthorizationError: The brokers do not let this user publish.
        TransportError: They did not give us a producer id.
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
