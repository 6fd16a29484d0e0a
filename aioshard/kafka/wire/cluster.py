"""The brokers of a cluster as one client sees them: metadata, coordinators, and requests to the right broker."""

import asyncio
import contextlib
import enum
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from aioshard.kafka.wire.connection import Connection, api_versions
from aioshard.kafka.wire.errors import ConnectionLostError, IncompleteResponseError, RequestTimedOutError, WireError
from aioshard.kafka.wire.metadata import Broker, ClusterMetadata, Update
from aioshard.kafka.wire.notation import Api, Request
from aioshard.kafka.wire.options import ConnectionOptions
from aioshard.kafka.wire.pool import IDLE_TIMEOUT, ConnectionPool, Purpose, Target
from aioshard.kafka.wire.requests import FIND_COORDINATOR, METADATA
from aioshard.kafka.wire.responses import (
    DescribedTopics,
    coordinator,
    described_topics,
    existing_topics,
    finalized_features,
)

logger = logging.getLogger("aioshard.kafka.wire.cluster")

T = TypeVar("T")

QUICK_TIMEOUT = 3.0
"""Seconds for a broker to answer a request that it can answer at once. Then another broker is asked."""
_LEAST_BACKOFF = 0.1
_MOST_BACKOFF = 1.0
"""Seconds between two attempts to learn something that no broker could tell; it doubles with each attempt."""
_NO_ID = uuid.UUID(int=0)


class CoordinatorKind(enum.IntEnum):
    """The kinds of coordinators; the values are Kafka's."""

    GROUP = 0
    TRANSACTION = 1


class Cluster:
    """A client's view of a cluster. Owned by one event loop.

    A single task keeps the metadata of the followed topics up to date. Questions go to any broker that answers, first
    to those with an open connection; when no known broker answers, to the bootstrap servers again.

    Invariants:
        * Looking up topics creates none, except by `look_up` with `create`.
        * A broker that hangs delays a look-up by at most `QUICK_TIMEOUT`, and no request to another broker.
    """

    def __init__(
        self,
        bootstrap: Collection[tuple[str, int]],
        options: ConnectionOptions,
        *,
        metadata_max_age: float = 300.0,
        idle_timeout: float = IDLE_TIMEOUT,
    ) -> None:
        """Know nothing yet; connects to nothing.

        Args:
            bootstrap: Host and port of the servers to ask first.
            options: How to connect.
            metadata_max_age: Seconds after which metadata are looked up again.
            idle_timeout: Seconds after which an unused connection is closed.
        """
        self.metadata = ClusterMetadata()
        self.bootstrap = tuple(bootstrap)
        """Host and port of the servers to ask when no known broker answers."""
        self._pool = ConnectionPool(options, idle_timeout=idle_timeout)
        self._metadata_max_age = metadata_max_age
        self._followed: set[str] = set()
        self._coordinators: dict[tuple[CoordinatorKind, str], int] = {}
        self._avoided: dict[tuple[CoordinatorKind, str], int] = {}
        """The coordinator that failed last; it is asked last who coordinates now, because it may hang."""
        self._behind: Target | None = None
        """The broker whose latest answer was older than what we know; it is asked last for topics."""
        self._refresh_wanted = asyncio.Event()
        self._updated = asyncio.Event()
        """Set once, at the next accepted answer, and then replaced."""
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False

    # Lifecycle ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to keep metadata up to date."""
        self._refreshing = asyncio.create_task(self._keep_up_to_date(), name="metadata of a Kafka cluster")

    async def close(self) -> None:
        """End the task and all connections; takes at most 1 s."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self._pool.close()
        if self._refreshing is not None:
            await asyncio.wait([self._refreshing])

    @property
    def is_connected(self) -> bool:
        """Whether a connection to any broker is open."""
        targets: list[Target] = [*self.metadata.brokers, *self.bootstrap]
        return any(self._pool.is_connected(target) for target in targets)

    def when_lost(self, act: Callable[["asyncio.Task[None]"], object]) -> None:
        """Call *act* when the task ends; see `failure`."""
        if self._refreshing is not None:
            self._refreshing.add_done_callback(act)

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the task, if any; then this object is no longer usable."""
        task = self._refreshing
        if task is None or not task.done():
            return None
        error = None if task.cancelled() else task.exception()
        return error or ConnectionLostError(f"the task for {task.get_name()} ended")

    # Requests -------------------------------------------------------------------------

    async def ask(
        self, node: int, request: Request, *, purpose: Purpose = Purpose.GENERAL, timeout: float | None = None
    ) -> Any:
        """Send a request to a broker, and return its response.

        Args:
            node: The broker's number.
            request: The request.
            purpose: Chooses the connection: a broker answers one request per connection at a time.
            timeout: Seconds to wait for the response; by default, as long as this kind of request may take.

        Raises:
            WireError: The broker did not answer.
        """
        try:
            return await self._pool.ask(node, request, purpose=purpose, timeout=timeout)
        except (ConnectionLostError, RequestTimedOutError):
            self.request_refresh()  # the broker may be gone, and others may lead its partitions by now
            raise

    async def supports(self, node: int, api: Api, version: int, *, purpose: Purpose = Purpose.GENERAL) -> bool:
        """Whether a broker speaks a version of a request, or a newer one; connects to it first.

        Raises:
            WireError: The broker did not answer.
        """
        connection = await self._connection(node, purpose)
        return connection.newest_version(api) >= version

    async def connect_to(self, node: int, *, purpose: Purpose = Purpose.GENERAL) -> None:
        """Open the connection to a broker, unless it is open.

        Call it before `ask` if it matters whether a request was sent: after an error here, nothing was.

        Raises:
            WireError: The broker did not answer.
        """
        await self._connection(node, purpose)

    async def _connection(self, node: int, purpose: Purpose) -> Connection:
        try:
            return await self._pool.connection(node, purpose=purpose)
        except ConnectionLostError:
            self.request_refresh()
            raise

    async def ask_any(self, request: Request, *, avoid: int | None = None) -> Any:
        """Send a request to one broker after the other until one answers; a request that each of them can answer.

        Args:
            request: The request; brokers answer it without delay.
            avoid: A broker to ask last.

        Raises:
            WireError: No broker answered.
        """

        def ask(target: Target) -> Awaitable[Any]:
            return self._pool.ask(target, request, purpose=Purpose.GENERAL, timeout=QUICK_TIMEOUT)

        return await self._first_answer(ask, avoid)

    async def _first_answer(self, ask: Callable[[Target], Awaitable[T]], avoid: Target | None = None) -> T:
        failure: WireError = ConnectionLostError("no broker is known")
        for target in self._candidates(avoid):
            try:
                return await ask(target)
            except WireError as error:
                logger.debug("broker %s did not answer: %s", target, error)
                failure = error
        raise failure

    async def features(self) -> dict[str, int]:
        """Ask a broker for the features of the cluster, each with its level; operators may change them at any time.

        Raises:
            WireError: No broker answered, or the answer has an error.
        """
        return finalized_features(await self.ask_any(api_versions()))

    def _candidates(self, avoid: Target | None = None) -> Iterable[Target]:
        """Return whom to ask: connected brokers, the other known ones, and the bootstrap servers last."""
        servers = random.sample(self.bootstrap, len(self.bootstrap))
        return [*self._nodes(avoid), *servers]

    def _nodes(self, avoid: Target | None = None) -> list[int]:
        """Return the known brokers, the connected ones first."""
        nodes = list(self.metadata.brokers)
        random.shuffle(nodes)
        nodes.sort(key=lambda node: (node == avoid, not self._pool.is_connected(node)))
        return nodes

    def any_broker(self) -> int:
        """Return a broker, if possible a connected one: for a question about the broker that answers.

        Raises:
            ConnectionLostError: No broker is known.
        """
        for node in self._nodes():
            return node
        raise ConnectionLostError("no broker is known")

    # Metadata -------------------------------------------------------------------------

    def follow(self, topics: Collection[str]) -> None:
        """Keep the metadata of these topics up to date too; the first answer comes soon."""
        if not self._followed.issuperset(topics):
            self._followed.update(topics)
            self.request_refresh()

    def follow_only(self, topics: Collection[str]) -> None:
        """Follow these topics, and forget the others that were followed."""
        for topic in self._followed.difference(topics):
            self.forget(topic)
        self.follow(topics)

    def forget(self, topic: str) -> None:
        """Stop following a topic."""
        self._followed.discard(topic)
        self.metadata.forget(topic)

    def learn_broker(self, broker: Broker) -> None:
        """Accept a broker that another one named in its answer."""
        self.metadata.learn_broker(broker)
        self._pool.know({broker.node: (broker.host, broker.port)})

    def request_refresh(self) -> None:
        """Look up the followed topics soon: something that a broker answered does not agree with what we know."""
        self._refresh_wanted.set()

    async def updated_after(self, version: int) -> None:
        """Wait until an answer was accepted after the one with this `ClusterMetadata.version`.

        Take the version first, then do what may need newer metadata: no update between the two is missed.
        """
        while self.metadata.version <= version:
            await self._updated.wait()

    async def look_up(self, topics: Collection[str], *, create: bool = False) -> Update:
        """Look up topics now, and return what has changed.

        Args:
            topics: Their names.
            create: Whether the brokers may create those that do not exist, if they are set up to do so.

        Raises:
            WireError: No broker answered, or none named the brokers of the cluster.
        """
        return await self._first_answer(lambda target: self.look_up_at(target, topics, create=create), self._behind)

    async def describe(self, topics: Collection[str]) -> DescribedTopics:
        """Look up topics now, and return what one broker says of them.

        Raises:
            WireError: No broker answered, or the answer has an error.
        """
        response = await self.ask_any(_metadata_request(topics))
        self._accept(response)
        return described_topics(response, topics)

    async def look_up_at(self, target: Target, topics: Collection[str], *, create: bool = False) -> Update:
        """Look up topics at one broker or server, and return what has changed; see `look_up`.

        Raises:
            WireError: It did not answer, or did not name the brokers of the cluster.
        """
        request = _metadata_request(topics, create=create)
        response = await self._pool.ask(target, request, purpose=Purpose.GENERAL, timeout=QUICK_TIMEOUT)
        update = self._accept(response)
        if update.is_stale:
            self._behind = target
        elif self._behind == target:
            self._behind = None
        if not response.brokers:
            raise IncompleteResponseError("the brokers of the cluster are missing in the response")
        return update

    async def names_of(self, topic_ids: Collection[uuid.UUID]) -> dict[uuid.UUID, str]:
        """Look up the names of topics by their ids; without those that the asked broker does not know.

        Raises:
            WireError: No broker answered, or the answer has an error.
        """
        response = await self.ask_any(_metadata_by_id(topic_ids))
        self._accept(response)
        described = described_topics(response, topic_ids).topics
        return {topic.topic_id: name for name, topic in described.items() if topic.topic_id is not None}

    def address_of(self, target: Target) -> str:
        """Return the host and port of a broker, for messages."""
        if not isinstance(target, int):
            host, port = target
            return f"{host}:{port}"
        broker = self.metadata.brokers.get(target)
        return f"broker {target}" if broker is None else f"{broker.host}:{broker.port}"

    async def list_topics(self) -> frozenset[str]:
        """Return all topics that this user may see, without Kafka's internal ones.

        Raises:
            WireError: No broker answered, or the answer has an error.
        """
        return existing_topics(await self.ask_any(_metadata_request(None)))

    def _accept(self, response: Any) -> Update:
        update = self.metadata.update(response, time.monotonic())
        self._pool.know({node: (broker.host, broker.port) for node, broker in self.metadata.brokers.items()})
        for topic, old_id, new_id in update.recreated:
            logger.warning("topic %s was deleted and created again: its id was %s and is %s now", topic, old_id, new_id)
        self._updated.set()
        self._updated = asyncio.Event()
        return update

    async def _keep_up_to_date(self) -> None:
        backoff = 0.0
        while True:
            if backoff:
                await asyncio.sleep(backoff)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._metadata_max_age):
                        await self._refresh_wanted.wait()
            self._refresh_wanted.clear()
            try:
                # Topics that somebody looked up must not stay as they were then.
                is_stale = (await self.look_up(self._followed.union(self.metadata.topics))).is_stale
            except WireError as error:
                logger.debug("the metadata are not up to date: %s", error)
                is_stale = True
            backoff = min(max(2 * backoff, _LEAST_BACKOFF), _MOST_BACKOFF) if is_stale else 0.0

    # Coordinators ---------------------------------------------------------------------

    async def coordinator(self, kind: CoordinatorKind, key: str) -> int:
        """Return the broker that coordinates a group or a transactional id; ask until one says it. Has no deadline.

        Raises:
            BrokerError: The brokers refuse to say, for example because this user may not see the group.
            ConnectionLostError: The client was closed.
        """
        backoff = _LEAST_BACKOFF
        while (kind, key) not in self._coordinators:
            try:
                await self.find_coordinator(kind, key)
            except WireError as error:
                if self._closed or not error.retriable:
                    raise
                logger.debug("the coordinator of %s is unknown: %s", key, error)
                await asyncio.sleep(backoff * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
                backoff = min(2 * backoff, _MOST_BACKOFF)
        return self._coordinators[kind, key]

    async def find_coordinator(self, kind: CoordinatorKind, key: str) -> Broker:
        """Ask once who coordinates a group or a transactional id, also if it is known.

        Raises:
            WireError: No broker answered, or the answer has an error.
        """
        response = await self.ask_any(FIND_COORDINATOR(key=key, kind=int(kind)), avoid=self._avoided.get((kind, key)))
        broker = coordinator(response, key)
        # It may be a broker that our metadata do not name yet.
        self._pool.know({broker.node: (broker.host, broker.port)})
        self._coordinators[kind, key] = broker.node
        self._avoided.pop((kind, key), None)
        return broker

    def known_coordinator(self, kind: CoordinatorKind, key: str) -> int | None:
        """Return the last known coordinator, without asking."""
        return self._coordinators.get((kind, key))

    def forget_coordinator(self, kind: CoordinatorKind, key: str, node: int) -> None:
        """Ask again who coordinates, because *node* does not, or does not answer; ignored if another one does now."""
        if self._coordinators.get((kind, key)) == node:
            del self._coordinators[kind, key]
            self._avoided[kind, key] = node


def _metadata_request(topics: Collection[str] | None, *, create: bool = False) -> Request:
    """Return a request for topics; for all of them if it is None."""
    names: list[Mapping[str, Any]] | None = None
    if topics is not None:
        names = [{"id": _NO_ID, "name": name} for name in sorted(topics)]
    return METADATA(topics=names, create_topics=create, cluster_operations=False, topic_operations=False)


def _metadata_by_id(topic_ids: Collection[uuid.UUID]) -> Request:
    topics = [{"id": topic_id, "name": None} for topic_id in sorted(topic_ids)]
    return METADATA(topics=topics, create_topics=False, cluster_operations=False, topic_operations=False)
