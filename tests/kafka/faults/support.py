"""Shared parts of the broker fault tests: a fast app, a ledger of its handler, outside actions."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from aioshard import App, Record
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.clients import kafka_clients
from aioshard.observe import HandlerStatistics, PartitionStatistics
from aioshard.ports import TransportFactory
from aioshard.settings import Settings
from tests.support.cluster import KafkaCluster, Message
from tests.support.kafka_properties import Credentials

T = TypeVar("T", bound=Callable[..., Any])

DEADLINE = 30.0
"""Seconds that any wait may take; a healthy run needs a fraction of it."""

BROKERS_SESSION = 6.0
"""Seconds after which the tests' brokers remove a silent member of the consumer protocol."""
_OF_THE_BROKERS = "heartbeat_interval", "session_timeout"
"""Settings that a member of the consumer protocol cannot choose."""

LOOK_INTERVAL = 0.01
"""Seconds between two looks at statistics, which offer no event to wait for."""


def with_both_protocols(test: T) -> T:
    """Runs a test with each group protocol."""
    twice: T = pytest.mark.parametrize("protocol", ["classic", "consumer"])(test)
    return twice


def with_classic_at_least(test: T) -> T:
    """Runs a test with the classic group protocol, and with the consumer protocol under the mark `chaos`."""
    protocols = ["classic", pytest.param("consumer", marks=pytest.mark.chaos)]
    twice: T = pytest.mark.parametrize("protocol", protocols)(test)
    return twice


def quick_app(cluster: KafkaCluster | str, group: str, **overrides: Any) -> App:
    """An app that commits, notices rebalances and looks up topics within a fraction of a second.

    Under the consumer protocol it has the session and the heartbeats of the brokers, which are short too.
    """
    bootstrap = cluster if isinstance(cluster, str) else cluster.bootstrap
    quick: dict[str, Any] = {
        "bootstrap_servers": bootstrap,
        "auto_offset_reset": "earliest",
        "commit_interval": 0.1,
        "heartbeat_interval": 0.2,
        "session_timeout": 10,
        "rebalance_timeout": 15,
        "drain_timeout": 5,
        "metadata_max_age": 1,
        "fetch_max_wait": 0.05,
        "start_timeout": 20,
    }
    settings = quick | overrides
    if settings.get("group_protocol") == "consumer":
        settings = {name: value for name, value in settings.items() if name not in _OF_THE_BROKERS}
    return App(group, **settings)


def messages(count: int, *, keys: int = 7, start: int = 0, padding: int = 0) -> list[Message]:
    """*count* records with distinct values, spread over *keys* keys in turn, each longer by *padding* bytes."""
    return [(b"key-%d" % (number % keys), b"%d" % number + b"." * padding) for number in range(start, start + count)]


async def until(
    condition: Callable[[], Any], what: Callable[[], object] = lambda: "", timeout: float = DEADLINE
) -> None:
    """Return when *condition* holds.

    Raises:
        TimeoutError: It still did not after *timeout* seconds; the message holds what *what* returns.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + timeout
    while not condition():
        if loop.time() > give_up:
            raise TimeoutError(f"it did not come to that within {timeout:g} s: {what()}")
        await asyncio.sleep(LOOK_INTERVAL)


def partition_of(app: App, number: int) -> PartitionStatistics:
    """The statistics of one partition of the app's only topic.

    Raises:
        LookupError: It is not assigned to the app.
    """
    for partition in app.statistics().partitions:
        if partition.partition == number:
            return partition
    raise LookupError(f"partition {number} is not assigned: {app.explain()}")


def handler_of(app: App) -> HandlerStatistics:
    """The statistics of the app's only handler."""
    (handler,) = app.statistics().handlers
    return handler


class Ledger:
    """The records that handlers saw, in order.

    Register `handle` as the handler of one or several apps; while held, it starts and does not finish.

    Attributes:
        started: Every record of every run that began.
        finished: Every record of every run that returned.
        overlaps: Records that started while another one of their key and partition ran.
    """

    def __init__(self, *, pause: float = 0.0) -> None:
        self.started: list[Record] = []
        self.finished: list[Record] = []
        self.overlaps: list[Record] = []
        self._pause = pause
        self._holds: Callable[[Record], bool] = lambda _: False
        self._released = asyncio.Event()
        self._running: set[tuple[str, int, bytes | None]] = set()
        self._changed = asyncio.Event()

    async def handle(self, record: Record) -> None:
        """The handler."""
        lane = (record.topic, record.partition, record.key)
        if lane in self._running and record.key is not None:
            self.overlaps.append(record)
        self._running.add(lane)
        self.started.append(record)
        self._changed.set()
        try:
            if self._pause:
                await asyncio.sleep(self._pause)
            while self._holds(record):
                await self._released.wait()
        finally:
            self._running.discard(lane)
        self.finished.append(record)
        self._changed.set()

    def hold(self, which: Callable[[Record], bool] = lambda _: True) -> None:
        """From now on let only runs of other records than *which* finish; all others continue."""
        self._holds = which
        released, self._released = self._released, asyncio.Event()
        released.set()

    def release(self) -> None:
        """Let all runs finish again."""
        self.hold(lambda _: False)

    def offsets(self, partition: int) -> list[int]:
        """Offsets of one partition that finished, sorted."""
        return sorted(record.offset for record in self.finished if record.partition == partition)

    @property
    def values(self) -> list[bytes | None]:
        """Values of the finished records."""
        return [record.value for record in self.finished]

    @property
    def duplicates(self) -> list[str]:
        """`topic/partition/offset` of what finished more than once."""
        counted = Counter(f"{r.topic}/{r.partition}/{r.offset}" for r in self.finished)
        return [name for name, count in counted.items() if count > 1]

    async def until(self, condition: Callable[[], Any], timeout: float = DEADLINE) -> None:
        """Return when *condition* holds; it is looked at whenever a run begins or ends.

        Raises:
            TimeoutError: It still did not after *timeout* seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            found = f"{len(self.started)} runs began and {len(self.finished)} ended"
            raise TimeoutError(f"it did not come to that within {timeout:g} s: {found}") from None

    async def until_more_than(self, count: int) -> None:
        """Return when more than *count* runs have returned."""
        await self.until(lambda: len(self.finished) > count)

    async def until_finished(self, sent: Sequence[Message], timeout: float = DEADLINE) -> None:
        """Return when every one of *sent* has been processed."""
        wanted = {value for _, value in sent}

        def missing() -> set[bytes | None]:
            return wanted - set(self.values)

        try:
            await self.until(lambda: len(self.finished) >= len(wanted) and not missing(), timeout)
        except TimeoutError as late:
            lost = sorted(missing(), key=str)
            raise TimeoutError(f"{len(lost)} of {len(wanted)} records are missing: {lost[:5]}; {late}") from None

    def assert_in_order(self) -> None:
        """Of one key and partition never two concurrently, and none before an older one had finished (I4)."""
        assert self.overlaps == []
        newest: dict[tuple[str, int, bytes | None], int] = defaultdict(lambda: -1)
        done: dict[tuple[str, int, bytes | None], set[int]] = defaultdict(set)
        seen: dict[tuple[str, int, bytes | None], list[int]] = defaultdict(list)
        for record in self.finished:
            lane = (record.topic, record.partition, record.key)
            if record.offset not in done[lane]:
                assert record.offset > newest[lane], f"{lane}: {record.offset} came after {newest[lane]}: {seen[lane]}"
                newest[lane] = record.offset
            done[lane].add(record.offset)
            seen[lane].append(record.offset)


@asynccontextmanager
async def visiting(cluster: KafkaCluster, group: str, topic: str, **settings: Any) -> AsyncIterator[App]:
    """Another member of the group, which reads *topic*, for as long as this lasts.

    With its own topic it takes no partition away from the others: the group only rebalances.
    """
    guest = quick_app(cluster, group, **settings)
    ledger = Ledger()
    guest.consume(topic)(ledger.handle)
    async with guest:
        yield guest


async def commit_from_outside(cluster: KafkaCluster, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Sets the committed offsets of a group without members, as a reset tool does."""
    async with (
        asyncio.timeout(DEADLINE),
        AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap, group_id=group, enable_auto_commit=False) as outside,
    ):
        partitions = [KafkaPartition(topic, number) for number in offsets]
        outside.assign(partitions)
        await outside.commit({KafkaPartition(topic, number): offset for number, offset in offsets.items()})


async def members(cluster: KafkaCluster, group: str) -> list[str]:
    """The ids of the group's members, as its coordinator has them."""
    async with asyncio.timeout(DEADLINE), KafkaAdmin(Settings(bootstrap_servers=cluster.bootstrap)) as admin:
        return [member.member_id for member in (await admin.group(group)).members]


async def permit(cluster: KafkaCluster, user: Credentials, name: str) -> None:
    """Lifts what `tests.support.access.deny` had forbidden *user* on the topic or group *name*."""
    everything = AclBindingFilter(
        ResourceType.ANY,
        name,
        ResourcePatternType.LITERAL,
        f"User:{user.username}",
        "*",
        AclOperation.ANY,
        AclPermissionType.DENY,
    )
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    (answer,) = admin.delete_acls([everything]).values()
    async with asyncio.timeout(DEADLINE):
        assert await asyncio.wrap_future(answer)


async def kick(cluster: KafkaCluster, group: str, member_id: str) -> None:
    """Throws a member out of its group, of which it hears with its next request."""
    async with _admin(cluster) as admin:
        node = await admin.find_coordinator(group)
        answer = await admin._client.send(node, LeaveGroupRequest(group, member_id))
    assert answer.error_code == 0, answer


@asynccontextmanager
async def _admin(cluster: KafkaCluster) -> AsyncIterator[Any]:
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    async with asyncio.timeout(DEADLINE):
        try:
            await admin.start()
            yield admin
        finally:
            await admin.close()


def transport_of(app: App) -> TransportFactory:
    """Makes the client that an app consumes with."""
    return kafka_clients(app.settings, app.group_id).transport
