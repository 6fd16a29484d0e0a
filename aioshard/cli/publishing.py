"""Records to one topic in batches, each acknowledged once."""

import asyncio
import contextlib
import inspect
import logging
import random
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka
from aiokafka.partitioner import DefaultPartitioner

from aioshard.cli.rows import Row
from aioshard.errors import AuthorizationError, TransportError
from aioshard.kafka.connecting import CONNECT_TIMEOUT, find_broker, why_unreachable
from aioshard.kafka.security import security_options
from aioshard.kafka.translate import reason

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Compression", "Publisher", "silence_client"]

Compression = Literal["none", "gzip", "lz4", "snappy", "zstd"]

_BATCH_BYTES = 64 * 1024
_STALLED = 30.0
"""Seconds without an acknowledgement after which we give up. The idempotent producer itself tries for ever."""
_CLOSE_TIMEOUT = 3.0
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
        self._options = _options(settings, compression)
        self._producer: Any = None
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
        server = await find_broker(self._settings, self._options)
        self._producer = AIOKafkaProducer(**(self._options | {"bootstrap_servers": server}))
        try:
            await self._connect()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; what was not flushed is not waited for."""
        await self._close()

    async def _connect(self) -> None:
        producer = self._producer
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await producer.start()
        except (TimeoutError, kafka.KafkaError) as error:
            refused = self._denied(error)
            if refused is not None:
                raise refused from error
            advertised = [(broker.host, broker.port) for broker in producer.client.cluster.brokers()]
            raise await why_unreachable(self._settings, self._options, advertised) from None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                self._partitions = sorted(await producer.partitions_for(self._topic))
        except TimeoutError:
            raise TransportError(
                f"topic {self._topic!r} does not exist, and the brokers did not create it on use within "
                f"{CONNECT_TIMEOUT:g} s: create it, or check its name"
            ) from None
        except kafka.KafkaError as error:
            raise self._denied(error) or TransportError(
                f"the partitions of topic {self._topic!r} were not told: {reason(error)}"
            ) from error
        self._keyless = random.choice(self._partitions)  # noqa: S311 - spreads load

    async def _close(self) -> None:
        for flying in self._flying:
            flying.cancel()
        with contextlib.suppress(TimeoutError, kafka.KafkaError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._producer.stop()
        await self._producer.client.close()

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
        return TransportError(
            f"the brokers of {self._settings.bootstrap_servers} acknowledged nothing for {_STALLED:g} s: "
            "check that they run, and that enough replicas of each partition are in sync"
        )

    def _refused(self, error: BaseException) -> TransportError:
        return self._denied(error) or TransportError(
            f"the brokers did not take records for topic {self._topic!r}: {reason(error)}"
        )

    def _denied(self, error: BaseException) -> AuthorizationError | None:
        # aiokafka wraps refusals that it does not expect in a KafkaError of their repr.
        if "TopicAuthorizationFailed" not in repr(error) and "ClusterAuthorizationFailed" not in repr(error):
            return None
        return AuthorizationError(
            f"the brokers do not allow this user to write to topic {self._topic!r}: grant WRITE and DESCRIBE on it, "
            "and before Kafka 3.0 IDEMPOTENT_WRITE on the cluster"
        )


def silence_client() -> None:
    """Keep the client's own log lines off the terminal where no logging is configured: errors are told as sentences."""
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())


def _options(settings: "Settings", compression: Compression) -> dict[str, Any]:
    known = inspect.signature(AIOKafkaProducer.__init__).parameters
    # What is for consumers, such as fetch_min_bytes, has no meaning here.
    extra = {name: value for name, value in settings.client_options.items() if name in known}
    return {
        "bootstrap_servers": settings.require_bootstrap_servers(),
        "client_id": settings.client_id or "aioshard",
        "enable_idempotence": True,
        "compression_type": None if compression == "none" else compression,
        "max_batch_size": _BATCH_BYTES,
        "metadata_max_age_ms": round(settings.metadata_max_age * 1000),
        "request_timeout_ms": round(_STALLED * 1000),
        **security_options(settings),
        **extra,
    }
