"""How to connect to brokers: who we are, TLS, and credentials."""

import importlib.util
import ssl
from dataclasses import dataclass, field
from typing import Any

from aiokafka.abc import AbstractTokenProvider

from aioshard.errors import SettingsError
from aioshard.settings import Settings


@dataclass(frozen=True)
class ConnectionOptions:
    """The options that all connections of a client share; their text shows no secret."""

    client_id: str = "aioshard"
    security_protocol: str = "PLAINTEXT"
    """`PLAINTEXT`, `SSL`, `SASL_PLAINTEXT` or `SASL_SSL`."""
    ssl_context: ssl.SSLContext | None = None
    """Required by `SSL` and `SASL_SSL`."""
    sasl_mechanism: str | None = None
    """Required by `SASL_PLAINTEXT` and `SASL_SSL`."""
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    kerberos_service_name: str = "kafka"
    kerberos_domain_name: str | None = None
    """The host in the principal of the brokers; each broker's own name by default."""
    token_provider: AbstractTokenProvider | None = field(default=None, repr=False)
    """Supplies tokens for OAUTHBEARER. It is called in the event loop of the connection."""

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.security_protocol in {"SSL", "SASL_SSL"}

    @property
    def uses_sasl(self) -> bool:
        """Whether connections begin with a login."""
        return self.security_protocol in {"SASL_PLAINTEXT", "SASL_SSL"}


def connection_options(settings: Settings) -> ConnectionOptions:
    """Build the options of connections from the settings.

    `Settings` has checked their combination; this finds mistakes that only show when the files are used.

    Raises:
        SettingsError: A file is invalid, its password is wrong, a package is missing, or an object is of a wrong class.
    """
    if settings.sasl_mechanism == "GSSAPI" and importlib.util.find_spec("gssapi") is None:
        raise SettingsError(
            "sasl_mechanism='GSSAPI' needs the package gssapi, which is not installed: install it with  "
            "pip install gssapi"
        )
    password = settings.sasl_password
    others: dict[str, Any] = settings.client_options
    return ConnectionOptions(
        client_id=settings.client_id or "aioshard",
        security_protocol=settings.security_protocol,
        ssl_context=_tls_context(settings) if settings.security_protocol.endswith("SSL") else None,
        sasl_mechanism=settings.sasl_mechanism,
        sasl_username=settings.sasl_username,
        sasl_password=None if password is None else password.get_secret_value(),
        kerberos_service_name=others.get("sasl_kerberos_service_name") or "kafka",
        kerberos_domain_name=others.get("sasl_kerberos_domain_name"),
        token_provider=_token_provider(settings),
    )


def _token_provider(settings: Settings) -> AbstractTokenProvider | None:
    provider = settings.client_options.get("sasl_oauth_token_provider")
    if settings.sasl_mechanism == "OAUTHBEARER" and not isinstance(provider, AbstractTokenProvider):
        raise SettingsError(
            f"client_options['sasl_oauth_token_provider'] is a {type(provider).__name__}: "
            "its class must inherit from aiokafka.abc.AbstractTokenProvider"
        )
    return provider


def _tls_context(settings: Settings) -> ssl.SSLContext:
    given = settings.client_options.get("ssl_context")
    if given is not None and not isinstance(given, ssl.SSLContext):
        raise SettingsError(f"client_options['ssl_context'] is a {type(given).__name__}: it must be an ssl.SSLContext")
    if given is not None:
        return given
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(
            f"ssl_cafile={settings.ssl_cafile!r} cannot be used ({_short(error)}): it must hold PEM certificates"
        ) from None
    context.check_hostname = settings.ssl_check_hostname
    if settings.ssl_certfile is not None:
        # Without a password, OpenSSL would ask for one on the terminal, and the process would hang.
        password = "" if settings.ssl_password is None else settings.ssl_password.get_secret_value()
        try:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password)
        except (ssl.SSLError, OSError, ValueError) as error:
            key = settings.ssl_keyfile or settings.ssl_certfile
            raise SettingsError(
                f"ssl_certfile={settings.ssl_certfile!r} with the key in {key!r} cannot be used ({_short(error)}): "
                "both must be PEM, belong together, and ssl_password must open the key if it is encrypted"
            ) from None
    return context


def _short(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or type(error).__name__
