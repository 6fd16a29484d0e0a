"""A fetch session (KIP-227) as a value: what to send so that the broker knows which partitions are wanted, and where.

The broker remembers the offset, the epochs and the limit of each partition. A request names only what differs, and what
to forget; a response names only partitions that have something to report. There is one session for each broker, and one
fetch in flight in it. Neither a request nor silence changes what the broker is believed to know, only a response does.
"""

import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.requests import FETCH
from aioshard.records import TopicPartition

FIRST_BY_ID = 13
"""The first version of Fetch that names topics by id."""
NO_SESSION = 0
"""The session id of a request outside a session, and of a response whose broker keeps no session."""
_OPENING = 0
"""The epoch of a request that says everything. It closes the session that it names, and opens another one."""
_FINAL = -1
"""The epoch of a request that ends a session."""
_LAST_EPOCH = 2**31 - 1
_SESSION_UNKNOWN = 70
_CONSUMER = -1
"""The replica number of a client."""


class PartitionRequest(NamedTuple):
    """Which records of a partition a fetch requests."""

    topic_id: uuid.UUID | None
    """The id of the topic that the offset belongs to. None if it has none, or one of zeros."""
    offset: int
    leader_epoch: int = -1
    """The leader epoch that we know; the broker refuses the fetch if it knows another one. -1 if unknown."""
    fetched_epoch: int = -1
    """The leader epoch of the batch before the offset; the broker reports a log that differs. -1 if unknown."""
    max_bytes: int = 1024 * 1024


class SessionFetch(NamedTuple):
    """A fetch request in a session."""

    session: int
    session_epoch: int
    by_id: bool
    """Whether it names topics by id (version 13 or newer); otherwise by name (version 12 or older)."""
    changed: Mapping[TopicPartition, PartitionRequest]
    """Partitions that are new to the broker, or for which it knows something else; in the order of `wanted`."""
    forgotten: Collection[tuple[TopicPartition, uuid.UUID | None]]
    """Partitions that the broker is to forget, with the ids of their topics."""
    remembered: Mapping[TopicPartition, PartitionRequest]
    """The partitions that the broker knows once it has processed the request."""

    @property
    def is_full(self) -> bool:
        """Whether it names all partitions. The response then names all too."""
        return self.session_epoch <= _OPENING

    def fields(self) -> dict[str, Any]:
        """Return the fields of the request that depend on the session."""
        changed = (
            (partition, request.topic_id, _fields(partition, request)) for partition, request in self.changed.items()
        )
        forgotten = ((partition, topic_id, partition.partition) for partition, topic_id in self.forgotten)
        return {
            "session": self.session,
            "session_epoch": self.session_epoch,
            "topics": _by_topic(changed),
            "forgotten": _by_topic(forgotten),
        }


class SessionOutcome(NamedTuple):
    """The effect of a response on its session."""

    session: "FetchSession"
    """The session from now on."""
    parts: Mapping[TopicPartition, Any] | None
    """The partitions in the response; None if none of them counts. A partition that is missing has nothing to report.
    That does not mean that it has no records: it may be throttled, for example."""
    problem: str = ""
    """Why nothing in the response counts."""
    pause: bool = False
    """Whether to wait before the next fetch."""


@dataclass(frozen=True, slots=True)
class FetchSession:
    """A session with one broker, as far as its responses prove it.

    Invariant: if `epoch` is not 0 and the broker still has the session with this epoch, then it knows `known`.
    """

    id: int = NO_SESSION
    epoch: int = _OPENING
    """The epoch of the next request; 0 if it must say everything."""
    by_id: bool = False
    """Whether the session names topics by id."""
    known: Mapping[TopicPartition, PartitionRequest] = field(default_factory=dict)
    topics: Mapping[uuid.UUID | None, str] = field(default_factory=dict)
    """The topics of the session by their ids."""

    def plan(self, wanted: Mapping[TopicPartition, PartitionRequest], *, ids_allowed: bool) -> SessionFetch:
        """Return the next request.

        Args:
            wanted: The partitions to fetch. A broker fills its response in this order, except that in a session those
                that had records come last: rotate it outside a session.
            ids_allowed: Whether the broker understands topic ids. They are used if all topics have one.
        """
        in_session = self.epoch != _OPENING
        known = self.known if in_session else {}
        changed = {partition: request for partition, request in wanted.items() if known.get(partition) != request}
        # In a session by id, all unchanged partitions have ids.
        unproven = changed if in_session and self.by_id else wanted
        by_id = ids_allowed and all(request.topic_id is not None for request in unproven.values())
        replaced = [
            (partition, known[partition].topic_id)
            for partition, request in changed.items()
            if partition in known and known[partition].topic_id != request.topic_id
        ]
        # A session names topics in one way. By name, the broker would forget the new topic together with the old one.
        if not in_session or by_id != self.by_id or (replaced and not by_id):
            return SessionFetch(self.id, _OPENING, by_id, dict(wanted), (), dict(wanted))
        removed = [(partition, request.topic_id) for partition, request in known.items() if partition not in wanted]
        return SessionFetch(self.id, self.epoch, by_id, changed, [*removed, *replaced], dict(wanted))

    def answered(self, fetch: SessionFetch, response: Any) -> SessionOutcome:
        """Process the response to the latest request.

        Args:
            fetch: The request.
            response: The decoded response, with all its levels.
        """
        if response.error == _SESSION_UNKNOWN:
            return SessionOutcome(self._without_session(), None, "the broker has evicted the fetch session")
        if response.error:
            return SessionOutcome(
                self.unanswered(), None, f"the broker answered with error {response.error}", pause=True
            )
        topics = self._topics_of(fetch)
        parts, problem = _parts(fetch, topics, response)
        if fetch.is_full:
            if not parts and fetch.changed and response.throttle_ms > 0:
                # The delay of the connection is the pause.
                return SessionOutcome(self._without_session(), None, "the broker throttles us")
            if len(parts) < len(fetch.changed):
                problem = problem or f"the response lacks {len(fetch.changed) - len(parts)} of its partitions"
        elif response.session not in (NO_SESSION, self.id):
            problem = problem or "the response belongs to another fetch session"
        if problem:
            # The broker has opened a session already: close that one.
            at_broker = response.session if fetch.is_full and response.session else self.id
            return SessionOutcome(replace(self.unanswered(), id=at_broker), None, problem, pause=True)
        if response.session == NO_SESSION:
            return SessionOutcome(self._without_session(), parts)
        session = replace(
            self,
            id=response.session,
            epoch=fetch.session_epoch % _LAST_EPOCH + 1,
            by_id=fetch.by_id,
            known=fetch.remembered,
            topics=topics,
        )
        return SessionOutcome(session, parts)

    def unanswered(self) -> Self:
        """Return the session after a request without a usable response: the broker may have processed it or not.

        It keeps its id, so that the next request closes the session at the broker. Brokers keep an unused one for
        minutes, and have room for a limited number.
        """
        return replace(self, epoch=_OPENING)

    def closing(self) -> SessionFetch | None:
        """Return the request that ends the session at the broker; None if none is known."""
        if self.id == NO_SESSION:
            return None
        return SessionFetch(self.id, _FINAL, self.by_id, {}, (), {})

    def _without_session(self) -> Self:
        return replace(self, id=NO_SESSION, epoch=_OPENING)

    def _topics_of(self, fetch: SessionFetch) -> Mapping[uuid.UUID | None, str]:
        """Return the topics that a response may name by id."""
        named = {request.topic_id: partition.topic for partition, request in fetch.changed.items()}
        return named if fetch.is_full else {**self.topics, **named}


def outside_session(wanted: Mapping[TopicPartition, PartitionRequest], *, ids_allowed: bool) -> SessionFetch:
    """Return a request for which the broker opens no session.

    Args:
        wanted: The partitions to fetch.
        ids_allowed: Whether the broker understands topic ids.
    """
    by_id = ids_allowed and all(request.topic_id is not None for request in wanted.values())
    return SessionFetch(NO_SESSION, _FINAL, by_id, dict(wanted), (), dict(wanted))


def fetch_request(
    fetch: SessionFetch, *, max_bytes: int, wait: float, read_committed: bool, min_bytes: int = 1, rack: str = ""
) -> Request:
    """Return the whole request.

    Args:
        fetch: Its part about partitions.
        max_bytes: Bytes that the response may have, unless its first batch is larger.
        wait: Seconds that the broker may wait for records.
        read_committed: Whether the broker must hide records of open transactions, and name aborted ones.
        min_bytes: Bytes of records for which the broker waits.
        rack: Where we are; the leader may then name a nearer replica.
    """
    request = FETCH(
        replica=_CONSUMER,
        max_wait_ms=round(wait * 1000),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        isolation=int(read_committed),
        rack=rack,
        **fetch.fields(),
    )
    return request if fetch.by_id else request.up_to(FIRST_BY_ID - 1)


def _parts(
    fetch: SessionFetch, topics: Mapping[uuid.UUID | None, str], response: Any
) -> tuple[dict[TopicPartition, Any], str]:
    """Return the partitions of a response, and the first problem with them."""
    parts: dict[TopicPartition, Any] = {}
    for topic in response.topics or ():
        name = topics.get(topic.id, "") if fetch.by_id else topic.topic
        for part in topic.partitions or ():
            partition = TopicPartition(name, part.partition)
            request = fetch.remembered.get(partition)
            if request is None or (fetch.by_id and request.topic_id != topic.id):
                return parts, f"the response names {topic.topic or topic.id}/{part.partition}, which was not requested"
            if partition in parts:
                return parts, f"the response names {partition} twice"
            parts[partition] = part
    return parts, ""


def _fields(partition: TopicPartition, request: PartitionRequest) -> dict[str, int]:
    return {
        "partition": partition.partition,
        "leader_epoch": request.leader_epoch,
        "offset": request.offset,
        "fetched_epoch": request.fetched_epoch,
        "log_start": -1,  # only followers know it
        "max_bytes": request.max_bytes,
    }


def _by_topic(items: Iterable[tuple[TopicPartition, uuid.UUID | None, Any]]) -> list[dict[str, Any]]:
    """Group what a request says about partitions by topic, without changing the order: a topic may come again."""
    topics: list[dict[str, Any]] = []
    for partition, topic_id, value in items:
        if not topics or (topics[-1]["topic"], topics[-1]["id"]) != (partition.topic, topic_id):
            topics.append({"topic": partition.topic, "id": topic_id, "partitions": []})
        topics[-1]["partitions"].append(value)
    return topics
