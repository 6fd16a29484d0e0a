"""TLS and SASL settings as aiokafka takes them, checked so that a mistake becomes a sentence."""

import importlib.util
import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioshard.errors import SettingsError

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["keep_secrets_out_of_logs", "security_options"]


def security_options(settings: "Settings") -> dict[str, Any]:
    """The options for TLS and SASL that aiokafka's consumer, producer and admin client all take.

    Raises:
        SettingsError: A file is missing or not what it should be, or settings contradict each other.
    """
    protocol = settings.security_protocol
    options: dict[str, Any] = {"security_protocol": protocol}
    if protocol in {"SSL", "SASL_SSL"}:
        options["ssl_context"] = _tls_context(settings)
    if protocol.startswith("SASL_"):
        keep_secrets_out_of_logs()
        options |= _sasl_options(settings)
    return options


def _tls_context(settings: "Settings") -> ssl.SSLContext:
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
        path = getattr(settings, name)
        if path is not None and not Path(path).is_file():
            message = f"{name} is {path!r}, which is not a file: give the path of a PEM file that this process can read"
            raise SettingsError(message)
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        message = f"ssl_keyfile={settings.ssl_keyfile!r} needs ssl_certfile, the certificate that belongs to the key"
        raise SettingsError(message)
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
    except (ssl.SSLError, OSError) as error:
        message = f"ssl_cafile={settings.ssl_cafile!r} cannot be used ({_short(error)}): it must hold PEM certificates"
        raise SettingsError(message) from None
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
            message = (
                f"ssl_certfile={settings.ssl_certfile!r} with the key in {key!r} cannot be used ({_short(error)}): "
                "both must be PEM, belong together, and ssl_password must open the key if it is encrypted"
            )
            raise SettingsError(message) from None
    return context


def _sasl_options(settings: "Settings") -> dict[str, Any]:
    protocol, mechanism = settings.security_protocol, settings.sasl_mechanism
    if mechanism is None:
        message = (
            f"security_protocol={protocol!r} needs sasl_mechanism: "
            "one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, GSSAPI, OAUTHBEARER"
        )
        raise SettingsError(message)
    options: dict[str, Any] = {"sasl_mechanism": mechanism}
    if mechanism == "GSSAPI":
        if importlib.util.find_spec("gssapi") is None:
            message = "sasl_mechanism='GSSAPI' needs the package gssapi: install it with  pip install gssapi"
            raise SettingsError(message)
    elif mechanism == "OAUTHBEARER":
        if "sasl_oauth_token_provider" not in settings.client_options:
            message = (
                "sasl_mechanism='OAUTHBEARER' needs a token provider: pass an aiokafka.abc.AbstractTokenProvider as "
                "client_options={'sasl_oauth_token_provider': …}"
            )
            raise SettingsError(message)
    else:
        if settings.sasl_username is None or settings.sasl_password is None:
            missing = "sasl_username" if settings.sasl_username is None else "sasl_password"
            message = f"sasl_mechanism={mechanism!r} needs {missing}, which is not set"
            raise SettingsError(message)
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = settings.sasl_password.get_secret_value()
    return options


def _short(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or type(error).__name__


class _HideCredentials(logging.Filter):
    """Replaces the bytes of a SASL exchange, which aiokafka logs at level DEBUG, with three dots."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"{type(argument).__name__}(…)" if "SaslAuthenticate" in type(argument).__name__ else argument
                for argument in record.args
            )
        return True


_hide_credentials = _HideCredentials()


def keep_secrets_out_of_logs() -> None:
    """Make aiokafka's debug log show no credentials; calling it again changes nothing."""
    logging.getLogger("aiokafka.conn").addFilter(_hide_credentials)
