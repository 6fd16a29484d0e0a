"""A test client: runs an app's real engine on the in-memory broker."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from aioshard.app import App
from aioshard.core.options import Growing, Park
from aioshard.dependencies import Overrides
from aioshard.engine.handler import Adapt, Handler
from aioshard.errors import StateError, TransportError
from aioshard.kafka.memory.broker import ConsumerGroup, InMemoryBroker
from aioshard.kafka.memory.producer import InMemoryProducer
from aioshard.kafka.memory.side_topics import InMemorySideTopics
from aioshard.kafka.memory.transport import InMemoryTransport, Latency
from aioshard.records import Record, TopicPartition
from aioshard.schema_registry.formats import RegistryFormat
from aioshard.serde.payloads import Headers, encoded, encoded_headers
from aioshard.testing.loop import VirtualTimeLoop

_COMMIT_INTERVAL = 0.02
_EPOCH = 1_700_000_000.0
"""Timestamp of a record at virtual time 0."""


class TestClient:
    """Runs an app on an in-memory broker: the same engine, without Kafka and `bootstrap_servers`.

    The app behaves as in production: shards, retries, commits, rebalances. Only the Kafka client is replaced, so you
    can script every failure that a broker can cause, here or on `broker`. An app with `assign` gets exactly those
    partitions here too, and no rebalance.

    While the test client runs, a group without `auto_offset_reset` begins at the earliest record, and commits are sent
    every 0.02 s, so that `settle` need not wait a second for each. In `aioshard.testing.run` all time is virtual;
    in any other event loop it is real, and *speed* shortens it.

    Example:
        >>> from aioshard import App, Record
        >>> from aioshard.testing import TestClient, run
        >>> app = App("billing")
        >>> paid = []
        >>> @app.consume("orders")
        ... async def on_order(record: Record) -> None:
        ...     paid.append(record.value)
        >>> async def test() -> None:
        ...     async with TestClient(app) as client:
        ...         record = await client.publish("orders", {"amount": 3}, key="customer-1")
        ...         await client.settle()
        ...         assert client.committed("orders", record.partition) == 1
        >>> run(test())
        >>> paid
        [b'{"amount":3}']
    """

    __test__ = False  # otherwise pytest would collect it as a test class

    def __init__(
        self,
        app: App,
        *,
        speed: float = 1.0,
        broker: InMemoryBroker | None = None,
        latency: Latency | None = None,
        adapt: Adapt | None = None,
        overrides: Overrides | None = None,
    ) -> None:
        """Create a client; entering it starts the app.

        Args:
            app: The app to run; its settings and handlers are restored afterwards.
            speed: Divides the delays of retries and parked keys and the linger of batches: 100 turns 30 s into 0.3 s.
            broker: Pass one to share it between several apps, or to prepare it; by default a new one.
            latency: Duration of each operation of the client, in seconds.
            adapt: Replaces each handler for this run.
            overrides: Replaces dependencies of handlers for this run; see `App.override_dependencies`.

        Raises:
            ValueError: *speed* is not positive.
        """
        if speed <= 0:
            raise ValueError(f"TestClient(speed={speed!r}): expected a positive number, such as 100")
        self.app = app
        self.broker = InMemoryBroker(clock=_timestamp) if broker is None else broker
        self.transports: list[InMemoryTransport] = []
        """Every client that the app has created so far, the current one last; use it to kill or crash a client."""
        self._speed = speed
        self._latency = latency
        self._adapt = adapt
        self._overrides = overrides or {}
        self._exit: contextlib.AsyncExitStack | None = None

    async def __aenter__(self) -> Self:
        """Start the app; return once the first assignment is complete."""
        if self._exit is not None:
            raise StateError(
                "this TestClient is already running: create another one, or enter it again after it has ended"
            )
        async with contextlib.AsyncExitStack() as stack:
            settings = self.app.settings
            stack.enter_context(
                changed_settings(
                    self.app,
                    auto_offset_reset=settings.auto_offset_reset or "earliest",
                    commit_interval=min(settings.commit_interval, _COMMIT_INTERVAL),
                )
            )
            stack.enter_context(self.app.override_dependencies(self._overrides))
            await stack.enter_async_context(
                self.app.started(
                    self._make_transport,
                    lambda: InMemoryProducer(self.broker),
                    lambda: InMemorySideTopics(self.broker),
                    adapt=self._adapted,
                    now=self.broker.now,
                )
            )
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the app as in production: drain, commit, leave the group.

        Raises:
            NotDrainedError: Records were still in flight after `shutdown_timeout`.
        """
        stack = self._exit
        self._exit = None
        if stack is not None:
            await stack.__aexit__(kind, error, traceback)

    def _adapted(self, spec: Handler) -> Handler:
        sped_up = _sped_up(spec, self._speed)
        return sped_up if self._adapt is None else self._adapt(sped_up)

    def _make_transport(self) -> InMemoryTransport:
        settings = self.app.settings
        transport = InMemoryTransport(
            self.broker,
            self.app.group_id,
            isolation_level=settings.isolation_level,
            latency=self._latency,
            rebalance_timeout=settings.rebalance_timeout,
            session_timeout=settings.session_timeout,
            assign=settings.assign,
        )
        self.transports.append(transport)
        return transport

    @property
    def group(self) -> ConsumerGroup:
        """The app's consumer group: rebalance it, lose its members, or commit from outside."""
        return self.broker.group(self.app.group_id)

    # Records ---------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        value: object,
        key: bytes | str | None = None,
        partition: int | None = None,
        headers: Headers = (),
        *,
        format: RegistryFormat | None = None,  # noqa: A002 - as in `App.publish`
    ) -> Record:
        """Append a record and return it.

        Args:
            topic: Created on first use, with 4 partitions.
            value: Bytes; a string, in UTF-8; None for a tombstone; anything else as JSON.
            key: Bytes or a string; records with the same key share a partition and stay in order.
            partition: By default the key's hash chooses it, and records without a key go round robin.
            headers: A mapping, or pairs of name and content.
            format: Encodes the value with a schema of a schema registry, as the producer of the topic would. The app
                must be running.
        """
        if format is not None:
            value = await self.app.running_engine().registries.encode(format, topic, value)
        return self.broker.publish(
            topic,
            value if isinstance(value, bytes) or value is None else encoded(value),
            key=None if key is None else encoded(key),
            partition=partition,
            headers=encoded_headers(headers),
        )

    def records(self, topic: str) -> Sequence[Record]:
        """Return the records of any topic, even one that only the app writes to, by timestamp, partition and offset."""
        return self.broker.records(topic)

    def committed(self, topic: str, partition: int) -> int | None:
        """Return the group's committed offset, or None."""
        return self.broker.committed(self.app.group_id, topic, partition)

    async def settle(self, timeout: float = 5.0) -> None:
        """Wait until nothing is incomplete and everything is committed on the assigned partitions.

        Args:
            timeout: Seconds after which to give up; virtual ones in `aioshard.testing.run`.

        Raises:
            TimeoutError: The app did not settle in time; the message names the reason.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.broker.until(lambda: not self._unsettled())
        except TimeoutError:
            trouble = self.app.statistics().trouble
            reasons = [*self._unsettled(), *([trouble] if trouble else []), *self.app.explain().splitlines()]
            raise TimeoutError("\n  ".join([f"the app did not settle within {timeout:g} s:", *reasons])) from None

    # Failures --------------------------------------------------------------------------

    async def revoke(self, topic: str, partition: int) -> None:
        """Give a partition to a member outside the app; return once the rebalance is complete.

        Raises:
            UnknownPartitionError: The partition does not exist.
            StateError: The app uses manual assignment, so no rebalance moves its partitions.
        """
        await self._rebalance(self.group.revoke, TopicPartition(topic, partition))

    async def assign(self, topic: str, partition: int) -> None:
        """Return a revoked partition to the app; return once the rebalance is complete.

        Raises:
            UnknownPartitionError: The partition does not exist.
            StateError: The app uses manual assignment, so no rebalance moves its partitions.
        """
        await self._rebalance(self.group.assign, TopicPartition(topic, partition))

    def fail_next_commit(self, error: TransportError, *, applied: bool = False) -> None:
        """Answer the next commit with *error*; with *applied*, it is stored and only the acknowledgement is lost."""
        self.broker.fail_next_commit(error, applied=applied)

    # Inside ----------------------------------------------------------------------------

    async def _rebalance(self, move: Callable[[TopicPartition], None], topic_partition: TopicPartition) -> None:
        self.broker.existing_log(topic_partition)
        if self.app.settings.assign is not None:
            raise StateError(
                f"partition {topic_partition} cannot be revoked or assigned: with assign no rebalance moves "
                "partitions; remove assign, or kill the client (transports[-1].kill())"
            )
        move(topic_partition)
        await self.broker.until(lambda: bool(self.group.members) and not self.group.rebalancing)

    def _unsettled(self) -> list[str]:
        """Describe in sentences why the app has not settled; the result changes only with the broker's state."""
        if not self.app.handlers:
            return []  # it is in no group
        sentences = []
        if self.app.settings.assign is None and (self.group.rebalancing or not self.group.members):
            sentences.append(f"group {self.app.group_id!r} rebalances")
        ours = self._expected_partitions()
        for topic_partition in ours:
            log = self.broker.log(*topic_partition)
            end = log.stable_end if self.app.settings.isolation_level == "read_committed" else log.end
            committed = self.committed(*topic_partition)
            if committed != end:
                sentences.append(f"{topic_partition} is committed up to {committed} and ends at {end}")
        for state in self.app.statistics().partitions:
            is_done = not state.incomplete and state.committed == state.committable
            if (state.topic, state.partition) in ours and not is_done:
                sentences.append(
                    f"incomplete records of {state.topic}/{state.partition}: {state.incomplete}; acknowledged up to "
                    f"{state.committed} of {state.committable}"
                )
        return sentences

    def _expected_partitions(self) -> list[TopicPartition]:
        """Return the partitions that the app has, or is about to have."""
        assign = self.app.settings.assign
        if assign is None:
            return [partition for partition in self.group.subscribed() if partition not in self.group.withheld]
        return [TopicPartition(topic, number) for topic, numbers in assign.items() for number in numbers]


@contextlib.contextmanager
def changed_settings(app: App, **changes: Any) -> Iterator[None]:
    """Change settings of *app* for a while."""
    before = {name: getattr(app.settings, name) for name in changes}
    app.configure(**changes)
    try:
        yield
    finally:
        app.configure(**before)


def _sped_up(spec: Handler, speed: float) -> Handler:
    """Return the handler with retry delays, batch linger and park delay divided by *speed*."""
    retry = spec.retry
    batch = spec.batch
    policy = spec.on_failure
    retry = dataclasses.replace(retry, initial=retry.initial / speed, maximum=retry.maximum / speed)
    if batch is not None:
        batch = dataclasses.replace(batch, linger=batch.linger / speed)
    if isinstance(policy, Park):
        policy = dataclasses.replace(policy, delay=_divided(policy.delay, speed))
    return spec._replace(retry=retry, batch=batch, on_failure=policy)


def _divided(delay: float | Growing, speed: float) -> float | Growing:
    if isinstance(delay, Growing):
        return dataclasses.replace(delay, initial=delay.initial / speed, maximum=delay.maximum / speed)
    return delay / speed


def _timestamp() -> float:
    """Return the current time, virtual if the loop is, so that a repeated run sees the same timestamps."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    return _EPOCH + loop.time() if isinstance(loop, VirtualTimeLoop) else time.time()
