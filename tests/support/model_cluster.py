"""A cluster in memory that keeps logs: model brokers that answer metadata, fetches, sessions and offsets as Kafka does.

    cluster = ModelCluster(network)
    log = cluster.create("orders", partitions=1)[0]
    log.append(b"first", b"second")

Tests change what it does: `log.leader`, `broker.on(FETCH, …)`, `cluster.change_fetch`.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from aioshard.kafka.wire.requests import FETCH, LIST_OFFSETS, METADATA
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.batches import Content, batch, control, stored_at
from tests.support.memory_network import MemoryNetwork
from tests.support.model_broker import ModelBroker, Received
from tests.support.model_producers import Batch, Identity, Producers

ChangePart = Callable[[TopicPartition, dict[str, Any]], None]
"""Changes the answer about a partition before it is sent."""

START, END, LOCAL_START = -2, -1, -4
_NO_ID = uuid.UUID(int=0)


class Stored(NamedTuple):
    """A batch of a log."""

    first: int
    end: int
    """One past its last offset."""
    epoch: int
    data: bytes


class ModelLog:
    """The log of one partition.

    Attributes:
        name: The partition.
        leader: The node that leads it; None during an election.
        epoch: Its leader epoch.
        start: The first offset; retention raises it.
        local_start: The first offset that the leader has on its own disk, if others are in tiered storage.
        end: The end of the log.
        stable_end: The first offset of an open transaction; None if there is none.
        follower: The replica that the leader names as nearer to whoever is in a rack, while it is in sync.
        follower_end: Up to where this replica has the log; None for all of it.
        not_in_sync: The replicas that are behind, according to the metadata.
        offline: The replicas whose disk or broker has failed, according to the metadata.
        damaged: The replicas whose copies have a wrong checksum.
    """

    def __init__(self, cluster: "ModelCluster", name: TopicPartition, leader: int) -> None:
        self.name = name
        self.leader: int | None = leader
        self.epoch = 0
        self.start = 0
        self.local_start: int | None = None
        self.end = 0
        self.stable_end: int | None = None
        self.follower: int | None = None
        self.follower_end: int | None = None
        self.not_in_sync: set[int] = set()
        self.offline: set[int] = set()
        self.damaged: set[int] = set()
        self.batches: list[Stored] = []
        self.aborted: list[tuple[int, int]] = []
        """Producer and first offset of each aborted transaction."""
        self.times: dict[int, int] = {}
        """Offsets by time."""
        self.producers = Producers()
        """Those that have produced batches; see `produce`."""
        self._cluster = cluster

    def append(
        self,
        *values: bytes,
        codec: int = 0,
        gap: int = 0,
        producer: int = -1,
        transactional: bool = False,
        headers: list[tuple[str, bytes | None]] | None = None,
    ) -> None:
        """Appends one batch; *gap* offsets at its end hold nothing."""
        contents: list[Content] = [(None, value, headers or []) for value in values]
        first = self.end
        data = batch(
            first,
            contents,
            codec=codec,
            gap=gap,
            producer=producer,
            transactional=transactional,
            epoch=self.epoch,
        )
        self._store(data, first + len(values) + gap)

    def produce(self, data: bytes) -> tuple[int, int]:
        """Stores a batch of a producer unless it is refused or a duplicate; returns the error code and the offset."""
        produced = Batch(data)
        code, offset = self.producers.accept(produced, self.end)
        if not code and offset == self.end:
            self.stable_end = self.producers.first_open
            self._store(stored_at(offset, data, self.epoch), offset + len(produced.values))
        return code, offset

    def end_transaction(self, identity: Identity, *, commit: bool) -> None:
        """Writes the marker that ends a producer's transaction; one of an earlier epoch is refused."""
        if self.producers.is_past(identity):
            return
        producer, _ = identity
        first = self.producers.end_transaction(identity)
        if first is not None and not commit:
            self.aborted.append((producer, first))
        self.stable_end = self.producers.first_open
        kind: Literal["abort", "commit"] = "commit" if commit else "abort"
        self._store(control(self.end, producer, kind, epoch=self.epoch), self.end + 1)

    @property
    def visible(self) -> list[bytes]:
        """The values that a reader of committed records sees."""
        values: list[bytes] = []
        aborted: set[int] = set()
        for stored in self.batches:
            if stored.first >= self.readable_end(1):
                break
            read = Batch(stored.data)
            aborted |= {producer for producer, first in self.aborted if first == stored.first}
            if read.is_marker:
                aborted.discard(read.producer_id)
            elif not read.is_transactional or read.producer_id not in aborted:
                values += read.values
        return values

    def abort(self, first: int, producer: int) -> None:
        """Ends a transaction that began at *first*."""
        self.aborted.append((producer, first))
        self._store(control(self.end, producer, "abort", epoch=self.epoch), self.end + 1)

    def _store(self, data: bytes, end: int) -> None:
        self.batches.append(Stored(self.end, end, self.epoch, data))
        self.end = end
        self._cluster.changed()

    def truncate(self, end: int) -> None:
        """Loses everything from an offset on, as in an unclean election; it must be the border of batches."""
        self.batches = [stored for stored in self.batches if stored.end <= end]
        self.end = end

    def delete_before(self, offset: int) -> None:
        """Deletes what is before an offset."""
        self.start = offset
        self.batches = [stored for stored in self.batches if stored.end > offset]

    def lead(self, node: int | None) -> None:
        """Lets another broker lead it."""
        self.leader = node
        self.epoch += 1
        self._cluster.changed()

    @property
    def nearer(self) -> int | None:
        """The replica that the leader names now."""
        return None if self.follower in self.not_in_sync | self.offline else self.follower

    def readable_end(self, isolation: int) -> int:
        """The end for a reader."""
        if isolation and self.stable_end is not None:
            return self.stable_end
        return self.end

    def epoch_end(self, epoch: int) -> tuple[int, int] | None:
        """The largest epoch that is not above *epoch*, and where it ends; None if nothing is known of such an epoch."""
        known = [stored for stored in self.batches if stored.epoch <= epoch]
        if not known:
            return None
        later = [stored.first for stored in self.batches if stored.epoch > known[-1].epoch]
        return known[-1].epoch, min(later, default=self.end)

    def read(self, offset: int, end: int, most: int, *, is_first: bool) -> bytes:
        """The batches from an offset to an end; at least one if the response has none yet."""
        found = b""
        for stored in self.batches:
            if stored.end <= offset or stored.first >= end:
                continue
            if len(found) + len(stored.data) > most and (found or not is_first):
                break
            found += stored.data
        return found


@dataclass
class _Cached:
    """A partition as a broker knows it in a session."""

    wanted: Any
    high_watermark: int | None = None
    stable_end: int | None = None


@dataclass
class _Session:
    epoch: int
    by_id: bool
    partitions: dict[TopicPartition, _Cached] = field(default_factory=dict)


class ModelCluster:
    """Brokers on a network, and the logs that they keep.

    Attributes:
        brokers: By their node ids; they listen as kafka-1, kafka-2, …
        logs: By partition.
        topic_ids: The id of each topic.
        denied: Topics that this user may not see.
        without_ids: Topics whose id is zeros in metadata, as while a cluster is upgraded.
        sessions: The fetch sessions of each broker.
        change_fetch: Changes the answer about a partition before it is sent.
        change_offset: Does so for an offset of a log.
        throttle_ms: Delay of the next fetches; they return nothing.
    """

    def __init__(self, network: MemoryNetwork, brokers: int = 1) -> None:
        self.network = network
        self.brokers: dict[int, ModelBroker] = {}
        self.addresses: dict[int, str] = {}
        self.logs: dict[TopicPartition, ModelLog] = {}
        self.topic_ids: dict[str, uuid.UUID] = {}
        self.denied: set[str] = set()
        self.without_ids: set[str] = set()
        self.sessions: dict[int, dict[int, _Session]] = {}
        self.change_fetch: ChangePart = lambda _at, _part: None
        self.change_offset: ChangePart = lambda _at, _part: None
        self.throttle_ms = 0
        self._ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._waiting: set[asyncio.Task[None]] = set()
        for _ in range(brokers):
            self.add_broker()

    def add_broker(self) -> int:
        """Adds a broker, and returns its node id."""
        node = len(self.brokers) + 1
        broker = self.brokers[node] = ModelBroker()
        self.sessions[node] = {}
        (self.addresses[node],) = self.network.add(f"kafka-{node}", broker.protocol)
        broker.on(METADATA, self.describe)
        broker.on(LIST_OFFSETS, lambda request: self.list_offsets(node, request))
        broker.on(FETCH, lambda request: self.fetch(node, request))
        return node

    @property
    def settings(self) -> Settings:
        """Settings of a client."""
        servers = ",".join(f"kafka-{node}:9092" for node in self.brokers)
        return Settings(bootstrap_servers=servers, fetch_max_wait=0.5)

    def create(self, topic: str, partitions: int = 1) -> list[ModelLog]:
        """Creates a topic, or creates it again."""
        self.topic_ids[topic] = uuid.UUID(int=next(self._ids))
        nodes = itertools.cycle(self.brokers)
        names = [TopicPartition(topic, number) for number in range(partitions)]
        created = [ModelLog(self, name, next(nodes)) for name in names]
        self.logs |= {log.name: log for log in created}
        return created

    def extend(self, topic: str) -> ModelLog:
        """Adds a partition to a topic."""
        number = sum(name.topic == topic for name in self.logs)
        log = ModelLog(self, TopicPartition(topic, number), 1)
        self.logs[log.name] = log
        return log

    def delete(self, topic: str) -> None:
        """Deletes a topic."""
        del self.topic_ids[topic]
        self.logs = {name: log for name, log in self.logs.items() if name.topic != topic}

    def stop(self, node: int) -> None:
        """Ends a broker: connections are lost, and new ones refused."""
        self.network.listeners.pop(self.addresses[node])
        for session in self.brokers[node].open_sessions:
            session.close()

    def start(self, node: int) -> None:
        """Starts a broker again."""
        self.network.listeners[self.addresses[node]] = self.brokers[node].protocol

    def changed(self) -> None:
        """Answers fetches that wait for records, if there are some now."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fetches(self, node: int = 1) -> list[Any]:
        """The fetches that a broker got."""
        return [request.values for request in self.brokers[node].received(FETCH)]

    async def close(self) -> None:
        """Forgets the fetches that wait."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)

    # Metadata -------------------------------------------------------------------------

    def describe(self, request: Received) -> None:
        """Answers a request for metadata."""
        brokers = [{"node": node, "host": f"kafka-{node}", "port": 9092} for node in self.brokers]
        topics = [self._describe(topic) for topic in request.values.topics or ()]
        request.reply(brokers=brokers, controller=1, topics=topics)

    def _describe(self, asked: Any) -> dict[str, Any]:
        if asked.name is not None:
            return self._describe_topic(asked.name)
        for topic, topic_id in self.topic_ids.items():
            if topic_id == asked.id:
                return self._describe_topic(topic)
        return {"error": 100, "name": None, "id": asked.id}

    def _describe_topic(self, topic: str) -> dict[str, Any]:
        if topic in self.denied:
            return {"error": 29, "name": topic, "id": _NO_ID}
        if topic not in self.topic_ids:
            return {"error": 3, "name": topic, "id": _NO_ID}
        partitions = [
            {
                "error": 5 if log.leader is None else 0,
                "partition": log.name.partition,
                "leader": -1 if log.leader is None else log.leader,
                "epoch": log.epoch,
                "replicas": list(self.brokers),
                "in_sync": [node for node in self.brokers if node not in log.not_in_sync],
                "offline": list(log.offline),
            }
            for log in self.logs.values()
            if log.name.topic == topic
        ]
        topic_id = _NO_ID if topic in self.without_ids else self.topic_ids[topic]
        return {"name": topic, "id": topic_id, "partitions": partitions}

    def list_offsets(self, node: int, request: Received) -> None:
        """Answers a request for offsets."""
        topics = []
        for topic in request.values.topics:
            parts = []
            for part in topic.partitions:
                log = self.logs.get(TopicPartition(topic.topic, part.partition))
                answer: dict[str, Any] = {"partition": part.partition, "timestamp": -1, "offset": -1, "epoch": -1}
                if log is None or log.leader != node:
                    answer["error"] = 3 if log is None else 6
                elif part.timestamp == LOCAL_START:
                    answer["offset"] = log.start if log.local_start is None else log.local_start
                elif part.timestamp == START:
                    answer["offset"] = log.start
                elif part.timestamp == END:
                    answer["offset"] = log.readable_end(request.values.isolation)
                else:
                    answer["offset"] = log.times.get(part.timestamp, -1)
                self.change_offset(TopicPartition(topic.topic, part.partition), answer)
                parts.append(answer)
            topics.append({"topic": topic.topic, "partitions": parts})
        request.reply(topics=topics)

    # Fetch ----------------------------------------------------------------------------

    def fetch(self, node: int, request: Received) -> None:
        """Answers a fetch, now or when there is something to return."""
        values = request.values
        sessions = self.sessions[node]
        by_id = request.version >= 13
        if self.throttle_ms and values.session_epoch <= 0:
            request.reply(throttle_ms=self.throttle_ms)
            return
        if values.session_epoch <= 0:
            sessions.pop(values.session, None)
            number = 0
            session = _Session(1, by_id)
            if values.session_epoch == 0:
                number = next(self._ids)
                sessions[number] = session
        else:
            known = sessions.get(values.session)
            if known is None or known.epoch != values.session_epoch:
                request.reply(error=70 if known is None else 71)
                return
            number = values.session
            session = known
            session.epoch += 1
            if self.throttle_ms:
                request.reply(throttle_ms=self.throttle_ms, session=number)
                return
        names = {topic_id: topic for topic, topic_id in self.topic_ids.items()}
        for topic in values.forgotten:
            for partition in topic.partitions:
                name = names.get(topic.id, str(topic.id)) if by_id else topic.topic
                session.partitions.pop(TopicPartition(name, partition), None)
        for topic in values.topics:
            for part in topic.partitions:
                name = names.get(topic.id, str(topic.id)) if by_id else topic.topic
                wanted = (topic.id, part)
                session.partitions[TopicPartition(name, part.partition)] = _Cached(wanted)
        waiting = asyncio.get_running_loop().create_task(self._answer(node, request, number, session))
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)

    async def _answer(self, node: int, request: Received, number: int, session: _Session) -> None:
        is_full = request.values.session_epoch <= 0
        deadline = request.at + request.values.max_wait_ms / 1000
        while True:
            changed = self._changed
            parts = self._read(node, request, session, is_full=is_full)
            if any(part["error"] or part["records"] or "diverging" in part for _, _, part in parts):
                break
            if any(part.get("preferred", -1) >= 0 for _, _, part in parts):
                break
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                break
        topics = [{"topic": name.topic, "id": topic_id, "partitions": [part]} for name, topic_id, part in parts]
        for name, _, part in parts:
            if part["records"] and not is_full:  # others come first in the next answer
                session.partitions[name] = session.partitions.pop(name)
        request.reply(session=number, topics=topics)

    def _read(
        self, node: int, request: Received, session: _Session, *, is_full: bool
    ) -> list[tuple[TopicPartition, uuid.UUID | None, dict[str, Any]]]:
        """Returns the part of a response about each partition."""
        left = most = request.values.max_bytes
        found = []
        for name, cached in session.partitions.items():
            topic_id, wanted = cached.wanted
            part = self._read_part(name, _Asked(node, request, topic_id, wanted, left, is_first=left == most))
            self.change_fetch(name, part)
            left -= len(part["records"])
            ends = (part["high_watermark"], part["stable_end"])
            is_new = ends != (cached.high_watermark, cached.stable_end)
            if is_full or part["records"] or part["error"] or is_new or "diverging" in part or part["preferred"] >= 0:
                found.append((name, topic_id, part))
            if not part["error"]:
                cached.high_watermark, cached.stable_end = ends
        return found

    def _read_part(self, name: TopicPartition, asked: "_Asked") -> dict[str, Any]:
        part: dict[str, Any] = {
            "partition": name.partition,
            "error": 0,
            "high_watermark": -1,
            "stable_end": -1,
            "log_start": -1,
            "preferred": -1,
            "records": b"",
        }
        node, request, topic_id, wanted, *_ = asked
        log = self.logs.get(name)
        by_id = request.version >= 13
        if log is None or (by_id and self.topic_ids[name.topic] != topic_id):
            part["error"] = 100 if by_id else 3
        elif node not in (log.leader, log.follower):
            part["error"] = 6
        elif wanted.leader_epoch >= 0 and wanted.leader_epoch != log.epoch:
            part["error"] = 74 if wanted.leader_epoch < log.epoch else 75
        elif node == log.leader and request.values.rack and log.nearer is not None:
            part["preferred"] = log.nearer
        else:
            part |= _read_log(log, asked)
        return part


class _Asked(NamedTuple):
    """The part of a fetch about one partition."""

    node: int
    request: Received
    topic_id: uuid.UUID | None
    wanted: Any
    left: int
    """Bytes that the response may still have."""
    is_first: bool
    """Whether the response has no records yet: it then has a batch of any size."""


def damage(records: bytes) -> bytes:
    """Change the last byte of some batches, if there are any."""
    return records[:-1] + bytes([records[-1] ^ 1]) if records else records


def _read_log(log: ModelLog, asked: _Asked) -> dict[str, Any]:
    """Returns the answer of a broker that has the log, in addition to zeros."""
    wanted = asked.wanted
    isolation = asked.request.values.isolation
    end = log.end if asked.node == log.leader or log.follower_end is None else log.follower_end
    fetched_epoch = getattr(wanted, "fetched_epoch", None)
    if fetched_epoch is not None and fetched_epoch >= 0:
        known = log.epoch_end(fetched_epoch)
        if known is None:
            return {"error": 1}
        epoch, epoch_end = known
        if epoch < fetched_epoch or epoch_end < wanted.offset:
            return {"diverging": {"epoch": epoch, "end": epoch_end}}
    if not log.start <= wanted.offset <= end:
        return {"error": 1}
    part: dict[str, Any] = {
        "high_watermark": end,
        "stable_end": min(log.readable_end(1), end),
        "log_start": log.start,
        "aborted": [{"producer": producer, "first": first} for producer, first in log.aborted if isolation],
    }
    is_remote = log.local_start is not None and wanted.offset < log.local_start
    if asked.left > 0 and not is_remote:
        most = min(asked.left, wanted.max_bytes)
        readable = min(log.readable_end(isolation), end)
        records = log.read(wanted.offset, readable, most, is_first=asked.is_first)
        part["records"] = damage(records) if asked.node in log.damaged else records
    return part
