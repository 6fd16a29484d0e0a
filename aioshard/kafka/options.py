"""Settings as the options of aiokafka's consumer."""

import inspect
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from aioshard.errors import SettingsError
from aioshard.kafka.security import security_options

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["assignor", "consumer_options", "partition_share"]

_LEAST_PREFETCH = 16 * 1024
_MOST_PREFETCH = 1024 * 1024
_NEVER_MS = 10**15
"""The client leaves the group when nobody calls `getmany` for so long; we never do."""

_REQUEST_TIMEOUT_MS = 30_000
"""After which a broker that took a request and does not answer counts as gone; Kafka's own default."""

_OURS = frozenset(
    {
        "auto_offset_reset",
        "bootstrap_servers",
        "client_id",
        "enable_auto_commit",
        "fetch_max_bytes",
        "fetch_max_wait_ms",
        "group_id",
        "group_instance_id",
        "heartbeat_interval_ms",
        "isolation_level",
        "key_deserializer",
        "loop",
        "max_partition_fetch_bytes",
        "max_poll_interval_ms",
        "max_poll_records",
        "metadata_max_age_ms",
        "partition_assignment_strategy",
        "rebalance_timeout_ms",
        "sasl_mechanism",
        "sasl_plain_password",
        "sasl_plain_username",
        "security_protocol",
        "session_timeout_ms",
        "topics",
        "value_deserializer",
    }
)
"""Options that aioshard sets itself, from its own settings or because its guarantees need them so."""


def partition_share(partitions: int, max_bytes: int) -> int:
    """What one fetch may bring of each partition when all together may bring *max_bytes*.

    At least 16 KiB, because smaller fetches cost more than they save; at most 1 MiB. A broker returns at
    least one batch, whatever its size.
    """
    return min(max(max_bytes // max(partitions, 1), _LEAST_PREFETCH), _MOST_PREFETCH)


def consumer_options(settings: "Settings", group_id: str) -> dict[str, Any]:
    """Everything that aiokafka's consumer is told.

    Raises:
        SettingsError: An option for the client is unknown or not for the user to set, or TLS and SASL
            settings cannot work.
    """
    extra = dict(settings.client_options)
    known = inspect.signature(AIOKafkaConsumer.__init__).parameters
    for name in extra:
        if name in _OURS:
            message = (
                f"client_options sets {name!r}, which aioshard sets itself: remove it and use aioshard's own setting"
            )
            raise SettingsError(message)
        if name not in known:
            message = f"client_options has {name!r}, which aiokafka's consumer does not know: check the spelling"
            raise SettingsError(message)
    half = settings.max_buffered_bytes // 2
    return {
        "bootstrap_servers": settings.require_bootstrap_servers(),
        "client_id": settings.client_id or "aioshard",
        "group_id": group_id,
        "group_instance_id": settings.group_instance_id,
        "enable_auto_commit": False,
        "auto_offset_reset": "none",
        "request_timeout_ms": _REQUEST_TIMEOUT_MS,
        "isolation_level": settings.isolation_level,
        "max_poll_interval_ms": _NEVER_MS,
        "rebalance_timeout_ms": _milliseconds(settings.rebalance_timeout),
        "session_timeout_ms": _milliseconds(settings.session_timeout),
        "heartbeat_interval_ms": _milliseconds(settings.heartbeat_interval),
        "metadata_max_age_ms": _milliseconds(settings.metadata_max_age),
        "fetch_max_wait_ms": _milliseconds(settings.fetch_max_wait),
        "fetch_max_bytes": half,
        "max_partition_fetch_bytes": partition_share(1, half),
        "partition_assignment_strategy": (assignor(settings.assignor),),
        **security_options(settings),
        **extra,
    }


def assignor(name: str) -> Any:
    """The assignor of that name, for one consumer alone.

    Raises:
        SettingsError: There is none of that name yet.
    """
    if name == "range":
        return RangePartitionAssignor
    if name == "roundrobin":
        return RoundRobinPartitionAssignor
    if name == "sticky":
        # It keeps its state on the class, which would be shared by all consumers of the process.
        return type("StickyAssignorOfOneConsumer", (StickyPartitionAssignor,), {})
    message = f"assignor={name!r} is not available in this version of aioshard; use 'range', 'roundrobin' or 'sticky'"
    raise SettingsError(message)


def _milliseconds(seconds: float) -> int:
    return max(round(seconds * 1000), 1)
