"""A cluster of three real brokers on 127.0.0.1, and the faults to inject.

A test takes the fixture `brokers`, is marked `cluster` thereby, and has the cluster to itself until it ends:

    async def test_nothing_is_lost(brokers: ThreeBrokers, topic: str, group: str) -> None:
        await brokers.create_topic(topic, 3)                          # three replicas
        await brokers.create_topic("x", assignment={0: [1], 1: [2]})  # one replica each, on a chosen node
        await brokers.stop(1)                                         # partition 0 of "x" has no leader
        await brokers.start(1)
        node = await brokers.move_coordinator(group)                  # no broker dies
        held = brokers.proxies.hold(api_key=OFFSET_FETCH, client_id="successor")
        ...                                                           # an app at `brokers.proxied_bootstrap`
        await held.met.wait()
        held.lift()

Nodes are 1, 2 and 3, each in a rack of its own. `bootstrap` is the address without proxies, `proxied_bootstrap` the
one with: clients that begin there reach all three through `proxies`; see `tests.support.proxies` for what these do.
Every method has a deadline and returns when all brokers that answer see its effect. A test need not clean up: the next
one finds all nodes running, all replicas in sync and no rule in a proxy.
"""

import asyncio
import contextlib
import functools
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.admin import AlterPartitionReassignmentsRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.metadata import MetadataRequest
from confluent_kafka import ElectionType
from confluent_kafka import TopicPartition as ElectedPartition
from confluent_kafka.admin import AdminClient

from tests.support.cluster import DEADLINE, KafkaCluster
from tests.support.kafka import KafkaBroker
from tests.support.proxies import Proxies

NODES = (1, 2, 3)
START_TIMEOUT = 90.0
ANSWER_TIMEOUT_MS = 3_000
POLL_INTERVAL = 0.05
OFFSETS_TOPIC = "__consumer_offsets"
OFFSETS_PARTITIONS = 3

PROPERTIES = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "offsets.topic.num.partitions": str(OFFSETS_PARTITIONS),
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "transaction.state.log.num.partitions": "3",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    "unclean.leader.election.enable": "false",
    "auto.leader.rebalance.enable": "false",
    # A node that does not answer for so long leads nothing any more.
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "1000",
    # A follower that hangs leaves the replicas in sync, so that producers need not wait for it.
    "replica.lag.time.max.ms": "5000",
    # Three nodes that idle should leave the machine to others.
    "log.retention.check.interval.ms": "5000",
    "log.cleaner.backoff.ms": "5000",
    # A client that says in which rack it is reads from the replica there.
    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
}

Condition = Callable[[dict[str, Any]], bool]
"""Of what a broker says of the cluster."""


class ThreeBrokers(KafkaCluster):
    """Three nodes, each broker and controller; state is in a directory as that of `KafkaBroker`.

    Attributes:
        nodes: By their ids.
        proxied_bootstrap: Address of the listeners behind the proxies.
        proxies: In front of all nodes, while the cluster is entered with `async with`.
    """

    replication = 3

    def __init__(self, directory: Path, *, watched: int | None = None) -> None:
        cluster_id = uuid.uuid5(uuid.NAMESPACE_URL, str(directory))
        self.nodes = {
            node: KafkaBroker(directory / str(node), watched=watched, heap="384m", cluster_id=cluster_id)
            for node in NODES
        }
        voters = ",".join(f"{node}@127.0.0.1:{broker.ports.controller}" for node, broker in self.nodes.items())
        for node, broker in self.nodes.items():
            own = {"node.id": str(node), "controller.quorum.voters": voters, "broker.rack": rack_of(node)}
            broker.properties = {**PROPERTIES, **own}
        super().__init__(",".join(broker.bootstrap for broker in self.nodes.values()))
        self.proxied_bootstrap = ",".join(f"127.0.0.1:{broker.ports.proxy}" for broker in self.nodes.values())
        self.proxies = self._new_proxies()

    @property
    def reachable(self) -> str:
        return ",".join(self.nodes[node].bootstrap for node in self._answering)

    async def __aenter__(self) -> Self:
        """Bring everything into order: all nodes run, all replicas are in sync; and start proxies without rules."""
        for broker in self.nodes.values():
            if broker.running:
                broker.thaw()
        await asyncio.gather(*(broker.launch() for broker in self.nodes.values() if not broker.running))
        await self.until(_in_order, "three nodes with all replicas in sync", START_TIMEOUT)
        await self.coordinator_of("harness")
        await self.until(_in_order, "three nodes with all replicas in sync")  # the topic of offsets may be new
        self.proxies = await self._new_proxies().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.proxies.__aexit__()

    async def end(self) -> None:
        """End all nodes immediately, for good."""
        await asyncio.gather(*(broker.kill() for broker in self.nodes.values()))

    # Nodes -----------------------------------------------------------------------------------

    async def kill(self, node: int) -> None:
        """End a node immediately; the others notice after `broker.session.timeout.ms`, see `until_fenced`."""
        await self.nodes[node].kill()

    async def stop(self, node: int) -> None:
        """Let a node shut down in order; returns when the others know it as gone."""
        await self.nodes[node].stop()
        await self.until_fenced(node)

    async def start(self, node: int) -> None:
        """Start a node that does not run; returns when all know it as there."""
        await self.nodes[node].launch()
        await self.until(lambda seen: node in _registered(seen), f"node {node} is there", START_TIMEOUT)

    async def freeze(self, node: int) -> None:
        """Make a node hang: connections stay open and nothing is answered, until `thaw`."""
        self.nodes[node].freeze()
        while self.nodes[node].answers:  # noqa: ASYNC110  (the kernel sends no event)
            await asyncio.sleep(POLL_INTERVAL)

    async def thaw(self, node: int) -> None:
        """Resume a frozen node; returns when all nodes see it."""
        self.nodes[node].thaw()
        await self.until(lambda seen: node in _registered(seen), f"node {node} is there")

    async def until_fenced(self, node: int) -> None:
        """Return when the others know a killed, stopped or frozen node as gone."""
        await self.until(lambda seen: node not in _registered(seen), f"node {node} is gone")

    # Leaders ---------------------------------------------------------------------------------

    async def leader_of(self, topic: str, partition: int = 0) -> int | None:
        """The node that leads, as a broker sees it that answers; None without a leader."""
        seen = await self._describe(self._answering[0])
        leader = int(_partition(seen, topic, partition)["leader"])
        return leader if leader in _registered(seen) else None

    async def until_led(self, topic: str, partition: int, by: int | None) -> None:
        """Return when all see that node as the leader, or with None no leader."""
        wanted = -1 if by is None else by
        await self.until(
            lambda seen: _partition(seen, topic, partition)["leader"] == wanted, f"{topic}/{partition} led by {by}"
        )

    async def move_leader(self, topic: str, partition: int = 0, to: int | None = None) -> int:
        """Let another replica lead, *to* or the next one in order that is in sync, without a node dying."""
        found = _partition(await self._describe(self._answering[0]), topic, partition)
        replicas: list[int] = found["replicas"]
        if to is None:
            leader = found["leader"]
            to = int(min(set(found["isr"]) - {leader}, key=lambda node: (node - leader) % (len(NODES) + 1)))
        await self.reassign(topic, partition, [to, *(node for node in replicas if node != to)])
        await self.until(lambda seen: to in _partition(seen, topic, partition)["isr"], f"{to} is in sync")
        administrator = AdminClient({"bootstrap.servers": self.reachable})
        async with asyncio.timeout(DEADLINE):
            elected = administrator.elect_leaders(ElectionType.PREFERRED, [ElectedPartition(topic, partition)])
            await asyncio.wrap_future(elected)
        await self.until_led(topic, partition, to)
        return to

    async def reassign(self, topic: str, partition: int, replicas: Sequence[int]) -> None:
        """Put a partition on these nodes, the one that should lead first; returns when that is done."""
        wanted = list(replicas)
        request = AlterPartitionReassignmentsRequest(30_000, [(topic, [(partition, wanted, {})], {})], {})
        answer = await self._ask(self._answering[0], request)
        for code in [answer.error_code, *(code for _, ones, _ in answer.responses for _, code, *_ in ones)]:
            if code:
                raise for_code(code)(f"{topic}/{partition} to {wanted}")
        await self.until(
            lambda seen: _partition(seen, topic, partition)["replicas"] == wanted, f"{topic}/{partition} on {wanted}"
        )

    # Coordinators ----------------------------------------------------------------------------

    async def coordinator_of(self, group: str) -> int:
        """The node that coordinates a group, once all brokers that answer name the same."""
        named: list[int | None] = []
        async with self._deadline(lambda: f"one coordinator of {group}: {named}"):
            while None in (named := await self._named_coordinators(group)) or len(set(named)) != 1:  # noqa: ASYNC110
                await asyncio.sleep(POLL_INTERVAL)
        (node, *_) = named
        assert node is not None
        return node

    async def move_coordinator(self, group: str, to: int | None = None) -> int:
        """Let another node coordinate a group, *to* or the next one, without a node dying; returns which.

        The new one knows all that was committed before. Without that, a coordinator of Kafka's answers with older
        offsets, and no error, until it has learnt how far its log is replicated: up to a second.
        """
        await self.coordinator_of(group)
        await self._replicate_commits(group)
        to = await self.move_leader(OFFSETS_TOPIC, offsets_partition(group), to)
        async with self._deadline(lambda: f"{to} coordinates {group}"):
            while await self.coordinator_of(group) != to:  # noqa: ASYNC110  (a broker sends no event)
                await asyncio.sleep(POLL_INTERVAL)
        return to

    async def _replicate_commits(self, group: str) -> None:
        """Commit for another group beside *group*: with that, replicas learn that what lies before is committed."""
        names = (f"harness-{number}" for number in itertools.count())
        beside = next(name for name in names if offsets_partition(name) == offsets_partition(group))
        partition = TopicPartition(OFFSETS_TOPIC, 0)
        async with (
            asyncio.timeout(DEADLINE),
            AIOKafkaConsumer(bootstrap_servers=self.reachable, group_id=beside, enable_auto_commit=False) as member,
        ):
            member.assign([partition])
            await member.commit({partition: 0})

    # Questions -------------------------------------------------------------------------------

    async def until(self, condition: Condition, what: str, timeout: float = DEADLINE) -> None:
        """Return when *condition* holds of what each broker that answers says of the cluster.

        Raises:
            TimeoutError: It does not within *timeout* seconds.
        """
        seen: list[Any] = []

        async def look() -> bool:
            seen[:] = await asyncio.gather(*(self._try_describe(node) for node in self._answering))
            return bool(seen) and all(answer is not None and _holds(condition, answer) for answer in seen)

        async with self._deadline(lambda: f"{what}: {seen}", timeout):
            while not await look():  # noqa: ASYNC110
                await asyncio.sleep(POLL_INTERVAL)

    @property
    def _answering(self) -> list[int]:
        return [node for node, broker in self.nodes.items() if broker.answers]

    async def _until_led(self, admin: Any, topic: str, partitions: int) -> None:  # noqa: ARG002
        """Wait until every broker that answers knows the topic, as a client may ask any."""

        def led(seen: dict[str, Any]) -> bool:
            return all(_partition(seen, topic, number)["leader"] >= 0 for number in range(partitions))

        await self.until(led, f"{topic} with {partitions} partitions")

    async def _named_coordinators(self, group: str) -> list[int | None]:
        async def name(node: int) -> int | None:
            try:
                answer = await self._ask(node, FindCoordinatorRequest(group, 0))
            except (KafkaError, OSError, TimeoutError):
                return None
            return None if answer.error_code else int(answer.coordinator_id)

        return await asyncio.gather(*(name(node) for node in self._answering))

    async def _describe(self, node: int) -> dict[str, Any]:
        """Return a node's metadata of all brokers and topics."""
        answer: dict[str, Any] = (await self._ask(node, MetadataRequest(None))).to_object()
        return answer

    async def _try_describe(self, node: int) -> dict[str, Any] | None:
        try:
            return await self._describe(node)
        except (KafkaError, OSError, TimeoutError):
            return None

    async def _ask(self, node: int, request: Any) -> Any:
        """The answer of one node to one request, on a separate connection."""
        port = self.nodes[node].ports.plain
        connection = await create_conn("127.0.0.1", port, client_id="harness", request_timeout_ms=ANSWER_TIMEOUT_MS)
        try:
            return await connection.send(request)
        finally:
            connection.close()

    @contextlib.asynccontextmanager
    async def _deadline(self, what: Callable[[], str], timeout: float = DEADLINE) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError:
            tails = "\n".join(broker.tail() for broker in self.nodes.values() if not broker.running)
            raise TimeoutError(f"it did not come to that within {timeout:g} s: {what()}\n{tails}") from None

    def _new_proxies(self) -> Proxies:
        return Proxies({node: (broker.ports.proxy, broker.ports.proxied) for node, broker in self.nodes.items()})


def rack_of(node: int) -> str:
    """The rack of a node; no other is in it."""
    return f"rack-{node}"


def offsets_partition(group: str) -> int:
    """The partition of the topic of offsets that a group's coordinator leads: Java's hash of the group's id."""
    hashed = functools.reduce(lambda found, letter: (31 * found + letter) & 0xFFFFFFFF, group.encode(), 0)
    return abs(hashed - 2**32 if hashed >= 2**31 else hashed) % OFFSETS_PARTITIONS


def _registered(seen: Mapping[str, Any]) -> set[int]:
    return {broker["node_id"] for broker in seen["brokers"]}


def _partition(seen: Mapping[str, Any], topic: str, partition: int) -> dict[str, Any]:
    for found in seen["topics"]:
        if found["topic"] == topic:
            for described in found["partitions"]:
                if described["partition"] == partition:
                    return dict(described)
    raise LookupError(f"{topic}/{partition}")


def _holds(condition: Condition, seen: dict[str, Any]) -> bool:
    """Whether it does; not of a partition that the broker does not know yet."""
    try:
        return condition(seen)
    except LookupError:
        return False


def _in_order(seen: Mapping[str, Any]) -> bool:
    partitions = [described for topic in seen["topics"] for described in topic["partitions"]]
    return _registered(seen) == set(NODES) and all(
        described["leader"] >= 0 and set(described["isr"]) == set(described["replicas"]) for described in partitions
    )
