"""A fetch session against a model of a broker that remembers partitions as Kafka does, while messages get lost."""

import random
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.kafka.wire.fetch_session import FetchSession, PartitionRequest, SessionFetch, SessionOutcome
from aioshard.kafka.wire.requests import FETCH
from aioshard.records import TopicPartition

Wanted = dict[TopicPartition, PartitionRequest]
Key = tuple[str | uuid.UUID, int]
BY_NAME, BY_ID = 12, 13
LAST_EPOCH = 2**31 - 1


def topic_id(number: int) -> uuid.UUID:
    return uuid.UUID(int=number)


# A broker ---------------------------------------------------------------------------------


class Known(NamedTuple):
    """A partition as a broker remembers it."""

    offset: int
    leader_epoch: int
    fetched_epoch: int
    max_bytes: int


def known(request: PartitionRequest) -> Known:
    return Known(request.offset, request.leader_epoch, request.fetched_epoch, request.max_bytes)


@dataclass
class BrokerSession:
    by_id: bool
    partitions: dict[Key, Known]
    epoch: int = 1


@dataclass
class Broker:
    """The part of Kafka's `FetchManager` that decides what a session is."""

    rng: random.Random
    sessions: dict[int, BrokerSession] = field(default_factory=dict)
    has_room: bool = True
    throttles: bool = False
    created: int = 0

    def respond(self, fetch: SessionFetch) -> Any:
        """Read the bytes of a request, and respond to it."""
        version = BY_ID if fetch.by_id else BY_NAME
        others = {"replica": -1, "max_wait_ms": 0, "min_bytes": 1, "max_bytes": 1, "isolation": 0, "rack": ""}
        data = FETCH.encode(version, {**others, **fetch.fields()})
        request, end = FETCH._requests.codec(version, flexible=True).decode(data, 0)
        assert end == len(data)
        changed = {
            (topic.id if fetch.by_id else topic.topic, part.partition): Known(
                part.offset, part.leader_epoch, part.fetched_epoch, part.max_bytes
            )
            for topic in request.topics
            for part in topic.partitions
        }
        forgotten = [
            (topic.id if fetch.by_id else topic.topic, number)
            for topic in request.forgotten
            for number in topic.partitions
        ]
        if request.session_epoch <= 0:
            return self._full(request.session, request.session_epoch, changed, by_id=fetch.by_id)
        return self._incremental(request.session, request.session_epoch, changed, forgotten, by_id=fetch.by_id)

    def _full(self, number: int, epoch: int, changed: dict[Key, Known], *, by_id: bool) -> Any:
        self.sessions.pop(number, None)
        if self.throttles:
            return response(throttle_ms=100)
        created = 0
        if epoch == 0 and self.has_room and changed:
            self.created += 1
            created = 1000 + self.created
            self.sessions[created] = BrokerSession(by_id, changed)
        return response(session=created, parts=list(changed), by_id=by_id)

    def _incremental(
        self, number: int, epoch: int, changed: dict[Key, Known], forgotten: list[Key], *, by_id: bool
    ) -> Any:
        session = self.sessions.get(number)
        if session is None:
            return response(error=70)
        if session.epoch != epoch:
            return response(error=71, session=number)
        if session.by_id != by_id:
            return response(error=106, session=number)
        # In this order: what is named and forgotten is forgotten.
        session.partitions.update(changed)
        for key in forgotten:
            session.partitions.pop(key, None)
        if not session.partitions:
            del self.sessions[number]
            return response()
        session.epoch = session.epoch % LAST_EPOCH + 1
        if self.throttles:
            return response(session=number, throttle_ms=100)
        named = [key for key in session.partitions if self.rng.random() < 0.3]
        return response(session=number, parts=named, by_id=by_id)


def response(
    *, error: int = 0, session: int = 0, throttle_ms: int = 0, parts: Collection[Key] = (), by_id: bool = False
) -> Any:
    topics = [
        SimpleNamespace(
            topic=None if by_id else topic,
            id=topic if by_id else None,
            partitions=[SimpleNamespace(partition=number, key=(topic, number))],
        )
        for topic, number in parts
    ]
    return SimpleNamespace(error=error, session=session, throttle_ms=throttle_ms, topics=topics)


# A client ---------------------------------------------------------------------------------

TOPICS = ["a", "b", "c"]
PARTITIONS = [TopicPartition(topic, number) for topic in TOPICS for number in range(3)]


@dataclass
class World:
    """A client that changes its partitions and offsets all the time."""

    rng: random.Random
    ids: dict[str, uuid.UUID | None] = field(default_factory=lambda: dict.fromkeys(TOPICS))
    offsets: dict[TopicPartition, int] = field(default_factory=lambda: dict.fromkeys(PARTITIONS, 0))
    assigned: set[TopicPartition] = field(default_factory=lambda: set(PARTITIONS[:4]))
    used_ids: int = 0

    def create(self, topic: str) -> None:
        self.used_ids += 1
        self.ids[topic] = topic_id(self.used_ids)
        for number in range(3):
            self.offsets[TopicPartition(topic, number)] = 0

    def change(self) -> None:
        rng = self.rng
        for partition in rng.sample(PARTITIONS, rng.randrange(3)):
            self.offsets[partition] += rng.randrange(1, 10)
        if rng.random() < 0.3:
            self.assigned ^= set(rng.sample(PARTITIONS, rng.randrange(1, 4)))
        if rng.random() < 0.15:
            self.create(rng.choice(TOPICS))
        if rng.random() < 0.05:
            self.ids[rng.choice(TOPICS)] = None  # a broker that does not know the ids answered

    def wanted(self) -> Wanted:
        partitions = sorted(self.assigned)
        self.rng.shuffle(partitions)
        return {
            each: PartitionRequest(self.ids[each.topic], self.offsets[each], leader_epoch=self.offsets[each] // 20)
            for each in partitions
        }


Silence = Callable[[FetchSession, SessionFetch], FetchSession]


def simulate(  # noqa: C901, PLR0912, PLR0915 - one round after the other
    seed: int,
    *,
    session: FetchSession | None = None,
    on_silence: Silence = lambda session, _: session.unanswered(),
    ids: bool = True,
) -> None:
    """Run a client for some rounds, in which anything may go wrong, and for some more in which nothing does."""
    rng = random.Random(seed)
    broker = Broker(rng)
    world = World(rng)
    if ids:
        for topic in TOPICS:
            world.create(topic)
    session = session or FetchSession()
    unknowable: set[int] = set()
    """Sessions at the broker of which the client cannot have heard."""
    for number in range(60):
        calm = number >= 56
        world.change()
        if calm:
            world.assigned |= {PARTITIONS[0]}
        # A rolling upgrade, and an old broker that answers ids of zero.
        ids_allowed = ids and (calm or rng.random() < 0.97)
        fault = "none" if calm else rng.choice(["none"] * 6 + FAULTS)
        broker.has_room = fault != "no room"
        broker.throttles = fault == "throttled"
        if fault == "evicted":
            broker.sessions.clear()
        if fault == "out of step":
            for at_broker in broker.sessions.values():
                at_broker.epoch += 1
        wanted = world.wanted()
        before = session
        fetch = session.plan(wanted, ids_allowed=ids_allowed)
        assert session == before, "a request proves nothing"
        if fault == "request lost":
            session = on_silence(session, fetch)
            continue
        sessions = set(broker.sessions)
        got = broker.respond(fetch)
        if fault == "response lost":
            unknowable |= set(broker.sessions) - sessions
            session = on_silence(session, fetch)
            continue
        if fault == "server error":
            unknowable |= set(broker.sessions) - sessions
            got = response(error=-1, session=got.session)
        if fault == "foreign part":
            got.topics += response(parts=[(topic_id(999) if fetch.by_id else "foreign", 0)], by_id=fetch.by_id).topics
        if fault == "part twice":
            got.topics += got.topics
        is_strange = fault == "foreign part" or (fault == "part twice" and bool(got.topics))
        is_throttled = fault == "throttled" and fetch.is_full and bool(wanted)
        outcome = session.answered(fetch, got)
        session = outcome.session
        counts = not (got.error or is_strange or is_throttled)
        assert (outcome.parts is not None) == counts, outcome.problem
        if outcome.parts is not None:
            assert len(outcome.parts) == len(got.topics)
            check(broker, wanted, fetch, outcome)
        else:
            assert outcome.problem
            assert session.epoch == 0
        assert set(broker.sessions) <= {session.id} | unknowable, "the broker keeps a session that nobody uses"
    assert session.id in broker.sessions, "the partitions are in no session"


FAULTS = [
    "request lost",
    "response lost",
    "evicted",
    "out of step",
    "no room",
    "throttled",
    "server error",
    "foreign part",
    "part twice",
]


def check(broker: Broker, wanted: Wanted, fetch: SessionFetch, outcome: SessionOutcome) -> None:
    """Compare what the broker believes with what the client wants, after a response that counts."""
    session, parts = outcome.session, outcome.parts
    assert parts is not None
    if fetch.is_full:
        assert set(parts) == set(wanted)

    def key(partition: TopicPartition, request: PartitionRequest) -> Key:
        if not fetch.by_id:
            return partition.topic, partition.partition
        assert request.topic_id is not None
        return request.topic_id, partition.partition

    expected = {key(partition, request): known(request) for partition, request in wanted.items()}
    for partition, part in parts.items():
        assert part.key == key(partition, wanted[partition])
    if session.epoch:
        at_broker = broker.sessions[session.id]
        assert at_broker.partitions == expected
        assert (at_broker.epoch, at_broker.by_id) == (session.epoch, session.by_id)
    else:
        assert session.id == 0


@given(seed=st.integers(0, 2**32), ids=st.booleans())
def test_the_broker_believes_what_we_want(seed: int, *, ids: bool) -> None:
    simulate(seed, ids=ids)


def test_re_created_topics_by_name() -> None:
    """A client that knows the ids, and a broker that does not understand them."""
    for seed in range(100):
        rng = random.Random(seed)
        broker = Broker(rng)
        world = World(rng)
        session = FetchSession()
        for _ in range(30):
            world.change()
            wanted = world.wanted()
            fetch = session.plan(wanted, ids_allowed=False)
            assert not fetch.by_id
            outcome = session.answered(fetch, broker.respond(fetch))
            check(broker, wanted, fetch, outcome)
            session = outcome.session


# Planted mistakes -------------------------------------------------------------------------


class DropsItsId(FetchSession):
    def unanswered(self) -> "DropsItsId":
        return replace(super().unanswered(), id=0)


class ForgetsNothing(FetchSession):
    def plan(self, wanted: Mapping[TopicPartition, PartitionRequest], *, ids_allowed: bool) -> SessionFetch:
        fetch = super().plan(wanted, ids_allowed=ids_allowed)
        return fetch._replace(forgotten=())


class ForgetsNoOldTopic(FetchSession):
    def plan(self, wanted: Mapping[TopicPartition, PartitionRequest], *, ids_allowed: bool) -> SessionFetch:
        fetch = super().plan(wanted, ids_allowed=ids_allowed)
        return fetch._replace(forgotten=[pair for pair in fetch.forgotten if pair[0] not in wanted])


class ForgetsByName(FetchSession):
    """Forgets a re-created topic by name in the request that adds it."""

    def plan(self, wanted: Mapping[TopicPartition, PartitionRequest], *, ids_allowed: bool) -> SessionFetch:
        fetch = super().plan(wanted, ids_allowed=ids_allowed)
        if fetch.by_id or not self.epoch or self.by_id:
            return fetch
        changed = {partition: new for partition, new in wanted.items() if self.known.get(partition) != new}
        old = [(partition, None) for partition in self.known if partition in changed or partition not in wanted]
        return SessionFetch(self.id, self.epoch, False, changed, old, dict(wanted))  # noqa: FBT003


class CountsErrors(FetchSession):
    def answered(self, fetch: SessionFetch, response: Any) -> SessionOutcome:
        error = response.error if response.error in {70, 71, 106} else 0
        return super().answered(fetch, SimpleNamespace(**{**vars(response), "error": error}))


class ReadsAnyPart(FetchSession):
    def answered(self, fetch: SessionFetch, response: Any) -> SessionOutcome:
        topics = {topic.partitions[0].key: topic for topic in response.topics}
        expected = [topic for key, topic in topics.items() if key[0] not in {"foreign", topic_id(999)}]
        return super().answered(fetch, SimpleNamespace(**{**vars(response), "topics": expected}))


class KeepsASessionThatIsOver(FetchSession):
    def answered(self, fetch: SessionFetch, response: Any) -> SessionOutcome:
        outcome = super().answered(fetch, response)
        if outcome.parts is None or response.session:
            return outcome
        session = replace(self, epoch=fetch.session_epoch + 1, known=fetch.remembered, by_id=fetch.by_id)
        return outcome._replace(session=session)


class ReadsAThrottledResponse(FetchSession):
    def answered(self, fetch: SessionFetch, response: Any) -> SessionOutcome:
        outcome = super().answered(fetch, response)
        return outcome._replace(parts={}) if "throttles" in outcome.problem else outcome


class ClosesTheWrongSession(FetchSession):
    """After a strange response, it forgets the session that this response opened."""

    def answered(self, fetch: SessionFetch, response: Any) -> SessionOutcome:
        outcome = super().answered(fetch, response)
        if outcome.parts is None and not response.error and outcome.session.id:
            return outcome._replace(session=replace(outcome.session, id=self.id))
        return outcome


def simulate_many(**options: Any) -> None:
    for seed in range(100):
        simulate(seed, **options)


@pytest.mark.parametrize(
    "mistaken",
    [
        DropsItsId,
        ForgetsNothing,
        ForgetsNoOldTopic,
        CountsErrors,
        ReadsAnyPart,
        KeepsASessionThatIsOver,
        ReadsAThrottledResponse,
        ClosesTheWrongSession,
    ],
)
def test_a_planted_mistake_is_found(mistaken: type[FetchSession]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        simulate_many(session=mistaken())


def test_a_state_that_moves_before_the_answer_is_found() -> None:
    def moved(session: FetchSession, fetch: SessionFetch) -> FetchSession:
        return replace(session, epoch=fetch.session_epoch + 1, known=fetch.remembered, by_id=fetch.by_id)

    with pytest.raises((AssertionError, KeyError)):
        simulate_many(on_silence=moved)


def test_to_forget_a_re_created_topic_by_name_is_found() -> None:
    broker = Broker(random.Random(0))
    other = {PARTITIONS[1]: PartitionRequest(topic_id(1), 0)}

    def round_with(session: FetchSession, wanted: Wanted) -> FetchSession:
        fetch = session.plan(wanted, ids_allowed=False)
        outcome = session.answered(fetch, broker.respond(fetch))
        check(broker, wanted, fetch, outcome)
        return outcome.session

    session = round_with(ForgetsByName(), {PARTITIONS[0]: PartitionRequest(topic_id(1), 0), **other})
    with pytest.raises(AssertionError):
        round_with(session, {PARTITIONS[0]: PartitionRequest(topic_id(2), 0), **other})


# Single rules -----------------------------------------------------------------------------

ONE = {PARTITIONS[0]: PartitionRequest(topic_id(1), 5)}


def opened(session: int = 7) -> FetchSession:
    fetch = FetchSession().plan(ONE, ids_allowed=True)
    return FetchSession().answered(fetch, response(session=session, parts=[(topic_id(1), 0)], by_id=True)).session


def test_a_request_names_only_what_differs() -> None:
    session = opened()
    fetch = session.plan(ONE, ids_allowed=True)
    assert fetch.fields() == {"session": 7, "session_epoch": 1, "topics": [], "forgotten": []}

    session = session.answered(fetch, response(session=7)).session
    fetch = session.plan({PARTITIONS[1]: PartitionRequest(topic_id(1), 9, 3, 2, 100)}, ids_allowed=True)
    assert fetch.fields() == {
        "session": 7,
        "session_epoch": 2,
        "topics": [
            {
                "topic": "a",
                "id": topic_id(1),
                "partitions": [
                    {
                        "partition": 1,
                        "leader_epoch": 3,
                        "offset": 9,
                        "fetched_epoch": 2,
                        "log_start": -1,
                        "max_bytes": 100,
                    }
                ],
            }
        ],
        "forgotten": [{"topic": "a", "id": topic_id(1), "partitions": [0]}],
    }


def test_the_order_of_the_partitions_stays() -> None:
    order = [TopicPartition("b", 1), TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)]
    fetch = FetchSession().plan({each: PartitionRequest(None, 0) for each in order}, ids_allowed=True)
    named = [(topic["topic"], part["partition"]) for topic in fetch.fields()["topics"] for part in topic["partitions"]]
    assert named == order
    assert [topic["topic"] for topic in fetch.fields()["topics"]] == ["b", "a", "b"]


@pytest.mark.parametrize("error", [71, 106, -1, 3, 999])
def test_after_an_error_everything_is_said_and_the_session_is_closed(error: int) -> None:
    session = opened()
    outcome = session.answered(session.plan(ONE, ids_allowed=True), response(error=error))
    assert (outcome.parts, outcome.pause) == (None, True)
    assert str(error) in outcome.problem
    fetch = outcome.session.plan(ONE, ids_allowed=True)
    assert (fetch.session, fetch.session_epoch, fetch.changed) == (7, 0, ONE)


def test_an_evicted_session_is_opened_again_at_once() -> None:
    session = opened()
    outcome = session.answered(session.plan(ONE, ids_allowed=True), response(error=70))
    assert (outcome.parts, outcome.pause) == (None, False)
    fetch = outcome.session.plan(ONE, ids_allowed=True)
    assert (fetch.session, fetch.session_epoch, fetch.changed) == (0, 0, ONE)


def test_a_session_ends_with_its_last_epoch() -> None:
    assert FetchSession().closing() is None
    closing = opened().closing()
    assert closing is not None
    assert closing.fields() == {"session": 7, "session_epoch": -1, "topics": [], "forgotten": []}
    unanswered = opened().unanswered().closing()
    assert unanswered is not None
    assert unanswered.session == 7


def test_epochs_wrap_to_1() -> None:
    broker = Broker(random.Random(0), {7: BrokerSession(True, {(topic_id(1), 0): known(ONE[PARTITIONS[0]])})})  # noqa: FBT003
    broker.sessions[7].epoch = LAST_EPOCH - 1
    session = replace(opened(), epoch=LAST_EPOCH - 1)
    sent = []
    for _ in range(4):
        fetch = session.plan(ONE, ids_allowed=True)
        sent.append(fetch.session_epoch)
        outcome = session.answered(fetch, broker.respond(fetch))
        assert outcome.parts is not None
        session = outcome.session
    assert sent == [LAST_EPOCH - 1, LAST_EPOCH, 1, 2]


def test_an_empty_response_to_a_full_request_is_not_nothing_there() -> None:
    fetch = FetchSession().plan(ONE, ids_allowed=True)
    throttled = FetchSession().answered(fetch, response(throttle_ms=50))
    assert (throttled.parts, throttled.session, throttled.pause) == (None, FetchSession(), False)
    incomplete = FetchSession().answered(fetch, response(session=9))
    assert (incomplete.parts, incomplete.pause) == (None, True)
    assert "lacks 1" in incomplete.problem
    again = incomplete.session.plan(ONE, ids_allowed=True)
    assert (again.session, again.session_epoch) == (9, 0), "it closes the session that the broker has opened"


def test_a_response_of_another_session_does_not_count() -> None:
    session = opened()
    outcome = session.answered(session.plan(ONE, ids_allowed=True), response(session=8))
    assert outcome.parts is None
    assert (outcome.session.id, outcome.session.epoch) == (7, 0)


def test_without_room_each_request_says_everything() -> None:
    session = FetchSession()
    for _ in range(3):
        fetch = session.plan(ONE, ids_allowed=True)
        assert (fetch.session, fetch.session_epoch, fetch.changed) == (0, 0, ONE)
        outcome = session.answered(fetch, response(parts=[(topic_id(1), 0)], by_id=True))
        assert set(outcome.parts or ()) == set(ONE)
        session = outcome.session


def test_one_topic_without_an_id_makes_the_whole_request_go_by_name() -> None:
    mixed = {**ONE, TopicPartition("b", 0): PartitionRequest(None, 0)}
    assert FetchSession().plan(ONE, ids_allowed=True).by_id
    assert not FetchSession().plan(ONE, ids_allowed=False).by_id
    assert not FetchSession().plan(mixed, ids_allowed=True).by_id
    fetch = opened().plan(mixed, ids_allowed=True)
    assert (fetch.session, fetch.session_epoch, fetch.by_id) == (7, 0, False), "a session names topics in one way"
    by_name = opened().answered(fetch, response(session=8, parts=[("a", 0), ("b", 0)])).session
    fetch = by_name.plan(mixed, ids_allowed=True)
    assert (fetch.session_epoch, fetch.by_id, fetch.changed) == (1, False, {})
    assert by_name.plan(ONE, ids_allowed=True).by_id, "as soon as all have ids"


def test_two_topics_of_one_name_are_not_mixed() -> None:
    both = {PARTITIONS[0]: PartitionRequest(topic_id(1), 0), PARTITIONS[1]: PartitionRequest(topic_id(2), 0)}
    topics = FetchSession().plan(both, ids_allowed=True).fields()["topics"]
    assert [(topic["id"], len(topic["partitions"])) for topic in topics] == [(topic_id(1), 1), (topic_id(2), 1)]


def test_the_old_topic_of_a_partition_is_not_taken_for_the_new_one() -> None:
    session = opened()
    fetch = session.plan({PARTITIONS[0]: PartitionRequest(topic_id(2), 0)}, ids_allowed=True)
    assert fetch.forgotten == [(PARTITIONS[0], topic_id(1))]
    late = response(session=7, parts=[(topic_id(1), 0)], by_id=True)
    assert session.answered(fetch, late).parts is None
