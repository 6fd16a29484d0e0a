"""Settings as the options of librdkafka, which confluent-kafka runs on."""

import logging
from typing import TYPE_CHECKING, Any

from aioshard.kafka.options import partition_share

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["consumer_options", "is_incremental", "quiet_log", "share_of_buffer"]

_ASSIGNORS = {"sticky": "cooperative-sticky", "range": "range", "roundrobin": "roundrobin"}
"""What the settings call an assignor, and what the client calls it."""
_PARTITION_FETCH = 256 * 1024
"""What one fetch brings of one partition at most, but for a single batch that is larger."""
_LEAST_FETCH = 1024 * 1024
_MOST_QUEUED = 10_000
"""Records in the client's own queue above which it fetches no more. Records wait in our buffers, by their bytes."""
_FETCH_PAUSE_MS = 10
"""How long the client waits before it looks again whether its queue has room; a second unless it is told."""
_LEAST_SOCKET_TIMEOUT = 10.0
"""Seconds after which a broker that took a request and does not answer counts as gone."""

_PROTOCOL = logging.getLogger("aioshard.kafka.confluent.librdkafka")


def is_incremental(settings: "Settings") -> bool:
    """Whether a rebalance takes only the partitions that move."""
    return settings.group_protocol == "consumer" or settings.assignor == "sticky"


def share_of_buffer(partitions: int, max_bytes: int) -> int:
    """What our buffer of one partition holds when all together, and what the client queues, hold *max_bytes*."""
    return partition_share(partitions, max_bytes // 2)


def _connection_options(settings: "Settings") -> dict[str, Any]:
    """Where the brokers are, and who we are."""
    options: dict[str, Any] = {
        "bootstrap.servers": settings.require_bootstrap_servers(),
        "client.id": settings.client_id or "aioshard",
        "security.protocol": settings.security_protocol,
        # A broker that came back is found again within a second. When all are gone, the client would begin anew with
        # the bootstrap servers at once and without a pause: 20 times a second, with an error in the log each.
        "reconnect.backoff.max.ms": 1000,
        "metadata.recovery.strategy": "none",
        "logger": quiet_log(),
    }
    optional = {
        "ssl.ca.location": settings.ssl_cafile,
        "ssl.certificate.location": settings.ssl_certfile,
        "ssl.key.location": settings.ssl_keyfile or settings.ssl_certfile,
        "ssl.key.password": settings.ssl_password.get_secret_value() if settings.ssl_password else None,
        "sasl.mechanisms": settings.sasl_mechanism,
        "sasl.username": settings.sasl_username,
        "sasl.password": settings.sasl_password.get_secret_value() if settings.sasl_password else None,
    }
    options |= {name: value for name, value in optional.items() if value is not None}
    if settings.security_protocol.endswith("SSL") and not settings.ssl_check_hostname:
        options["ssl.endpoint.identification.algorithm"] = "none"
    return options


def consumer_options(settings: "Settings", group_id: str) -> dict[str, Any]:
    """Everything that the consumer is told; which of it a user may set, the settings have checked."""
    quarter = max(settings.max_buffered_bytes // 8, _LEAST_FETCH)
    options = _connection_options(settings) | {
        "group.id": group_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        # Tells that markers and aborted batches at the end of a log were passed.
        "enable.partition.eof": True,
        "isolation.level": settings.isolation_level,
        # This is also how long the group waits for us in a rebalance.
        "max.poll.interval.ms": _milliseconds(settings.rebalance_timeout),
        "socket.timeout.ms": _milliseconds(max(2 * settings.commit_timeout, _LEAST_SOCKET_TIMEOUT)),
        "topic.metadata.refresh.interval.ms": _milliseconds(settings.metadata_max_age),
        "fetch.wait.max.ms": _milliseconds(settings.fetch_max_wait),
        "fetch.message.max.bytes": min(_PARTITION_FETCH, quarter),
        "fetch.max.bytes": quarter,
        "queued.max.messages.kbytes": max(quarter // 1024, 1),
        "queued.min.messages": _MOST_QUEUED,
        "fetch.queue.backoff.ms": _FETCH_PAUSE_MS,
    }
    if settings.group_instance_id is not None:
        options["group.instance.id"] = settings.group_instance_id
    if settings.group_protocol == "consumer":
        options["group.protocol"] = "consumer"
        if settings.remote_assignor is not None:
            options["group.remote.assignor"] = settings.remote_assignor
    else:
        options["session.timeout.ms"] = _milliseconds(settings.session_timeout)
        options["heartbeat.interval.ms"] = _milliseconds(settings.heartbeat_interval)
        options["partition.assignment.strategy"] = _ASSIGNORS[settings.assignor]
    return options | settings.client_options


def quiet_log() -> logging.Logger:
    """Where the client's own log goes: it never shows what is committed."""
    return _PROTOCOL


def _milliseconds(seconds: float) -> int:
    return max(round(seconds * 1000), 1)
