"""Translate settings into options of aiokafka's consumer, producer and client."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient

from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.kafka.security import security_options

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Compression", "client_options", "consumer_options", "partition_share", "producer_options"]

Compression = Literal["none", "gzip", "lz4", "snappy", "zstd"]

_LEAST_PREFETCH = 16 * 1024
_MOST_PREFETCH = 1024 * 1024
_NEVER_MS = 10**15
"""Disables a rule of the client: it leaves the group if nobody calls `getmany` for this long, and we never call it."""

_BATCH_BYTES = 64 * 1024
_MOST_REQUEST_BYTES = 100 * 1024 * 1024
"""The largest request that brokers read (`socket.request.max.bytes`). They close the connection on a larger one without
an error, and the producer would resend it forever. Smaller ones only meet the topic's limit, with a clear error."""
_REQUEST_TIMEOUT_MS = 30_000
"""Milliseconds without a response after which a broker counts as gone; Kafka's own default."""


def partition_share(partitions: int, max_bytes: int) -> int:
    """Return the maximum bytes per partition in a fetch, for *max_bytes* over all partitions.

    At least 16 KiB, because smaller fetches cost more than they save, and at most 1 MiB. A broker returns at
    least one batch, of any size.
    """
    return min(max(max_bytes // max(partitions, 1), _LEAST_PREFETCH), _MOST_PREFETCH)


def consumer_options(settings: "Settings", group_id: str) -> dict[str, Any]:
    """Build all options of aiokafka's consumer. `Settings` has checked which of them users may override.

    Raises:
        SettingsError: Certificates or keys cannot be used, or the SASL mechanism needs a missing package.
    """
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
        # While a response is decoded it is in memory twice, in addition to the rest of the previous response.
        "fetch_max_bytes": max(half // 2, 1),
        "max_partition_fetch_bytes": partition_share(1, half),
        "partition_assignment_strategy": (
            ConsumerAssignor(settings.assignor, settings.reassignment_delay, settings.group_instance_id),
        ),
        **security_options(settings),
        **settings.client_options,
    }


def producer_options(
    settings: "Settings", *, compression: Compression = "none", request_timeout: float = _REQUEST_TIMEOUT_MS / 1000
) -> dict[str, Any]:
    """Build all options of aiokafka's producer: idempotent, so all in-sync replicas acknowledge.

    Args:
        settings: Options in `client_options` that producers do not know are ignored.
        compression: Applies to whole batches.
        request_timeout: Seconds without a response after which a broker counts as gone.

    Raises:
        SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
    """
    return {
        "max_batch_size": _BATCH_BYTES,
        "max_request_size": _MOST_REQUEST_BYTES,
        **_common_options(settings, AIOKafkaProducer, request_timeout),
        "enable_idempotence": True,
        "compression_type": None if compression == "none" else compression,
    }


def client_options(settings: "Settings", *, request_timeout: float) -> dict[str, Any]:
    """Build all options of aiokafka's bare client and of its admin client.

    Args:
        settings: Options in `client_options` that this client does not know are ignored.
        request_timeout: Seconds without a response after which a broker counts as gone.

    Raises:
        SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
    """
    return _common_options(settings, AIOKafkaClient, request_timeout)


def _common_options(settings: "Settings", client: Callable[..., Any], request_timeout: float) -> dict[str, Any]:
    known = inspect.signature(client).parameters
    return {
        "bootstrap_servers": settings.require_bootstrap_servers(),
        "client_id": settings.client_id or "aioshard",
        "metadata_max_age_ms": _milliseconds(settings.metadata_max_age),
        "request_timeout_ms": _milliseconds(request_timeout),
        **security_options(settings),
        # Consumer options, such as fetch_min_bytes, have no meaning here.
        **{name: value for name, value in settings.client_options.items() if name in known},
    }


def _milliseconds(seconds: float) -> int:
    return max(round(seconds * 1000), 1)
