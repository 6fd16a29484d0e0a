"""Ids of topics, which tell a topic from another one of the same name that was created after it was deleted."""

import uuid
from collections.abc import Collection
from typing import Any

from aiokafka.protocol.api import Request
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from aioshard.kafka.group_protocol import Uuid, version_of

_NO_ID = uuid.UUID(int=0)


_METADATA = version_of(
    3,
    12,
    Schema(
        ("topics", CompactArray(("topic_id", Uuid), ("name", CompactString("utf-8")), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("topic_authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    ),
)


class TopicIds(Request[_METADATA]):  # type: ignore[misc]
    """Looks up the ids of topics. Raises `IncompatibleBrokerVersion` before Kafka 3.1."""

    API_KEY = 3

    def __init__(self, topics: Collection[str]) -> None:
        """Make the request."""
        self._topics = topics

    def build(self, request_struct_class: Any) -> Any:
        """Build the request in the version that the broker accepts."""
        topics: list[tuple[uuid.UUID, str, dict[int, bytes]]] = [(_NO_ID, topic, {}) for topic in sorted(self._topics)]
        return request_struct_class(topics, False, False, {})  # noqa: FBT003 - the protocol's order


def ids_in(response: Any) -> dict[str, uuid.UUID]:
    """Parse the response: the ids of the topics that exist."""
    return {name: topic_id for code, name, topic_id, *_ in response.topics if not code and topic_id != _NO_ID}
