"""Translate settings into options of librdkafka, the library under confluent-kafka."""

import logging
from typing import Any

from aioshard.core.flow import partition_share
from aioshard.settings import Settings

_PARTITION_FETCH = 256 * 1024
"""Maximum bytes per partition in a fetch, unless a single batch is larger."""
_LEAST_FETCH = 1024 * 1024
_MOST_QUEUED = 10_000
"""Records in the client's own queue above which it stops fetching. Our own buffers are bounded by bytes."""
_FETCH_PAUSE_MS = 10
"""Milliseconds until the client checks again whether its queue has room; a second by default."""
_LEAST_SOCKET_TIMEOUT = 10.0
"""Seconds without a response after which a broker counts as gone."""

LOGGER = logging.getLogger("aioshard.kafka.confluent.librdkafka")
"""Receives librdkafka's own log lines; without `debug`, they never show what is committed."""


def share_of_buffer(partitions: int, max_bytes: int) -> int:
    """Return the buffer size per partition, so that all buffers and the client's queue fit into *max_bytes*."""
    return partition_share(partitions, max_bytes // 2)


def connection_options(settings: Settings) -> dict[str, Any]:
    """Build the options for addresses and credentials."""
    encrypted = settings.security_protocol.endswith("SSL")
    options = {
        "bootstrap.servers": settings.require_bootstrap_servers(),
        "client.id": settings.client_id or "aioshard",
        "security.protocol": settings.security_protocol,
        # Find a restarted broker within a second, with one or two attempts a second. By default, a client whose brokers
        # are all gone returns to the bootstrap servers 20 times a second, with an error in the log each time.
        "reconnect.backoff.ms": 1000,
        "reconnect.backoff.max.ms": 1000,
        "logger": LOGGER,
        "ssl.ca.location": settings.ssl_cafile,
        "ssl.certificate.location": settings.ssl_certfile,
        "ssl.key.location": settings.ssl_keyfile or settings.ssl_certfile,
        "ssl.key.password": settings.ssl_password.get_secret_value() if settings.ssl_password else None,
        "ssl.endpoint.identification.algorithm": "none" if encrypted and not settings.ssl_check_hostname else None,
        "sasl.mechanisms": settings.sasl_mechanism,
        "sasl.username": settings.sasl_username,
        "sasl.password": settings.sasl_password.get_secret_value() if settings.sasl_password else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def consumer_options(settings: Settings, group_id: str) -> dict[str, Any]:
    """Build all options of the consumer. `Settings` has checked which of them users may override."""
    eighth = max(settings.max_buffered_bytes // 8, _LEAST_FETCH)
    classic: dict[str, Any] = {
        "session.timeout.ms": milliseconds(settings.session_timeout),
        "heartbeat.interval.ms": milliseconds(settings.heartbeat_interval),
        "partition.assignment.strategy": "cooperative-sticky",
    }
    membership = classic if settings.group_protocol == "classic" else {"group.protocol": "consumer"}
    if settings.group_instance_id is not None:
        membership["group.instance.id"] = settings.group_instance_id
    options = {
        "group.id": group_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        # Reports that we have passed markers and aborted batches at the end of a log.
        "enable.partition.eof": True,
        "isolation.level": settings.isolation_level,
        # This is also how long the group waits for us in a rebalance.
        "max.poll.interval.ms": milliseconds(settings.rebalance_timeout),
        "socket.timeout.ms": milliseconds(max(2 * settings.commit_timeout, _LEAST_SOCKET_TIMEOUT)),
        "topic.metadata.refresh.interval.ms": milliseconds(settings.metadata_max_age),
        "fetch.wait.max.ms": milliseconds(settings.fetch_max_wait),
        "fetch.message.max.bytes": min(_PARTITION_FETCH, eighth),
        "fetch.max.bytes": eighth,
        "queued.max.messages.kbytes": eighth // 1024,
        "queued.min.messages": _MOST_QUEUED,
        "fetch.queue.backoff.ms": _FETCH_PAUSE_MS,
    }
    return connection_options(settings) | membership | options | settings.client_options


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, at least one."""
    return max(round(seconds * 1000), 1)
