"""Read partitions outside the group: follow side topics, or read a topic once."""

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

from aioshard.errors import (
    ClientLostError,
    ConnectError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    TopicRecreatedError,
    TransportError,
    UnknownPartitionError,
)
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.errors import named, no_leader, request_error, undecided
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.offsets import READ_COMMITTED, try_log_ranges
from aioshard.kafka.single_fetch import fetch_once
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.start import connect, new_cluster
from aioshard.ports import Allowance, Fault, FetchedBatch, LogRange
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.side_topics")

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds for a query, including all retries."""
_GRACE = 3.0
"""Seconds that a transient error may last before it is reported, such as a leader change."""
_PAUSE = 0.2
"""Seconds until the retry after an error."""
_SILENCE = 30.0
"""Seconds without a connection and a response after which a new client says why no broker can be reached."""
_REPEAT_AFTER = 5.0
"""Seconds between two reports of the same failure while `poll` can return records of other partitions."""
_GAP_AFTER = 0.5
"""Seconds without records from a log that is longer than we have read, after which we look what is there."""
_MOST_BYTES = 4 * 1024 * 1024
"""Bytes that are fetched and not returned yet. A response has a quarter of them: decoding it blocks the event loop."""
_WAIT = 1.0
_STALLED = 30.0
"""Seconds without progress after which we give up."""
_EVERYTHING = Allowance(1 << 62, 1 << 62, alone=True)


@dataclass(slots=True)
class _Watched:
    """A partition that `poll` reads."""

    position: int = 0
    reported_at: float = 0.0
    """When it was last reported that it cannot be read; loop time."""
    behind_since: float | None = None
    """Since when its log is known to be longer, although it returns nothing; loop time."""


class _Client(NamedTuple):
    """One life of the client."""

    cluster: Cluster
    fetcher: Fetcher

    @property
    def is_lost(self) -> bool:
        """Whether one of its tasks has ended, so that it reads nothing any more."""
        return self.cluster.failure is not None or self.fetcher.failure is not None

    def begin(self, positions: Mapping[TopicPartition, int]) -> None:
        """Fetch partitions."""
        self.cluster.follow(_topics(positions))
        self.fetcher.add(positions)
        for topic_partition, position in positions.items():
            self.fetcher.seek(topic_partition, position)
        self.fetcher.resume(positions)

    async def close(self) -> None:
        """End every task and connection; takes at most 2 s."""
        try:
            await self.fetcher.close()
        finally:
            await self.cluster.close()


def _topics(partitions: Iterable[TopicPartition]) -> set[str]:
    return {topic_partition.topic for topic_partition in partitions}


class KafkaSideTopics:
    """Reads partitions outside of a group; implements `aioshard.ports.SideTopics`.

    Records are fetched between the polls too, up to a limit.

    Invariants:
        * A position advances in the same step that returns its records.
        * An offset before the log continues at the log's start. So does one beyond its end: the log must be a new one.
    """

    def __init__(self, settings: Settings, *, read_committed: bool = True) -> None:
        """Check the options; connects to nothing yet.

        Args:
            settings: The brokers.
            read_committed: Whether `poll` hides records of open and aborted transactions. `read` always does.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        new_cluster(settings)
        self._settings = settings
        self._read_committed = read_committed
        self._client: _Client | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False
        self._watched: dict[TopicPartition, _Watched] = {}
        self._changed = asyncio.Event()
        """Set when a poll must look again, although nothing was fetched."""
        self._moved = False
        """Whether a position has changed without records since the last poll."""
        self._searches: dict[TopicPartition, asyncio.Task[None]] = {}
        """Partitions for which we find out where their log continues."""

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
        self._wake()
        tasks = [*self._searches.values()]
        if self._connecting is not None:
            tasks.append(self._connecting)
        for task in tasks:
            task.cancel()
        if self._client is not None:
            await self._client.close()
        if tasks:
            await asyncio.wait(tasks)

    async def _connected(self) -> _Client:
        """Return the client; connect first if there is none. Callers share an attempt, and the error if it fails.

        Raises:
            ClientLostError: The reader is closed, or the client could not be created.
            TransportError: The client could not connect.
        """
        while not self._closed:
            if self._client is not None and not self._client.is_lost:
                return self._client
            connecting = self._reconnect()
            await asyncio.wait([connecting])
            if not connecting.cancelled() and (error := connecting.exception()) is not None:
                if isinstance(error, TransportError):
                    raise copy.copy(error)
                text = str(error) or type(error).__name__
                raise ClientLostError(f"side topics cannot be read: {text}") from error
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
            previous = self._client
            self._client = None
            if previous is not None:
                await previous.close()
            cluster = await connect(self._settings, _topics(self._watched))
            fetcher = Fetcher(
                cluster,
                read_committed=self._read_committed,
                max_bytes=_MOST_BYTES,
                max_wait=self._settings.fetch_max_wait,
            )
            fetcher.start()
            cluster.when_lost(lambda _: fetcher.readable.set())
            self._client = _Client(cluster, fetcher)
            self._client.begin(
                {topic_partition: watched.position for topic_partition, watched in self._watched.items()}
            )
        finally:
            self._connecting = None

    def _wake(self) -> None:
        """Let a waiting poll look again."""
        self._changed.set()
        if self._client is not None:
            self._client.fetcher.readable.set()

    # Watching ---------------------------------------------------------------------------

    def watch(self, partitions: Collection[TopicPartition]) -> None:
        """See `SideTopics.watch`."""
        before = self._watched
        self._watched = {partition: before.get(partition) or _Watched() for partition in partitions}
        if self._client is not None:
            self._client.fetcher.remove(before.keys() - self._watched.keys())
            self._client.begin(dict.fromkeys(self._watched.keys() - before.keys(), 0))
        self._wake()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """Watch a partition from an offset on."""
        self._watched[topic_partition] = _Watched(offset)
        if self._client is not None:
            self._client.begin({topic_partition: offset})
        self._wake()

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
        deadline = asyncio.get_running_loop().time() + timeout
        self._raise_fault(after=_REPEAT_AFTER)
        while True:
            self._changed.clear()
            records, moved = self._take()
            if records or moved:
                return records
            try:
                async with asyncio.timeout_at(deadline):
                    await self._wait()
            except TimeoutError:
                if self._watched:
                    self._check_connection()
                self._raise_fault(after=0.0)
                return []

    def _take(self) -> tuple[list[Record], bool]:
        """Return what was fetched, and whether a position has moved."""
        records: list[Record] = []
        moved = self._moved
        self._moved = False
        if self._client is None or self._closed:
            return records, moved
        for item in self._client.fetcher.take(lambda _: _EVERYTHING).new:
            if isinstance(item, FetchedBatch):
                records += item.records
                watched = self._watched[item.topic_partition]
                watched.position = item.next_offset
                watched.behind_since = None
                moved = True
            elif isinstance(item, Fault):
                self._recover(self._client, item)
        return records, moved

    async def _wait(self) -> None:
        """Wait until `_take` may return something; only for a moment if a log is longer than we have read."""
        if not self._watched and not self._closed:
            await self._changed.wait()
            return
        client = await self._connected()
        is_behind = self._look_for_gaps(client)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GAP_AFTER if is_behind else None):
                await client.fetcher.readable.wait()

    def _raise_fault(self, *, after: float) -> None:
        """Raise why a partition cannot be read, unless it was reported, or has begun, less than *after* seconds ago."""
        if self._client is None:
            return
        now = asyncio.get_running_loop().time()
        for topic_partition, watched in self._watched.items():
            trouble = self._client.fetcher.trouble(topic_partition)
            if trouble is None:
                continue
            error = trouble.error
            if isinstance(error, OffsetOutOfRangeError):
                error = TransportError(str(error))  # it passes as soon as we know where the log begins
            begins_at = trouble.since + _GRACE if error.retriable else trouble.since
            if max(begins_at, watched.reported_at) + after <= now:
                watched.reported_at = now
                raise copy.copy(error)

    def _check_connection(self) -> None:
        client = self._client
        if client is not None and client.cluster.is_connected:
            return
        if client is not None and client.fetcher.answered_at < asyncio.get_running_loop().time() - _SILENCE:
            self._reconnect()
        raise ConnectError(
            f"no connection to a broker of {self._settings.bootstrap_servers} is open: side topics cannot be read"
        )

    # Positions ----------------------------------------------------------------------------

    def _recover(self, client: _Client, fault: Fault) -> None:
        """Find another position if a log does not have ours."""
        topic_partition, error = fault
        if isinstance(error, TopicRecreatedError):
            self._move(client, topic_partition, 0)
        elif isinstance(error, LogTruncatedError):
            logger.warning("%s; reading what it has instead", error)
            self._move(client, topic_partition, error.resumes_at)
        elif isinstance(error, OffsetOutOfRangeError):
            self._search(client, topic_partition)

    def _look_for_gaps(self, client: _Client) -> bool:
        """Search in logs that are longer than we have read but return nothing; return whether there are such logs.

        If the last batches of a log are gone, a broker returns no records up to its end, and no error.
        """
        now = asyncio.get_running_loop().time()
        is_behind = False
        for topic_partition, watched in self._watched.items():
            end = client.fetcher.end_offset(topic_partition)
            if end is None or end <= watched.position:
                continue
            is_behind = True
            if watched.behind_since is None:
                watched.behind_since = now
            elif watched.behind_since + _GAP_AFTER <= now:
                watched.behind_since = now
                self._search(client, topic_partition)
        return is_behind

    def _search(self, client: _Client, topic_partition: TopicPartition) -> None:
        """Begin to find out where a log continues, unless that is in progress."""
        if topic_partition not in self._searches:
            self._searches[topic_partition] = asyncio.create_task(
                self._find_position(client, topic_partition, self._watched[topic_partition]),
                name=f"find where {topic_partition} continues",
            )

    async def _find_position(self, client: _Client, topic_partition: TopicPartition, watched: _Watched) -> None:
        position = watched.position
        try:
            found = await fetch_once(client.cluster, topic_partition, position, read_committed=self._read_committed)
        except (WireError, TransportError) as error:
            logger.debug("it is not known where %s continues after offset %d: %s", topic_partition, position, error)
            return
        finally:
            del self._searches[topic_partition]
        is_watched = self._watched.get(topic_partition) is watched and self._client is client
        if found is None or found.records or not is_watched or watched.position != position:
            return  # the fetcher returns the records
        if found.next_offset != position:
            self._move(client, topic_partition, found.next_offset)

    def _move(self, client: _Client, topic_partition: TopicPartition, offset: int) -> None:
        """Continue at another offset."""
        watched = self._watched[topic_partition]
        watched.position = offset
        watched.behind_since = None
        client.fetcher.seek(topic_partition, offset)
        self._moved = True
        self._wake()

    # Queries ----------------------------------------------------------------------------

    async def end(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.end`. Takes at most 10 s."""

        async def query(cluster: Cluster) -> int:
            answers = await try_log_ranges(cluster, [topic_partition], READ_COMMITTED)
            if topic_partition in answers.errors:
                raise answers.errors[topic_partition]
            log = answers.values[topic_partition]
            if log.end < log.newest:
                raise undecided(topic_partition)
            return log.end

        return await self._query(query, topic_partition, f"the end of {topic_partition}")

    async def read(
        self, topic_partition: TopicPartition, offset: int, max_bytes: int | None = None
    ) -> Sequence[Record]:
        """See `SideTopics.read`. Takes at most 10 s.

        Raises:
            ConnectError: No broker can be reached.
            AuthorizationError: This user may not read the topic.
            CorruptRecordError: The batch cannot be read.
            TransportError: The records cannot be read now for another reason.
        """
        position = offset
        wait = 0.0

        async def query(cluster: Cluster) -> list[Record] | None:
            nonlocal position, wait
            while True:
                found = await fetch_once(
                    cluster, topic_partition, position, read_committed=True, wait=wait, max_bytes=max_bytes
                )
                if found is None:
                    return None
                if found.records or found.is_at_end:
                    return found.records
                if found.next_offset == position:
                    wait = _PAUSE
                    return None  # The broker throttles us, for example.
                position = found.next_offset

        return await self._query(query, topic_partition, f"the records of {topic_partition}")

    async def _query(
        self, query: Callable[[Cluster], Awaitable[T | None]], topic_partition: TopicPartition, what: str
    ) -> T:
        """Query the leader of a partition; retry until it says something or the timeout passes."""
        topic = topic_partition.topic
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            async with asyncio.timeout(_PATIENCE):
                while True:
                    cluster = (await self._connected()).cluster
                    try:
                        found = await query(cluster)
                    except WireError as error:
                        if not error.retriable:
                            raise request_error(error.cause._replace(topics=(topic,)), f"return {what}") from error
                    else:
                        if found is not None:
                            return found
                    await asyncio.sleep(_PAUSE)
                    with contextlib.suppress(WireError):
                        await cluster.look_up([topic])
                        if cluster.metadata.leader(topic_partition) is None:
                            is_denied = topic in cluster.metadata.denied
                            if is_denied or loop.time() > since + _GRACE:
                                raise no_leader(topic_partition, is_denied=is_denied)
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
        self._reader = KafkaSideTopics(settings, read_committed=settings.isolation_level == "read_committed")

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

    async def read(
        self, start: Mapping[int, int] | None = None, end: Mapping[int, int] | None = None
    ) -> AsyncIterator[list[Record]]:
        """Yield all records in chunks; records of one partition are in offset order.

        If retention overtakes us while we read, continue at the new start of the log.

        Args:
            start: Offsets to begin at, for partitions that do not begin at their start.
            end: Offsets to stop before, for partitions that are not read to their end.

        Raises:
            TransportError: The records cannot be read.
        """
        ends: dict[TopicPartition, int] = {}
        for at in self._partitions:
            log = self.ranges[at.partition]
            begin = max(log.start, (start or {}).get(at.partition, 0))
            stop = min(log.end, (end or {}).get(at.partition, log.end))
            if begin < stop:
                ends[at] = stop
                self._reader.seek(at, begin)
        loop = asyncio.get_running_loop()
        moved_at = loop.time()
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
                moved_at = loop.time()
            elif loop.time() - moved_at > _STALLED:
                raise TransportError(
                    f"{named(unread)} could not be read for {_STALLED:g} s: check that the brokers run, and that each "
                    "partition has a leader"
                )


@contextlib.asynccontextmanager
async def opened_topic(
    settings: Settings, topic: str, partitions: Collection[int] = ()
) -> AsyncIterator[tuple[KafkaAdmin, TopicReader]]:
    """Connect to a topic; yield an admin client and a reader.

    Args:
        settings: The brokers.
        topic: Its name.
        partitions: The partitions to read; empty means all.

    Raises:
        UnknownPartitionError: It has no such partition.
        TransportError: The topic does not exist, or no broker answers.
    """
    async with KafkaAdmin(settings) as administration:
        existing = await administration.partitions(topic)
        if missing := set(partitions) - existing:
            raise UnknownPartitionError(f"topic {topic!r} has no partition {min(missing)}: it has 0 to {max(existing)}")
        async with TopicReader(settings, topic, partitions or existing) as reader:
            yield administration, reader
