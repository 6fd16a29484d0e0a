"""Translate settings into options of aiokafka's consumer."""

import logging
from typing import Any

from aioshard.kafka.assignors import ConsumerAssignor
from aioshard.kafka.wire.options import connection_options
from aioshard.settings import Settings

_NEVER_MS = 10**15
"""Disables a rule of the client: it leaves the group if nobody calls `getmany` for this long, and we never call it."""

_REQUEST_TIMEOUT_MS = 30_000
"""Milliseconds without a response after which a broker counts as gone; Kafka's own default."""


def consumer_options(settings: Settings, group_id: str) -> dict[str, Any]:
    """Build all options of aiokafka's consumer. `Settings` has checked which of them users may override.

    Raises:
        SettingsError: Certificates or keys cannot be used, or the SASL mechanism needs a missing package.
    """
    return {
        "bootstrap_servers": settings.require_bootstrap_servers(),
        "client_id": settings.client_id or "aioshard",
        "group_id": group_id,
        "group_instance_id": settings.group_instance_id,
        "enable_auto_commit": False,
        "auto_offset_reset": "none",  # the client would reset silently; `core.ownership.origin_of` decides
        "request_timeout_ms": _REQUEST_TIMEOUT_MS,
        "max_poll_interval_ms": _NEVER_MS,
        "rebalance_timeout_ms": milliseconds(settings.rebalance_timeout),
        "session_timeout_ms": milliseconds(settings.session_timeout),
        "heartbeat_interval_ms": milliseconds(settings.heartbeat_interval),
        "metadata_max_age_ms": milliseconds(settings.metadata_max_age),
        "partition_assignment_strategy": (
            ConsumerAssignor(settings.assignor, settings.reassignment_delay, settings.group_instance_id),
        ),
        **security_options(settings),
        **settings.client_options,
    }


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, at least one."""
    return max(round(seconds * 1000), 1)


def security_options(settings: Settings) -> dict[str, Any]:
    """Build the TLS and SASL options of aiokafka's consumer.

    `Settings` has checked their combination; this finds mistakes that only show when the files are used.

    Raises:
        SettingsError: A file is invalid, its password is wrong, or a package is missing.
    """
    if settings.sasl_mechanism is not None:
        logging.getLogger("aiokafka.conn").addFilter(_hide_credentials)
    options = connection_options(settings)
    return {
        "security_protocol": options.security_protocol,
        "ssl_context": options.ssl_context,
        "sasl_mechanism": options.sasl_mechanism,
        "sasl_plain_username": options.sasl_username,
        "sasl_plain_password": options.sasl_password,
    }


def _hide_credentials(record: logging.LogRecord) -> bool:
    """Replace the bytes of a SASL exchange, which aiokafka logs at DEBUG level, with three dots."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            f"{type(argument).__name__}(…)" if "SaslAuthenticate" in type(argument).__name__ else argument
            for argument in record.args
        )
    return True
