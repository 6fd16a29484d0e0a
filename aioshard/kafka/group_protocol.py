"""Consumer group requests in versions that aiokafka lacks: describe a group, remove a member."""

import uuid
from io import BytesIO
from typing import Any, ClassVar

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.admin import DescribeGroupsRequest_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    Boolean,
    Bytes,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    String,
    TaggedFields,
)


class _Uuid(AbstractType[uuid.UUID]):  # type: ignore[misc]
    """A UUID of 16 bytes."""

    @classmethod
    def decode(cls, data: BytesIO) -> uuid.UUID:
        """Decode a UUID."""
        return uuid.UUID(bytes=data.read(16))


# DescribeGroups in version 4 --------------------------------------------------------------


class _DescribeGroupResponse(Response):  # type: ignore[misc]
    API_KEY = 15
    API_VERSION = 4
    SCHEMA: ClassVar[Schema] = Schema(
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
    )


class _DescribeGroupStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 15
    API_VERSION = 4
    RESPONSE_TYPE = _DescribeGroupResponse
    SCHEMA: ClassVar[Schema] = Schema(("groups", Array(String("utf-8"))), ("include_authorized_operations", Boolean))


class DescribeGroup(Request[DescribeGroupsRequest_v3 | _DescribeGroupStruct]):  # type: ignore[misc]
    """Describes one group of the classic protocol; version 4 shows which members are static."""

    API_KEY = 15

    def __init__(self, group_id: str) -> None:
        """Make the request."""
        self._group_id = group_id

    def build(self, request_struct_class: Any) -> Any:
        """Build the request in the version that the broker accepts."""
        return request_struct_class([self._group_id], False)  # noqa: FBT003 - the protocol's order


# ConsumerGroupDescribe, the only way to see a group of KIP-848 ---------------------------

_PARTITIONS = Schema(
    (
        "topic_partitions",
        CompactArray(
            ("topic_id", _Uuid),
            ("topic_name", CompactString("utf-8")),
            ("partitions", CompactArray(Int32)),
            ("tags", TaggedFields),
        ),
    ),
    ("tags", TaggedFields),
)


class _DescribeConsumerGroupResponse(Response):  # type: ignore[misc]
    API_KEY = 69
    API_VERSION = 0
    SCHEMA: ClassVar[Schema] = Schema(
        ("throttle_time_ms", Int32),
        (
            "groups",
            CompactArray(
                ("error_code", Int16),
                ("error_message", CompactString("utf-8")),
                ("group_id", CompactString("utf-8")),
                ("group_state", CompactString("utf-8")),
                ("group_epoch", Int32),
                ("assignment_epoch", Int32),
                ("assignor_name", CompactString("utf-8")),
                (
                    "members",
                    CompactArray(
                        ("member_id", CompactString("utf-8")),
                        ("instance_id", CompactString("utf-8")),
                        ("rack_id", CompactString("utf-8")),
                        ("member_epoch", Int32),
                        ("client_id", CompactString("utf-8")),
                        ("client_host", CompactString("utf-8")),
                        ("subscribed_topic_names", CompactArray(CompactString("utf-8"))),
                        ("subscribed_topic_regex", CompactString("utf-8")),
                        ("assignment", _PARTITIONS),
                        ("target_assignment", _PARTITIONS),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _DescribeConsumerGroupStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 69
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _DescribeConsumerGroupResponse
    SCHEMA: ClassVar[Schema] = Schema(
        ("group_ids", CompactArray(CompactString("utf-8"))),
        ("include_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class DescribeConsumerGroup(Request[_DescribeConsumerGroupStruct]):  # type: ignore[misc]
    """Describes one KIP-848 group. Raises `IncompatibleBrokerVersion` before Kafka 3.7."""

    API_KEY = 69

    def __init__(self, group_id: str) -> None:
        """Make the request."""
        self._group_id = group_id

    def build(self, request_struct_class: Any) -> Any:
        """Build the request in the version that the broker accepts."""
        return request_struct_class([self._group_id], False, {})  # noqa: FBT003 - the protocol's order


# LeaveGroup on behalf of another member --------------------------------------------------


class _LeaveGroupResponse(Response):  # type: ignore[misc]
    API_KEY = 13
    API_VERSION = 3
    SCHEMA: ClassVar[Schema] = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        (
            "members",
            Array(
                ("member_id", String("utf-8")),
                ("group_instance_id", String("utf-8")),
                ("error_code", Int16),
            ),
        ),
    )


class _LeaveGroupStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 13
    API_VERSION = 3
    RESPONSE_TYPE = _LeaveGroupResponse
    SCHEMA: ClassVar[Schema] = Schema(
        ("group", String("utf-8")),
        ("members", Array(("member_id", String("utf-8")), ("group_instance_id", String("utf-8")))),
    )


class RemoveMember(Request[_LeaveGroupStruct]):  # type: ignore[misc]
    """Removes any member from its group; in a KIP-848 group, only a static one. Needs Kafka 2.4."""

    API_KEY = 13

    def __init__(self, group_id: str, *, member_id: str = "", instance_id: str | None = None) -> None:
        """Make the request; one of the ids is enough."""
        self._group_id = group_id
        self._member = member_id, instance_id

    def build(self, request_struct_class: Any) -> Any:
        """Build the request in the version that the broker accepts."""
        return request_struct_class(self._group_id, [self._member])
