"""Translate settings into options of aiokafka's clients."""

import inspect
import logging
from typing import Any

from aiokafka.client import AIOKafkaClient

from aioshard.kafka.wire.options import connection_options
from aioshard.settings import Settings


def client_options(settings: Settings, *, request_timeout: float) -> dict[str, Any]:
    """Build all options of aiokafka's bare client.

    Args:
        settings: Options in `client_options` that this client does not know are ignored.
        request_timeout: Seconds without a response after which a broker counts as gone.

    Raises:
        SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
    """
    accepted = inspect.signature(AIOKafkaClient).parameters
    return {
        "bootstrap_servers": settings.require_bootstrap_servers(),
        "client_id": settings.client_id or "aioshard",
        "metadata_max_age_ms": milliseconds(settings.metadata_max_age),
        "request_timeout_ms": milliseconds(request_timeout),
        **security_options(settings),
        # Consumer options, such as fetch_min_bytes, have no meaning here.
        **{name: value for name, value in settings.client_options.items() if name in accepted},
    }


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, at least one."""
    return max(round(seconds * 1000), 1)


def security_options(settings: Settings) -> dict[str, Any]:
    """Build the TLS and SASL options that aiokafka's consumer, producer and admin client have in common.

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
