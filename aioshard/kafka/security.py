"""Translate TLS and SASL settings for aiokafka, and turn mistakes in them into readable errors."""

import importlib.util
import logging
import ssl
from typing import TYPE_CHECKING, Any

from aioshard.errors import SettingsError

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["keep_secrets_out_of_logs", "security_options"]


def security_options(settings: "Settings") -> dict[str, Any]:
    """Build the TLS and SASL options that aiokafka's consumer, producer and admin client have in common.

    `Settings` has checked their combination; this finds mistakes that only show when the files are used.

    Raises:
        SettingsError: A file is invalid, its password is wrong, or a package is missing.
    """
    options: dict[str, Any] = {"security_protocol": settings.security_protocol}
    if settings.security_protocol.endswith("SSL"):
        options["ssl_context"] = settings.client_options.get("ssl_context") or _tls_context(settings)
    if settings.sasl_mechanism is not None:
        keep_secrets_out_of_logs()
        options["sasl_mechanism"] = settings.sasl_mechanism
        if settings.sasl_mechanism == "GSSAPI" and importlib.util.find_spec("gssapi") is None:
            raise SettingsError(
                "sasl_mechanism='GSSAPI' needs the package gssapi, which is not installed: install it with  "
                "pip install gssapi"
            )
    if settings.sasl_username is not None and settings.sasl_password is not None:
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = settings.sasl_password.get_secret_value()
    return options


def _tls_context(settings: "Settings") -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
    except (ssl.SSLError, OSError) as error:
        told = f"ssl_cafile={settings.ssl_cafile!r} cannot be used ({_short(error)}): it must hold PEM certificates"
        raise SettingsError(told) from None
    context.check_hostname = settings.ssl_check_hostname
    if settings.ssl_certfile is not None:
        password = settings.ssl_password

        def key_password() -> str:
            # Without this, OpenSSL asks for the password on the terminal and the process hangs.
            return "" if password is None else password.get_secret_value()

        try:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=key_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            key = settings.ssl_keyfile or settings.ssl_certfile
            raise SettingsError(
                f"ssl_certfile={settings.ssl_certfile!r} with the key in {key!r} cannot be used ({_short(error)}): "
                "both must be PEM, belong together, and ssl_password must open the key if it is encrypted"
            ) from None
    return context


def _short(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or type(error).__name__


class _HideCredentials(logging.Filter):
    """Replaces the bytes of a SASL exchange, which aiokafka logs at DEBUG level, with three dots."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"{type(argument).__name__}(…)" if "SaslAuthenticate" in type(argument).__name__ else argument
                for argument in record.args
            )
        return True


_hide_credentials = _HideCredentials()


def keep_secrets_out_of_logs() -> None:
    """Remove credentials from aiokafka's debug log; calling it again changes nothing."""
    logging.getLogger("aiokafka.conn").addFilter(_hide_credentials)
