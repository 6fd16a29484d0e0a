"""The brokers of a model cluster as they handle transactions, with the faults that a test chooses.

    model = ModelTransactions(ModelCluster(network, 2), "group")
    model.choose_fault = lambda request: HELD if request.api is END_TXN else NO_FAULT
    ...
    assert model.visible("outputs") == {0: [b"first"]}

It knows nothing of the client. The decisions are those of Kafka 4.1; see `model_transaction_state`.
"""

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aioshard.kafka.offsets import Member
from aioshard.kafka.wire.cluster import CoordinatorKind
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    OFFSET_FETCH,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.records import TopicPartition
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster, ModelLog
from tests.support.model_producers import INVALID_EPOCH, OK, Batch, Identity
from tests.support.model_transaction_state import (
    ABORTABLE,
    CONCURRENT,
    FENCED,
    INVALID_STATE,
    SECOND_VERSION,
    UNSTABLE,
    Coordinator,
    GroupState,
    Participant,
    State,
    Transaction,
)

UNKNOWN_TOPIC, NOT_LEADER, LOADING, UNAVAILABLE, NOT_COORDINATOR, NOT_ENOUGH_REPLICAS = 3, 6, 14, 15, 16, 19
METADATA_TOO_LARGE, NOT_ATTEMPTED = 12, 55

FEATURE = "transaction.version"
SECOND_PRODUCE, SECOND_OFFSETS, SECOND_END = 12, 5, 5
"""The first version of each request that belongs to the second version of transactions."""
_MOST_METADATA = 4096
_BEFORE_ADDING = frozenset({3, 5, 6, 14, 15, 16, 29, 31, 35, 47, 48, 49, 51, 53, 56, 74, 75, 90, 100, 120})
"""Codes of Produce that a leader answers before it adds the partition to the transaction."""
_LAST_WITH_EPOCH_ERROR: Mapping[Api, int] = {
    INIT_PRODUCER_ID: 3,
    ADD_PARTITIONS_TO_TXN: 1,
    ADD_OFFSETS_TO_TXN: 1,
    END_TXN: 1,
}
"""The last versions that know 47 and not 90."""


@dataclass(frozen=True)
class Fault:
    """A fault of one request.

    Attributes:
        code: The error code to answer in place of the result; 0 for the result.
        is_executed: Whether the broker handles it.
        is_cut: Whether the connection is cut in place of an answer.
        is_held: Whether it is handled only when the test releases it. The connection is cut immediately.
        part: The only partition concerned, by its position modulo their number; None for all of them.
        is_omitted: Whether the answer leaves that partition out.
        delay: Seconds until it is handled.
    """

    code: int = 0
    is_executed: bool = True
    is_cut: bool = False
    is_held: bool = False
    part: int | None = None
    is_omitted: bool = False
    delay: float = 0.0

    def concerns(self, position: int, count: int) -> bool:
        """Whether it concerns a partition, by its position among all of the request."""
        return self.part is None or self.part % count == position


NO_FAULT = Fault()
LOST_ANSWER = Fault(is_cut=True)
LOST_REQUEST = Fault(is_cut=True, is_executed=False)
HELD = Fault(is_held=True)


def refused(code: int, part: int | None = None) -> Fault:
    """A request that is answered with a code and not handled."""
    return Fault(code, is_executed=False, part=part)


def failed(code: int, part: int | None = None) -> Fault:
    """A request that is handled, and answered with a code all the same."""
    return Fault(code, part=part)


class ModelTransactions:
    """The coordinators of transactions and of one group, and the leaders of partitions.

    Attributes:
        coordinator: The state of all transactional ids.
        group: The offsets and members of the group.
        nodes: The broker that coordinates, by kind.
        loading_until: Until when a coordinator loads its state, by kind and by the clock of the event loop.
        choose_fault: Chooses the fault of each request that arrives.
        held: The requests that are held back, in the order of their arrival.
        marker_delay: Returns the seconds until a marker is written.
        sweep: Seconds between two looks for transactions that are open for too long.
        throttle: Milliseconds for which the next answers to Produce tell the client to send nothing.
        verifies: Whether leaders ask the coordinator if a partition belongs to the transaction, as since Kafka 3.6.
        trace: A line for each request: when it was handled, where, what it said and how it was answered.
    """

    def __init__(self, cluster: ModelCluster, group_id: str, *, level: int = SECOND_VERSION) -> None:
        self.cluster = cluster
        self.group_id = group_id
        self.coordinator = Coordinator(level=level)
        self.group = GroupState()
        self.nodes = {CoordinatorKind.GROUP: 1, CoordinatorKind.TRANSACTION: 1}
        self.loading_until = dict.fromkeys(CoordinatorKind, 0.0)
        self.choose_fault: Callable[[Received], Fault] = lambda _: NO_FAULT
        self.held: list[Received] = []
        self.marker_delay: Callable[[], float] = lambda: 0.005
        self.sweep = 10.0
        self.throttle: list[int] = []
        self.verifies = True
        self.trace: list[str] = []
        self._held_markers: list[tuple[Transaction, Participant, Identity]] | None = None
        self._loop = asyncio.get_running_loop()
        self._timers: set[asyncio.TimerHandle] = set()
        handlers = {
            INIT_PRODUCER_ID: self._init,
            ADD_PARTITIONS_TO_TXN: self._add_partitions,
            ADD_OFFSETS_TO_TXN: self._add_offsets,
            PRODUCE: self._produce,
            TXN_OFFSET_COMMIT: self._commit_offsets,
            END_TXN: self._end,
            OFFSET_FETCH: self._fetch_offsets,
            FIND_COORDINATOR: self._find_coordinator,
        }
        self._handlers = handlers
        self._nodes_of = {id(broker): node for node, broker in cluster.brokers.items()}
        for broker in cluster.brokers.values():
            for api in handlers:
                broker.on(api, self._receive)
        self.set_level(level)
        self._later(self.sweep, self._look_for_old_transactions)

    # For tests ------------------------------------------------------------------------

    def set_level(self, level: int) -> None:
        """Changes the level of the feature `transaction.version`."""
        self.coordinator.level = level
        for broker in self.cluster.brokers.values():
            broker.features = {FEATURE: level} if level else {}

    def visible(self, topic: str) -> dict[int, list[bytes]]:
        """The values that a reader of committed records sees, by partition."""
        names = sorted(name for name in self.cluster.logs if name.topic == topic)
        return {name.partition: self.cluster.logs[name].visible for name in names}

    @property
    def committed(self) -> dict[TopicPartition, CommittedOffset]:
        """The committed offsets of the group."""
        return self.group.committed

    @property
    def is_calm(self) -> bool:
        """Whether no transaction is open or undecided."""
        transactions = self.coordinator.transactions.values()
        is_open = any(known.is_prepared or known.state is State.ONGOING for known in transactions)
        has_open_batches = any(log.producers.first_open is not None for log in self.cluster.logs.values())
        return not is_open and not self.group.unstable and not has_open_batches

    def move(self, kind: CoordinatorKind, node: int, loading: float = 0.0) -> None:
        """Lets another broker coordinate; it loads its state first."""
        self.nodes[kind] = node
        self.coordinator.reload()
        self.loading_until[kind] = self._loop.time() + loading

    def release(self, request: Received) -> dict[str, Any]:
        """Lets a held request arrive, on the connection that was cut; returns the answer that nobody hears."""
        self.held.remove(request)
        return self.repeat(request)

    def repeat(self, request: Received) -> dict[str, Any]:
        """Lets a copy of a request arrive; returns the answer that nobody hears."""
        return self._execute(request, NO_FAULT, "late ")

    def hold_markers(self) -> None:
        """Writes no marker of a transaction that is decided from now on."""
        self._held_markers = []

    def release_markers(self) -> None:
        """Writes the held markers, and later ones without waiting for this call."""
        held, self._held_markers = self._held_markers or [], None
        for transaction, participant, identity in held:
            self._mark(transaction, participant, identity)

    async def close(self) -> None:
        """Ends all timers."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await self.cluster.close()

    # Requests -------------------------------------------------------------------------

    def _receive(self, request: Received) -> None:
        fault = self.choose_fault(request)
        if fault.is_held:
            self.held.append(request)
            self._note(request, "held")
            request.cut()
        elif fault.delay:
            self._later(fault.delay, lambda: self._handle(request, fault))
        else:
            self._handle(request, fault)

    def _handle(self, request: Received, fault: Fault) -> None:
        if not fault.is_cut:
            request.reply(**self._execute(request, fault))
            return
        if fault.is_executed:
            self._execute(request, fault, "answer lost ")
        else:
            self._note(request, "request lost")
        request.cut()

    def _execute(self, request: Received, fault: Fault, how: str = "") -> dict[str, Any]:
        answer = self._handlers[request.api](request, fault)
        self._write_markers()
        self._note(request, how + _brief(answer))
        return answer

    def _node(self, request: Received) -> int:
        return self._nodes_of[id(request.session.broker)]

    def _note(self, request: Received, result: str) -> None:
        now = self._loop.time()
        values = _brief(request.values._asdict())
        self.trace.append(f"{now:8.3f} {self._node(request)} {request.api.name} {request.version} {values} -> {result}")

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            act()

        timer = self._loop.call_later(seconds, run)
        self._timers.add(timer)

    def _absence(self, kind: CoordinatorKind, node: int | None = None) -> int:
        """Returns an error code if a broker, or any, cannot answer as the coordinator."""
        if node is not None and self.nodes[kind] != node:
            return NOT_COORDINATOR
        return LOADING if self._loop.time() < self.loading_until[kind] else OK

    def _find_coordinator(self, request: Received, fault: Fault) -> dict[str, Any]:
        if fault.code:
            return {"error": fault.code, "node": -1, "port": -1, "host": ""}
        node = self.nodes[CoordinatorKind(request.values.kind)]
        return {"node": node, "host": f"kafka-{node}", "port": 9092}

    # The coordinator of transactions --------------------------------------------------

    def _init(self, request: Received, fault: Fault) -> dict[str, Any]:
        values = request.values
        code, identity = self._refusal(request, fault), (-1, -1)
        if not code:
            expected = (values.producer_id, values.epoch)
            is_new = values.producer_id is None or values.producer_id == -1
            timeout = values.timeout_ms / 1000
            code, identity = self.coordinator.init(values.transactional_id, timeout, None if is_new else expected)
        code = _known_code(request, fault.code or code)
        if code:
            identity = (-1, -1)
        return {"error": code, "producer_id": identity[0], "epoch": identity[1]}

    def _add_partitions(self, request: Received, fault: Fault) -> dict[str, Any]:
        names = _names(request.values.topics, lambda partition: partition)
        code = self._refusal(request, fault)
        missing = {name: UNKNOWN_TOPIC for name in names if name not in self.cluster.logs}
        if not code and fault.code and not fault.is_executed and fault.part is not None:
            missing[names[fault.part % len(names)]] = fault.code
        if not code and not missing:
            code = self._add(request.values, names)
        others = NOT_ATTEMPTED if missing else code
        codes = {name: _known_code(request, missing.get(name, others)) for name in names}
        return {"topics": _by_topic(_with_fault(codes, fault), lambda code: {"error": code})}

    def _add_offsets(self, request: Received, fault: Fault) -> dict[str, Any]:
        code = self._refusal(request, fault) or self._add(request.values, [request.values.group])
        return {"error": _known_code(request, fault.code or code)}

    def _add(self, values: Any, added: list[Any]) -> int:
        identity = (values.producer_id, values.epoch)
        return self.coordinator.add(values.transactional_id, identity, added, self._loop.time())

    def _end(self, request: Received, fault: Fault) -> dict[str, Any]:
        values = request.values
        code, identity = self._refusal(request, fault), (-1, -1)
        is_second = request.version >= SECOND_END
        if not code:
            code, identity = self.coordinator.end(
                values.transactional_id,
                (values.producer_id, values.epoch),
                commit=values.commit,
                raises_epoch=is_second,
            )
        code = _known_code(request, fault.code or code)
        if code:
            identity = (-1, -1)
        return {"error": code, "producer_id": identity[0], "epoch": identity[1]}

    def _refusal(self, request: Received, fault: Fault) -> int:
        """Returns the code of a request to the coordinator of transactions that is not handled."""
        if fault.code and not fault.is_executed and fault.part is None:
            return fault.code
        return self._absence(CoordinatorKind.TRANSACTION, self._node(request))

    def _look_for_old_transactions(self) -> None:
        self.coordinator.time_out(self._loop.time())
        self._write_markers()
        self._later(self.sweep, self._look_for_old_transactions)

    # Markers --------------------------------------------------------------------------

    def _write_markers(self) -> None:
        prepared, self.coordinator.prepared = self.coordinator.prepared, []
        for transaction in prepared:
            identity = (transaction.producer_id, transaction.epoch)
            markers = [
                (transaction, participant, identity) for participant in sorted(transaction.participants, key=str)
            ]
            if not markers:
                self._later(self.marker_delay(), functools.partial(self.coordinator.mark, transaction))
            elif self._held_markers is not None:
                self._held_markers += markers
            else:
                for marker in markers:
                    self._later(self.marker_delay(), functools.partial(self._mark, *marker))

    def _mark(self, transaction: Transaction, participant: Participant, identity: Identity) -> None:
        if isinstance(participant, str):
            self.group.end_transaction(identity, commit=transaction.is_commit)
        else:
            self.cluster.logs[participant].end_transaction(identity, commit=transaction.is_commit)
        self.coordinator.mark(transaction, participant)

    # Leaders --------------------------------------------------------------------------

    def _produce(self, request: Received, fault: Fault) -> dict[str, Any]:
        answers: dict[TopicPartition, dict[str, Any]] = {}
        data = {
            TopicPartition(topic.topic, part.partition): part.records
            for topic in request.values.topics
            for part in topic.partitions
        }
        for position, (name, records) in enumerate(data.items()):
            is_concerned = fault.concerns(position, len(data))
            answers[name] = self._write(request, name, records, fault if is_concerned else NO_FAULT)
            if fault.is_omitted and is_concerned:
                del answers[name]
        throttle_ms = self.throttle.pop(0) if self.throttle else 0
        return {"topics": _by_topic(answers, lambda answer: answer), "throttle_ms": throttle_ms}

    def _write(self, request: Received, name: TopicPartition, records: bytes, fault: Fault) -> dict[str, Any]:
        known = self.cluster.logs.get(name)
        offset = -1
        if fault.code in _BEFORE_ADDING and not fault.is_executed:
            code = fault.code
        elif known is None:
            code = UNKNOWN_TOPIC
        elif known.leader != self._node(request):
            code = NOT_LEADER
        else:
            code = self._begin_writing(request, known, Batch(records).identity)
            if not code and (fault.is_executed or not fault.code):
                code, offset = known.produce(records)
            if not code and fault.code:
                code, offset = fault.code, -1
        answer: dict[str, Any] = {"error": code, "offset": offset, "timestamp": -1}
        if code == NOT_LEADER and known is not None and known.leader is not None:
            answer["leader"] = {"node": known.leader, "epoch": known.epoch}
        return answer

    def _begin_writing(self, request: Received, log: ModelLog, identity: Identity) -> int:
        """Makes sure that a partition belongs to a transaction; returns an error code."""
        is_second = request.version >= SECOND_PRODUCE
        if log.producers.is_past(identity):
            return INVALID_EPOCH
        if log.producers.is_open(identity):
            return OK
        code = self._join(request.values.transactional_id, identity, log.name, adds=is_second)
        if not is_second and code in (CONCURRENT, LOADING, UNAVAILABLE, NOT_COORDINATOR):
            return NOT_ENOUGH_REPLICAS
        return INVALID_STATE if code == ABORTABLE and request.version < SECOND_PRODUCE - 1 else code

    def _join(self, transactional_id: str, identity: Identity, participant: Participant, *, adds: bool) -> int:
        """Asks the coordinator to add a participant, or whether it was added."""
        code = self._absence(CoordinatorKind.TRANSACTION) if adds or self.verifies else OK
        if not code and adds:
            now = self._loop.time()
            code = self.coordinator.add(transactional_id, identity, [participant], now, is_second=True)
        elif not code and self.verifies:
            code = self.coordinator.verify(transactional_id, identity, participant)
        return INVALID_EPOCH if code == FENCED else code

    # The coordinator of the group -----------------------------------------------------

    def _commit_offsets(self, request: Received, fault: Fault) -> dict[str, Any]:
        values = request.values
        offsets = {
            TopicPartition(topic.topic, part.partition): CommittedOffset(part.offset, part.leader_epoch, part.metadata)
            for topic in values.topics
            for part in topic.partitions
        }
        codes = dict.fromkeys(offsets, OK)
        if fault.code and not fault.is_executed:
            for position, name in enumerate(offsets):
                if fault.concerns(position, len(offsets)):
                    codes[name] = fault.code
        for name, offset in offsets.items():
            if len(offset.metadata) > _MOST_METADATA:
                codes[name] = METADATA_TOO_LARGE
        stored = {name: offset for name, offset in offsets.items() if not codes[name]}
        if stored:
            codes |= dict.fromkeys(stored, self._store_offsets(request, stored))
        return {"topics": _by_topic(_with_fault(codes, fault), lambda code: {"error": code})}

    def _store_offsets(self, request: Received, offsets: dict[TopicPartition, CommittedOffset]) -> int:
        values = request.values
        identity = (values.producer_id, values.epoch)
        code = self._absence(CoordinatorKind.GROUP, self._node(request))
        if code:
            return code
        if not self.group.is_open(identity):
            is_second = request.version >= SECOND_OFFSETS
            code = self._join(values.transactional_id, identity, values.group, adds=is_second)
            if code:
                return UNAVAILABLE if code in (LOADING, NOT_COORDINATOR) else code
        code = self.group.check(Member(values.generation, values.member, values.instance))
        return code or self.group.store(identity, offsets)

    def _fetch_offsets(self, request: Received, fault: Fault) -> dict[str, Any]:
        values = request.values
        code = fault.code or self._absence(CoordinatorKind.GROUP, self._node(request))
        is_stable = bool(values.stable)
        if request.version < 8:
            topics = [] if code else self._offsets(values.topics, is_stable=is_stable)
            return {"topics": topics, "error": code}
        groups = []
        for asked in values.groups:
            topics = [] if code else self._offsets(asked.topics, is_stable=is_stable)
            groups.append({"group": asked.group, "topics": topics, "error": code})
        return {"groups": groups}

    def _offsets(self, topics: Any, *, is_stable: bool) -> list[dict[str, Any]]:
        names = list(self.committed) if topics is None else _names(topics, lambda partition: partition)
        answers = {}
        for name in names:
            known = self.committed.get(name, CommittedOffset(-1, -1, ""))
            error = OK
            if is_stable and not self.group.is_stable(name):
                known, error = CommittedOffset(-1, -1, ""), UNSTABLE
            answers[name] = {**known._asdict(), "error": error}
        return _by_topic(answers, lambda answer: answer)


def _known_code(request: Received, code: int) -> int:
    last = _LAST_WITH_EPOCH_ERROR.get(request.api, -1)
    return INVALID_EPOCH if code == FENCED and request.version <= last else code


def _with_fault(codes: dict[TopicPartition, int], fault: Fault) -> dict[TopicPartition, int]:
    """Returns the codes of an answer whose request was handled, changed by a fault."""
    changed = dict(codes)
    for position, name in enumerate(codes):
        if not fault.concerns(position, len(codes)):
            continue
        if fault.is_omitted:
            del changed[name]
        elif fault.code and fault.is_executed and not codes[name]:
            changed[name] = fault.code
    return changed


def _names(topics: Any, number: Callable[[Any], int]) -> list[TopicPartition]:
    return [TopicPartition(topic.topic, number(part)) for topic in topics for part in topic.partitions]


def _by_topic(parts: Mapping[TopicPartition, Any], fields: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    grouped = itertools.groupby(parts.items(), lambda item: item[0].topic)
    return [
        {"topic": topic, "partitions": [{"partition": name.partition, **fields(value)} for name, value in items]}
        for topic, items in grouped
    ]


def _brief(value: Any) -> str:
    """Returns a request or an answer in few characters."""
    if isinstance(value, bytes):
        batch = Batch(value)
        texts = ",".join(text.decode(errors="replace") for text in batch.values)
        return f"<{batch.producer_id}/{batch.epoch}/{batch.sequence} {texts}>"
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        hidden = ("transactional_id", "timeout_ms", "acks", "timestamp", "host", "port", "throttle_ms", "instance")
        shown = {key: each for key, each in value.items() if key not in hidden and each is not None}
        return "{" + " ".join(f"{key}={_brief(each)}" for key, each in shown.items()) + "}"
    if isinstance(value, list):
        return "[" + " ".join(_brief(each) for each in value) + "]"
    return str(value)
