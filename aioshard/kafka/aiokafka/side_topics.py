"""Read partitions outside the group: follow side topics, or read a topic once."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from aiokafka import errors as kafka
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED

from aioshard.errors import ClientLostError, ConnectError, TransportError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.aiokafka.answers import cause_of, reason
from aioshard.kafka.aiokafka.client import END, BareClient, Fetched
from aioshard.kafka.aiokafka.connections import connected, end_tasks, is_connected
from aioshard.kafka.aiokafka.options import client_options
from aioshard.kafka.errors import named, request_error, undecided
from aioshard.ports import LogRange
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds for a query, including all retries."""
_REQUEST_TIMEOUT = 5.0
"""Seconds without a response after which a broker counts as gone."""
_GRACE = 3.0
"""Seconds that a transient error may last before it is reported, such as a leader change."""
_PAUSE = 0.2
"""Seconds until the retry after an error."""
_SILENCE = 30.0
"""Seconds without a connection and a response after which a new client starts over with the bootstrap addresses."""
_REPEAT_AFTER = 5.0
"""Seconds between two reports of the same failure while `poll` can return records of other partitions."""
_WAIT = 1.0
_STALLED = 30.0
"""Seconds without progress after which we give up."""


@dataclass(slots=True)
class _Watched:
    """A partition that `poll` reads."""

    position: int = 0
    failing_since: float | None = None
    """Loop time of the first of its failed reads in a row."""
    fault: TransportError | None = None
    """Why it cannot be read, once the error has lasted for a while or is not transient."""
    reported_at: float = 0.0
    """When the fault was last raised; before that, when it appeared."""

    def fail(self, error: TransportError, now: float) -> None:
        """Record a failed read."""
        if self.failing_since is None:
            self.failing_since = now
        if error.retriable and now - self.failing_since < _GRACE:
            return
        if self.fault is None:
            self.reported_at = now
        self.fault = error


class KafkaSideTopics:
    """Reads partitions outside of a group; implements `aioshard.ports.SideTopics`.

    While a poll waits, each broker has one fetch in progress; its result is kept for the next poll.

    Invariants:
        * A position advances in the same step that returns its records.
    """

    def __init__(self, settings: Settings, isolation: int = READ_COMMITTED) -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._isolation = isolation
        self._options = client_options(settings, request_timeout=_REQUEST_TIMEOUT)
        self._client: BareClient | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False
        self._watched: dict[TopicPartition, _Watched] = {}
        """The partitions to read; those that returned records last come last in a fetch."""
        self._changed = asyncio.Event()
        self._fetches: dict[int | None, asyncio.Task[None]] = {}
        """The fetch in progress per broker, and the look-up of partitions without a leader."""
        self._fetched: list[tuple[TopicPartition, int, Fetched]] = []
        """Results that no poll has returned yet, with the offsets that were requested."""
        self._answered_at = 0.0

    async def ensure(self, topic: str, partitions: int) -> None:
        """See `SideTopics.ensure`. Takes at most 10 s.

        Raises:
            AuthorizationError: This user may not create or describe the topic.
            SideTopicError: The topic is not compacted, or has too few partitions.
            TransportError: The check or the creation failed.
        """
        try:
            async with asyncio.timeout(_PATIENCE):
                async with KafkaAdmin(self._settings, patience=_GRACE) as admin:
                    await admin.ensure_compacted(topic, partitions)
        except TimeoutError:
            raise self._unanswered(f"of topic {topic!r}") from None

    async def close(self) -> None:
        """See `SideTopics.close`; takes at most 2 s."""
        self._closed = True
        self._changed.set()
        self._fetched.clear()
        ending = [end_tasks(task for task in (*self._fetches.values(), self._connecting) if task is not None)]
        if self._client is not None:
            ending.append(self._client.tear_down())
        await asyncio.gather(*ending)

    async def _connected(self) -> BareClient:
        """Return the client; connect first if there is none. Callers share an attempt, and the error if it fails.

        Raises:
            ClientLostError: The reader is closed, or the client could not be created.
            TransportError: The client could not connect.
        """
        while not self._closed:
            if self._client is not None and self._client.lost is None:
                return self._client
            connecting = self._reconnect()
            await asyncio.wait([connecting])
            if not connecting.cancelled() and (error := connecting.exception()) is not None:
                if isinstance(error, TransportError):
                    raise copy.copy(error)
                raise ClientLostError(f"side topics cannot be read: {reason(error)}") from error
        raise ClientLostError("the Kafka reader of side topics is closed")

    def _reconnect(self) -> asyncio.Task[None]:
        """Replace the client in the background, unless that is in progress."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="connect the reader of side topics")
            # Retrieve its error, so that the event loop does not log it if nobody waits.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._connecting

    async def _connect(self) -> None:
        try:
            previous, self._client = self._client, None
            if previous is not None:
                await previous.tear_down()
            self._client = await connected(self._settings, self._options, BareClient)
        finally:
            self._connecting = None

    # Watching ---------------------------------------------------------------------------

    def watch(self, partitions: Collection[TopicPartition]) -> None:
        """See `SideTopics.watch`."""
        self._watched = {partition: self._watched.get(partition) or _Watched() for partition in partitions}
        self._changed.set()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Watch a partition from an offset on."""
        self._watched[topic_partition] = _Watched(offset)

    def position(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.position`."""
        return self._watched.get(topic_partition, _Watched()).position

    async def poll(self, timeout: float) -> Sequence[Record]:
        """See `SideTopics.poll`. Does not raise transient errors that last less than 3 s.

        Raises:
            ClientLostError: The reader is closed.
            ConnectError: No broker can be reached.
            AuthenticationError: The brokers refused our credentials, or we refused their certificate.
            AuthorizationError: This user may not read a topic.
            CorruptRecordError: A batch cannot be read; nothing is skipped.
            TransportError: A partition cannot be read for another reason.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._raise_fault(unreported_since=loop.time() - _REPEAT_AFTER)
        while True:
            self._changed.clear()
            records, moved = self._take(loop.time())
            if records or moved:
                return records
            try:
                async with asyncio.timeout_at(deadline):
                    if self._watched or self._closed:
                        self._start_fetches(await self._connected())
                    await self._changed.wait()
            except TimeoutError:
                if self._watched:
                    self._check_connection()
                self._raise_fault(unreported_since=loop.time())
                return []

    def _start_fetches(self, client: BareClient) -> None:
        """Send a fetch to each broker without one."""
        requests: dict[int | None, dict[TopicPartition, int]] = {}
        for topic_partition, watched in self._watched.items():
            node = client.leader(topic_partition)
            if node not in self._fetches:
                requests.setdefault(node, {})[topic_partition] = watched.position
        for node, offsets in requests.items():
            self._fetches[node] = asyncio.create_task(
                self._fetch_from(client, node, offsets), name=f"fetch from side topics at broker {node}"
            )

    async def _fetch_from(self, client: BareClient, node: int | None, offsets: dict[TopicPartition, int]) -> None:
        """Fetch once from a broker; after an error, look up the leaders and pause."""
        topics = {topic_partition.topic for topic_partition in offsets}
        results: dict[TopicPartition, Fetched] = {}
        failure: kafka.KafkaError | TransportError | None = None
        try:
            if node is None:
                await client.look_up(*topics)
            else:
                results = await client.fetch(node, offsets, self._settings.fetch_max_wait, isolation=self._isolation)
        except kafka.KafkaError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - any error explains why no records arrive
            failure = ClientLostError(f"a fetch from side topics failed: {reason(error)}")
        try:
            for topic_partition, offset in offsets.items():
                result = results.get(topic_partition) or Fetched(
                    [], offset, -1, failure or _unknown(client, topic_partition)
                )
                if node is not None or client.leader(topic_partition) is None:
                    self._fetched.append((topic_partition, offset, result))
            self._changed.set()
            if len(results) < len(offsets) or any(result.error is not None for result in results.values()):
                if node is not None:
                    await client.look_up(*topics)
                await asyncio.sleep(_PAUSE)
        finally:
            del self._fetches[node]
            self._changed.set()

    def _take(self, now: float) -> tuple[list[Record], bool]:
        """Process fetch results; return the records, and whether a position has moved."""
        records: list[Record] = []
        moved = False
        fetched, self._fetched = self._fetched, []
        for topic_partition, offset, result in fetched:
            watched = self._watched.get(topic_partition)
            if watched is None or watched.position != offset:
                continue
            moved |= result.next_offset != offset
            watched.position = result.next_offset
            if result.records:
                records += result.records
                self._watched[topic_partition] = self._watched.pop(topic_partition)
            if result.error is None:
                self._answered_at = now
                watched.failing_since = watched.fault = None
            else:
                watched.fail(
                    _transport_error(result.error, f"the records of {topic_partition}", topic_partition.topic), now
                )
        return records, moved

    def _raise_fault(self, *, unreported_since: float) -> None:
        for watched in self._watched.values():
            if watched.fault is not None and watched.reported_at <= unreported_since:
                watched.reported_at = asyncio.get_running_loop().time()
                raise copy.copy(watched.fault)

    def _check_connection(self) -> None:
        client = self._client
        if client is None or not is_connected(client):
            if client is not None and self._answered_at < asyncio.get_running_loop().time() - _SILENCE:
                self._reconnect()
            raise ConnectError(
                f"no connection to a broker of {self._settings.bootstrap_servers} is open: side topics cannot be read"
            )

    # Queries ----------------------------------------------------------------------------

    async def end(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.end`. Takes at most 10 s."""

        async def query(client: BareClient, node: int) -> int:
            end = await client.log_offset(node, topic_partition, END, READ_UNCOMMITTED)
            if await client.log_offset(node, topic_partition, END) < end:
                raise undecided(topic_partition)
            return end

        return await self._query_leader(query, topic_partition, f"the end of {topic_partition}")

    async def read(self, topic_partition: TopicPartition, offset: int) -> Sequence[Record]:
        """See `SideTopics.read`. Takes at most 10 s.

        Raises:
            ConnectError: No broker can be reached.
            AuthorizationError: This user may not read the topic.
            CorruptRecordError: The batch cannot be read.
            TransportError: The records cannot be read now for another reason.
        """
        position = offset

        async def query(client: BareClient, node: int) -> list[Record]:
            nonlocal position
            wait = 0.0
            while True:
                fetched = (await client.fetch(node, {topic_partition: position}, wait, aside=True))[topic_partition]
                if fetched.records or fetched.next_offset < position:
                    return fetched.records
                if fetched.error is not None:
                    raise fetched.error
                if fetched.next_offset == position:
                    if position == fetched.end:
                        return []
                    wait = _PAUSE  # The broker throttles us, so we cannot tell yet whether there are records.
                position = fetched.next_offset

        return await self._query_leader(query, topic_partition, f"the records of {topic_partition}")

    async def _query_leader(
        self, query: Callable[[BareClient, int], Awaitable[T]], topic_partition: TopicPartition, what: str
    ) -> T:
        """Query the leader of a partition; retry until it answers or the timeout passes."""
        since = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE):
                while True:
                    client = await self._connected()
                    node = client.leader(topic_partition)
                    try:
                        if node is not None:
                            return await query(client, node)
                    except kafka.KafkaError as error:
                        if not _is_transient(error):
                            raise _transport_error(error, what, topic_partition.topic) from error
                    await asyncio.sleep(_PAUSE)
                    missing = await client.look_up(topic_partition.topic) and client.leader(topic_partition) is None
                    if missing and (client.may_not_see(topic_partition.topic) or time.monotonic() > since + _GRACE):
                        raise _unknown(client, topic_partition)
        except TimeoutError:
            raise self._unanswered(what) from None

    def _unanswered(self, what: str) -> TransportError:
        return ConnectError(
            f"the brokers of {self._settings.bootstrap_servers} did not return {what} within {_PATIENCE:g} s: "
            "check that they run"
        )


class TopicReader:
    """Reads partitions of a topic concurrently. Owned by one event loop.

    Example:
        ```python
        async with TopicReader(settings, "orders.dlt", partitions) as reader:
            async for records in reader.read():
                ...
        ```
    """

    def __init__(self, settings: Settings, topic: str, partitions: Collection[int]) -> None:
        """Make a reader; connects to nothing yet.

        Args:
            settings: The brokers; `isolation_level` decides whether records of open transactions are read.
            topic: The topic; it must exist.
            partitions: The partitions to read.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self.topic = topic
        self.ranges: dict[int, LogRange] = {}
        """Start and end of each partition when the reader was opened."""
        self._partitions = [TopicPartition(topic, partition) for partition in sorted(partitions)]
        self._settings = settings
        self._reader = KafkaSideTopics(
            settings, READ_COMMITTED if settings.isolation_level == "read_committed" else READ_UNCOMMITTED
        )

    async def __aenter__(self) -> Self:
        """Look up the start and end of each partition.

        Raises:
            TransportError: No broker answers, or a broker refuses the connection or the topic.
        """
        async with KafkaAdmin(self._settings) as admin:
            bounds = await admin.bounds(self._partitions)
        self.ranges = {at.partition: log.readable(self._settings.isolation_level) for at, log in bounds.items()}
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close all connections."""
        await self._reader.close()

    async def read(self, start: Mapping[int, int] | None = None) -> AsyncIterator[list[Record]]:
        """Yield all records in chunks; records of one partition are in offset order.

        If retention overtakes us while we read, continue at the new start of the log.

        Args:
            start: Offsets to begin at, for partitions that do not begin at their start.

        Raises:
            TransportError: The records cannot be read.
        """
        ends = {topic_partition: self.ranges[topic_partition.partition].end for topic_partition in self._partitions}
        for at in self._partitions:
            self._reader.seek(at, max(self.ranges[at.partition].start, (start or {}).get(at.partition, 0)))
        moved_at = time.monotonic()
        while unread := [partition for partition, end in ends.items() if self._reader.position(partition) < end]:
            ends = {topic_partition: ends[topic_partition] for topic_partition in unread}
            self._reader.watch(ends)
            before = sum(map(self._reader.position, unread))
            records: list[Record] = []
            try:
                records = [
                    record for record in await self._reader.poll(_WAIT) if record.offset < ends[record.topic_partition]
                ]
            except TransportError as error:
                if not error.retriable:
                    raise
            if records:
                yield records
            if records or sum(map(self._reader.position, unread)) != before:
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > _STALLED:
                raise TransportError(
                    f"{named(unread)} could not be read for {_STALLED:g} s: check that the brokers run, and that each "
                    "partition has a leader"
                )


def _unknown(client: BareClient, topic_partition: TopicPartition) -> TransportError:
    if client.may_not_see(topic_partition.topic):
        return _transport_error(kafka.TopicAuthorizationFailedError(topic_partition.topic), "", topic_partition.topic)
    return TransportError(f"{topic_partition} cannot be read: it does not exist, or has no leader now")


def _transport_error(error: kafka.KafkaError | TransportError, what: str, topic: str) -> TransportError:
    if isinstance(error, TransportError):
        return error
    return request_error(cause_of(error)._replace(retriable=_is_transient(error), topics=(topic,)), f"return {what}")


def _is_transient(error: kafka.KafkaError) -> bool:
    """Whether an error may be transient. Errors that aiokafka does not know include those of a leader change."""
    return bool(error.retriable) or isinstance(error, kafka.UnknownError | kafka.ReplicaNotAvailableError)
