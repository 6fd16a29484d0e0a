"""Records to one topic in batches, each acknowledged once."""

import asyncio
import random
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aiokafka import errors as kafka
from aiokafka.partitioner import DefaultPartitioner

from aioshard.cli.rows import Row
from aioshard.errors import TransportError
from aioshard.kafka.connecting import CONNECT_TIMEOUT
from aioshard.kafka.options import Compression, producer_options
from aioshard.kafka.sending import RefusedError, SendingClient, connect
from aioshard.kafka.translate import missing_topic, nothing_acknowledged, publish_error, too_large

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Compression", "Publisher"]

_STALLED = 30.0
"""Seconds without an acknowledgement after which we give up. The idempotent producer itself tries for ever."""
_REMEMBERED_KEYS = 100_000

_partition_of = DefaultPartitioner()


class Publisher:
    """Publishes to one topic, idempotently, keyed records where Java's producer would put them.

    Records without a key fill a batch of one partition after the other's. Owned by one event loop.

    Invariants:
        * Records of one partition arrive in the order in which they were given.
        * `acknowledged` counts what the brokers have confirmed, and only that.
    """

    def __init__(self, settings: "Settings", topic: str, *, compression: Compression = "lz4") -> None:
        """Make a publisher; nothing connects yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self.acknowledged = 0
        """Records that the brokers have confirmed."""
        self._settings = settings
        self._topic = topic
        self._options = producer_options(settings, compression=compression, request_timeout=_STALLED)
        self._producer: SendingClient
        self._partitions: list[int] = []
        self._placed: dict[bytes, int] = {}
        self._keyless = 0
        self._batches: dict[int, Any] = {}
        self._flying: set[asyncio.Future[Any]] = set()
        self._failure: TransportError | None = None

    # Life -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect and look the topic up; a broker that creates topics on use creates it.

        Raises:
            TransportError: No broker answers, one refuses us, or there is no such topic. All within 10 s.
        """
        self._producer = await connect(self._settings, self._options, self._topic)
        try:
            await self._look_up()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; what was not flushed is not waited for."""
        await self._close()

    async def _look_up(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                self._partitions = sorted(await self._producer.partitions_for(self._topic))
        except TimeoutError:
            raise missing_topic(self._topic, CONNECT_TIMEOUT) from None
        except kafka.KafkaError as error:
            raise publish_error(error, self._topic) from error
        self._keyless = random.choice(self._partitions)  # noqa: S311 - spreads load

    async def _close(self) -> None:
        for flying in self._flying:
            flying.cancel()
        await self._producer.tear_down()

    # Records --------------------------------------------------------------------------

    async def publish(self, rows: Iterable[Row]) -> None:
        """Take *rows* and send what fills a batch; `submit` and `flush` send the rest.

        Raises:
            TransportError: The brokers refused records, or confirm nothing any more.
        """
        for key, value in rows:
            partition = self._keyless if key is None else self._partition(key)
            batch = self._batches.get(partition)
            if batch is not None and batch.append(timestamp=None, key=key, value=value) is not None:
                continue
            if batch is not None:
                await self._send(partition)
            batch = self._batches[partition] = self._producer.create_batch()
            # The first record of a batch is taken whatever its size.
            batch.append(timestamp=None, key=key, value=value)
        self._raise_failure()

    async def submit(self) -> None:
        """Send what was given so far, without waiting for acknowledgements.

        Raises:
            TransportError: As `publish`.
        """
        for partition in list(self._batches):
            await self._send(partition)

    async def flush(self) -> None:
        """Send what was given so far and wait until all of it is acknowledged.

        Raises:
            TransportError: As `publish`.
        """
        await self.submit()
        while self._flying:
            landed, _ = await asyncio.wait(self._flying, timeout=_STALLED, return_when=asyncio.FIRST_COMPLETED)
            if not landed:
                raise self._stalled()
        self._raise_failure()

    def _partition(self, key: bytes) -> int:
        partition = self._placed.get(key)
        if partition is None:
            if len(self._placed) >= _REMEMBERED_KEYS:
                self._placed.clear()
            partition = self._placed[key] = _partition_of(key, self._partitions, self._partitions)
        return partition

    async def _send(self, partition: int) -> None:
        self._raise_failure()
        batch = self._batches.pop(partition)
        if partition == self._keyless:
            self._keyless = random.choice(self._partitions)  # noqa: S311 - spreads load
        records: int = batch.record_count()
        try:
            async with asyncio.timeout(_STALLED):
                flying = await self._producer.send_batch(batch, self._topic, partition=partition)
        except (TimeoutError, kafka.KafkaTimeoutError):
            raise self._stalled() from None
        except kafka.KafkaError as error:
            raise self._refused(error) from error
        self._flying.add(flying)
        flying.add_done_callback(lambda landed: self._land(landed, records))

    def _land(self, landed: asyncio.Future[Any], records: int) -> None:
        self._flying.discard(landed)
        if landed.cancelled():
            return
        error = landed.exception()
        if error is None:
            self.acknowledged += records
        elif self._failure is None:
            self._failure = self._refused(error)
            self._failure.__cause__ = error

    # What goes wrong ------------------------------------------------------------------

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stalled(self) -> TransportError:
        return nothing_acknowledged(self._settings.bootstrap_servers, _STALLED)

    def _refused(self, error: BaseException) -> TransportError:
        if isinstance(error, RefusedError) and error.error is kafka.MessageSizeTooLargeError:
            return too_large(self._topic, None)
        return publish_error(error, self._topic)
