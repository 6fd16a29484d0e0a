"""The coordinator of a group in a model cluster, and the faults that a test sets.

model = ModelCluster(network, 3)
group = ModelGroup(model)
group.errors = {TopicPartition("orders", 0): 27}
"""

from collections.abc import Iterable, Mapping
from typing import Any

from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import FIND_COORDINATOR, OFFSET_COMMIT, OFFSET_FETCH
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.records import TopicPartition
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster


class ModelGroup:
    """The committed offsets of one group; any broker stores and returns them.

    Attributes:
        coordinator: The node that the brokers name.
        commits: All commits that arrived, in order: the request, and its offsets.
        committed: The offsets that are stored.
        errors: The error codes of partitions. Their commits are not stored, and their offsets not returned.
        omitted: The partitions that responses leave out.
    """

    def __init__(self, model: ModelCluster, versions: Mapping[Api, tuple[int, int]] | None = None) -> None:
        self.model = model
        self.coordinator = 1
        self.commits: list[tuple[Any, dict[TopicPartition, CommittedOffset]]] = []
        self.committed: dict[TopicPartition, CommittedOffset] = {}
        self.errors: dict[TopicPartition, int] = {}
        self.omitted: set[TopicPartition] = set()
        for broker in model.brokers.values():
            broker.versions.update(versions or {})
            broker.on(FIND_COORDINATOR, self.find_coordinator)
            broker.on(OFFSET_COMMIT, self.commit)
            broker.on(OFFSET_FETCH, self.fetch_offsets)

    def received(self, api: Api) -> list[Received]:
        """Returns the requests of a kind that have arrived at any broker."""
        return [request for broker in self.model.brokers.values() for request in broker.received(api)]

    def find_coordinator(self, request: Received) -> None:
        """Names the coordinator."""
        request.reply(node=self.coordinator, host=f"kafka-{self.coordinator}", port=9092)

    def commit(self, request: Received) -> None:
        """Stores offsets, unless there is an error."""
        offsets = {
            TopicPartition(topic.topic, part.partition): CommittedOffset(
                part.offset, -1 if part.epoch is None else part.epoch, part.metadata
            )
            for topic in request.values.topics
            for part in topic.partitions
        }
        self.commits.append((request.values, offsets))
        self.committed.update({at: offset for at, offset in offsets.items() if not self.errors.get(at)})
        request.reply(topics=self._by_topic((at, {"error": self.errors.get(at, 0)}) for at in offsets))

    def fetch_offsets(self, request: Received) -> None:
        """Returns stored offsets."""
        if request.version < 8:
            request.reply(topics=self._stored(request.values.topics))
            return
        groups = [{"group": group.group, "topics": self._stored(group.topics)} for group in request.values.groups]
        request.reply(groups=groups)

    def _stored(self, topics: Any) -> list[dict[str, Any]]:
        if topics is None:
            asked = list(self.committed)
        else:
            asked = [TopicPartition(topic.topic, number) for topic in topics for number in topic.partitions]
        return self._by_topic((at, self._stored_at(at)) for at in asked)

    def _stored_at(self, at: TopicPartition) -> dict[str, Any]:
        stored = self.committed.get(at, CommittedOffset(-1, -1, ""))
        return {**stored._asdict(), "error": self.errors.get(at, 0)}

    def _by_topic(self, parts: Iterable[tuple[TopicPartition, dict[str, Any]]]) -> list[dict[str, Any]]:
        return [
            {"topic": at.topic, "partitions": [{"partition": at.partition, **part}]}
            for at, part in parts
            if at not in self.omitted
        ]
