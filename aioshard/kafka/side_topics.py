"""Read partitions outside the group: the side-topics port on aiokafka's bare client."""

import asyncio
import copy
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from aiokafka import errors as kafka

from aioshard.errors import AuthorizationError, ClientLostError, ConnectError, TransportError
from aioshard.kafka.compacted import ensure_compacted
from aioshard.kafka.options import client_options
from aioshard.kafka.reading import Fetched, ReadingClient, connect
from aioshard.kafka.sharing import SharedClient
from aioshard.kafka.translate import reason
from aioshard.records import Record, TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["KafkaSideTopics"]

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds for a query, including all retries."""
_REQUEST_TIMEOUT = 5.0
"""Seconds without a response after which a broker counts as gone."""
_GRACE = 3.0
"""Seconds that a transient error may last before it is reported, such as a leader change."""
_PAUSE = 0.2
"""Seconds until the retry after a transient read error."""
_LONG_PAUSE = 1.0
"""The same after an error that is not transient."""
_SILENCE = 30.0
"""Seconds without a connection and a response after which a new client starts over with the bootstrap addresses."""
_TOLD_AGAIN = 5.0
"""Seconds between two reports of the same failure while `poll` can return records of other partitions."""


class _Watched:
    """A partition that `poll` reads."""

    __slots__ = ("asked", "due", "failing_since", "fault", "position", "told_at", "unsure")

    def __init__(self) -> None:
        self.position = 0
        self.asked = False
        """Whether a fetch for it is in flight, or its result is not processed yet."""
        self.unsure = False
        """Whether the last fetch left open if there are records: the next one lists this partition first."""
        self.due = 0.0
        """When it may be fetched again; loop time, like the others."""
        self.failing_since: float | None = None
        self.fault: TransportError | None = None
        """Why it cannot be read, once that has lasted for a while or is not transient."""
        self.told_at = 0.0
        """When the fault was last raised, or else appeared."""

    def fail(self, error: TransportError, now: float) -> None:
        """Record a failed read."""
        self.due = now + (_PAUSE if error.retriable else _LONG_PAUSE)
        if self.failing_since is None:
            self.failing_since = now
        if error.retriable and now - self.failing_since < _GRACE:
            return
        if self.fault is None:
            self.told_at = now
        self.fault = error

    def recover(self) -> None:
        """Record a successful read."""
        self.failing_since = self.fault = None


class KafkaSideTopics:
    """Reads side topics under `read_committed`; implements `aioshard.ports.SideTopics`.

    While a poll waits, each broker has one fetch in progress; its result is kept for the next poll.

    Invariants:
        * A position advances in the same step that returns its records.
    """

    def __init__(self, settings: "Settings") -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self._settings = settings
        self._options = client_options(settings, request_timeout=_REQUEST_TIMEOUT)
        self._shared = SharedClient("reader of side topics", functools.partial(connect, settings, self._options))
        self._watched: dict[TopicPartition, _Watched] = {}
        self._changed = asyncio.Event()
        self._fetches: dict[int, asyncio.Task[None]] = {}
        """The fetch in progress per broker."""
        self._fetched: list[tuple[TopicPartition, _Watched, Fetched]] = []
        self._stale: set[str] = set()
        """Topics whose partitions may have new leaders."""
        self._looking_up: asyncio.Task[None] | None = None
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
                client = await self._shared.get(time.monotonic())
                await ensure_compacted(client, self._options, topic, partitions)
        except TimeoutError:
            raise self._unanswered(f"of topic {topic!r}") from None

    async def close(self) -> None:
        """See `SideTopics.close`; takes at most 2 s."""
        tasks = [*self._fetches.values(), *([self._looking_up] if self._looking_up else [])]
        for task in tasks:
            task.cancel()
        await self._shared.close()
        self._changed.set()
        if tasks:
            await asyncio.wait(tasks)

    # Watching ---------------------------------------------------------------------------

    def watch(self, partitions: Collection[TopicPartition]) -> None:
        """See `SideTopics.watch`."""
        self._watched = {partition: self._watched.get(partition) or _Watched() for partition in partitions}
        self._changed.set()

    def position(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.position`."""
        watched = self._watched.get(topic_partition)
        return 0 if watched is None else watched.position

    async def poll(self, timeout: float) -> Sequence[Record]:
        """See `SideTopics.poll`. Does not raise transient errors that last less than 3 s.

        Raises:
            ClientLostError: The reader is closed.
            ConnectError: No broker can be reached.
            AuthenticationError: The brokers rejected our credentials, or we rejected their certificate.
            AuthorizationError: This user may not read a topic.
            CorruptRecordError: A batch cannot be read; nothing is skipped.
            TransportError: A partition cannot be read for another reason.
        """
        loop = asyncio.get_running_loop()
        since, deadline = time.monotonic(), loop.time() + timeout
        self._raise_fault(untold_since=loop.time() - _TOLD_AGAIN)
        while True:
            self._changed.clear()
            if self._shared.closed:
                raise self._shared.closed_error()
            records, moved = self._take(loop.time())
            if records or moved:
                return records
            try:
                async with asyncio.timeout_at(deadline):
                    if self._watched:
                        await self._wait(await self._shared.get(since))
                    else:
                        await self._changed.wait()
            except TimeoutError:
                if self._watched:
                    self._check_connection()
                self._raise_fault(untold_since=loop.time())
                return []

    async def _wait(self, client: ReadingClient) -> None:
        """Start the fetches that are due, and wait until something has changed or another fetch is due."""
        loop = asyncio.get_running_loop()
        due = self._fetch(client, loop.time())
        timer = None if due is None else loop.call_at(due, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _fetch(self, client: ReadingClient, now: float) -> float | None:
        """Send a fetch to each broker without one; return when the next partition is due."""
        due: list[float] = []
        asked: dict[int, dict[TopicPartition, _Watched]] = {}
        unknown: dict[TopicPartition, _Watched] = {}
        for at, watched in sorted(self._watched.items(), key=_unsure_first):
            node = client.leader(at)
            if watched.asked or node in self._fetches:
                continue
            if watched.due > now:
                due.append(watched.due)
            elif node is None:
                unknown[at] = watched
            else:
                watched.asked = True
                asked.setdefault(node, {})[at] = watched
        for node, partitions in asked.items():
            fetching = self._fetch_from(client, node, partitions)
            self._fetches[node] = asyncio.create_task(fetching, name=f"fetch from side topics at broker {node}")
        if (unknown or self._stale) and self._looking_up is None:
            self._looking_up = asyncio.create_task(self._look_up(client, unknown), name="look up side topics")
        return min(due, default=None)

    async def _fetch_from(self, client: ReadingClient, node: int, partitions: dict[TopicPartition, _Watched]) -> None:
        offsets = {at: watched.position for at, watched in partitions.items()}
        found: dict[TopicPartition, Fetched] = {}
        failure: kafka.KafkaError | TransportError = kafka.KafkaError("the broker left it out of its answer")
        try:
            found = await client.fetch(node, offsets, self._settings.fetch_max_wait)
        except kafka.KafkaError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - any error explains why no records arrive
            failure = ClientLostError(f"a fetch from side topics failed: {reason(error)}")
        finally:
            del self._fetches[node]
            for at, watched in partitions.items():
                self._fetched.append((at, watched, found.get(at) or Fetched([], offsets[at], -1, failure)))
            self._changed.set()

    async def _look_up(self, client: ReadingClient, unknown: dict[TopicPartition, _Watched]) -> None:
        """Look up the leaders of partitions where they are unknown or may have changed."""
        loop = asyncio.get_running_loop()
        topics = {at.topic for at in unknown} | self._stale
        self._stale.clear()
        try:
            for topic in topics:
                client.follow(topic)
            await client.look_up(next(iter(topics)))
            for at, watched in unknown.items():
                if client.leader(at) is None:
                    watched.fail(_unknown(client, at), loop.time())
        finally:
            self._looking_up = None
            self._changed.set()

    def _take(self, now: float) -> tuple[list[Record], bool]:
        """Process fetch results; return the records, and whether a position has moved."""
        records: list[Record] = []
        moved = False
        fetched, self._fetched = self._fetched, []
        for at, watched, found in fetched:
            watched.asked = False
            if self._watched.get(at) is not watched:
                continue
            records += found.records
            moved |= found.next_offset != watched.position
            watched.position = found.next_offset
            watched.unsure = found.error is None and not found.records and found.next_offset < found.end
            if found.error is None:
                self._answered_at = now
                watched.recover()
            else:
                self._stale.add(at.topic)
                watched.fail(_as_ours(found.error, f"the records of {at}", at.topic), now)
        return records, moved

    def _raise_fault(self, *, untold_since: float) -> None:
        for watched in self._watched.values():
            if watched.fault is not None and watched.told_at <= untold_since:
                watched.told_at = asyncio.get_running_loop().time()
                raise copy.copy(watched.fault)

    def _check_connection(self) -> None:
        client = self._shared.client
        if client is None or not client.connected:
            if client is not None and self._answered_at < asyncio.get_running_loop().time() - _SILENCE:
                self._shared.drop(client)
            servers = self._settings.bootstrap_servers
            raise ConnectError(f"no connection to a broker of {servers} is open: nothing of side topics can be read")

    # Queries ----------------------------------------------------------------------------

    async def end(self, topic_partition: TopicPartition) -> int:
        """See `SideTopics.end`. Takes at most 10 s."""

        async def ask(client: ReadingClient, node: int) -> int:
            return await client.end_offset(node, topic_partition)

        return await self._answered(ask, topic_partition, f"the end of {topic_partition}")

    async def read(self, topic_partition: TopicPartition, offset: int) -> Sequence[Record]:
        """See `SideTopics.read`. Takes at most 10 s.

        Raises:
            ConnectError: No broker can be reached.
            AuthorizationError: This user may not read the topic.
            CorruptRecordError: The batch cannot be read.
            TransportError: The records cannot be read now for another reason.
        """
        position = offset

        async def ask(client: ReadingClient, node: int) -> list[Record]:
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

        return await self._answered(ask, topic_partition, f"the records of {topic_partition}")

    async def _answered(
        self, ask: Callable[[ReadingClient, int], Awaitable[T]], topic_partition: TopicPartition, what: str
    ) -> T:
        """Query the leader of a partition; retry until it answers or the time-out passes."""
        since = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE):
                while True:
                    client = await self._shared.get(since)
                    node = client.leader(topic_partition)
                    try:
                        if node is not None:
                            return await ask(client, node)
                    except kafka.KafkaError as error:
                        if not _passes(error):
                            raise _as_ours(error, what, topic_partition.topic) from error
                    answered = await client.look_up(topic_partition.topic)
                    missing = answered and client.leader(topic_partition) is None
                    if missing and (client.may_not_see(topic_partition.topic) or time.monotonic() > since + _GRACE):
                        raise _unknown(client, topic_partition)
        except TimeoutError:
            raise self._unanswered(what) from None

    def _unanswered(self, what: str) -> TransportError:
        return ConnectError(
            f"the brokers of {self._settings.bootstrap_servers} did not tell {what} within {_PATIENCE:g} s: "
            "check that they run"
        )


def _unsure_first(item: tuple[TopicPartition, _Watched]) -> bool:
    return not item[1].unsure


def _unknown(client: ReadingClient, topic_partition: TopicPartition) -> TransportError:
    if client.may_not_see(topic_partition.topic):
        return _as_ours(kafka.TopicAuthorizationFailedError(topic_partition.topic), "", topic_partition.topic)
    return TransportError(f"{topic_partition} cannot be read: there is no such partition, or no broker leads it now")


def _as_ours(error: kafka.KafkaError | TransportError, what: str, topic: str) -> TransportError:
    if isinstance(error, TransportError):
        return error
    if isinstance(error, kafka.TopicAuthorizationFailedError):
        return AuthorizationError(
            f"the brokers do not allow this user to read topic {topic!r}: grant READ and DESCRIBE on it"
        )
    failed = TransportError(f"the brokers did not tell {what}: {reason(error)}")
    failed.retriable = _passes(error)
    return failed


def _passes(error: kafka.KafkaError) -> bool:
    """Whether an error may be transient. Errors that aiokafka does not know include those of a leader change."""
    return bool(error.retriable) or isinstance(error, kafka.UnknownError | kafka.ReplicaNotAvailableError)
