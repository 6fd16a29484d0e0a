"""Consumer group requests in versions that aiokafka lacks: describe a group, fetch its offsets."""

import uuid
from io import BytesIO
from typing import Any

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.admin import DescribeGroupsRequest_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.commit import OffsetFetchRequest_v1, OffsetFetchRequest_v3
from aiokafka.protocol.types import (
    Array,
    Boolean,
    Bytes,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)


class Uuid(AbstractType[uuid.UUID]):  # type: ignore[misc]
    """A UUID of 16 bytes."""

    @classmethod
    def encode(cls, value: uuid.UUID) -> bytes:
        """Encode a UUID."""
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> uuid.UUID:
        """Decode a UUID."""
        return uuid.UUID(bytes=data.read(16))


def version_of(key: int, version: int, request: Schema, response: Schema) -> Any:
    """Return the class of one version of a request, in the form that aiokafka needs."""
    number = {"API_KEY": key, "API_VERSION": version}
    response_type = type("_Response", (Response,), {**number, "SCHEMA": response})
    fields = {"SCHEMA": request, "RESPONSE_TYPE": response_type, "FLEXIBLE_VERSION": "tags" in request.names}
    return type("_RequestStruct", (RequestStruct,), number | fields)


# DescribeGroups in version 4 --------------------------------------------------------------

_DESCRIBE_GROUP = version_of(
    15,
    4,
    DescribeGroupsRequest_v3.SCHEMA,
    Schema(
        ("throttle_time_ms", Int32),
        (
            "groups",
            Array(
                ("error_code", Int16),
                ("group", String("utf-8")),
                ("state", String("utf-8")),
                ("protocol_type", String("utf-8")),
                ("protocol", String("utf-8")),
                (
                    "members",
                    Array(
                        ("member_id", String("utf-8")),
                        ("group_instance_id", String("utf-8")),
                        ("client_id", String("utf-8")),
                        ("client_host", String("utf-8")),
                        ("member_metadata", Bytes),
                        ("member_assignment", Bytes),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
    ),
)


class DescribeGroup(Request[DescribeGroupsRequest_v3 | _DESCRIBE_GROUP]):  # type: ignore[misc]
    """Describes one group of the classic protocol; version 4 shows which members are static."""

    API_KEY = 15

    def __init__(self, group_id: str) -> None:
        """Make the request."""
        self._group_id = group_id

    def build(self, request_struct_class: Any) -> Any:
        """Build the request in the version that the broker accepts."""
        return request_struct_class([self._group_id], False)  # noqa: FBT003 - the protocol's order


# OffsetFetch in version 7 ----------------------------------------------------------------

_FETCH_STABLE_OFFSETS = version_of(
    9,
    7,
    Schema(
        ("group_id", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")), ("partitions", CompactArray(Int32)), ("tags", TaggedFields)
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    ),
    Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    ),
)


class FetchStableOffsets(
    Request[OffsetFetchRequest_v1 | OffsetFetchRequest_v3 | _FETCH_STABLE_OFFSETS]  # type: ignore[misc]
):
    """Fetches offsets of a group; from Kafka 2.5 on, those that an open transaction may change are an error."""

    API_KEY = 9

    def __init__(self, group_id: str, topics: list[tuple[str, list[int]]]) -> None:
        """Make the request for partitions by topic."""
        self._group_id = group_id
        self._topics = topics

    def build(self, request_struct_class: Any) -> Any:
        """Build the request in the version that the broker accepts."""
        if request_struct_class is not _FETCH_STABLE_OFFSETS:
            return request_struct_class(self._group_id, self._topics)
        topics: list[Any] = [(topic, partitions, {}) for topic, partitions in self._topics]
        return request_struct_class(self._group_id, topics, True, {})  # noqa: FBT003 - the protocol's order
