"""Options of connections, built from settings."""

import ssl
from typing import Any

import pytest
from aiokafka.abc import AbstractTokenProvider

from aioshard.errors import SettingsError
from aioshard.kafka.wire.options import ConnectionOptions, connection_options
from aioshard.settings import Settings


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """A provider whose text shows its secret, as that of a dataclass does."""

    async def token(self) -> str:
        return "a-token"

    def __repr__(self) -> str:
        return "Tokens(secret='a-secret')"


def options(**settings: Any) -> ConnectionOptions:
    return connection_options(Settings(**settings))


def test_without_settings_connections_are_plain() -> None:
    assert options() == ConnectionOptions("aioshard", "PLAINTEXT")
    assert not options().uses_tls
    assert not options().uses_sasl


def test_a_login_with_a_password() -> None:
    made = options(
        client_id="billing",
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="alice",
        sasl_password="a-secret",
    )
    assert made.uses_sasl
    assert not made.uses_tls
    assert (made.client_id, made.sasl_mechanism) == ("billing", "SCRAM-SHA-512")
    assert (made.sasl_username, made.sasl_password) == ("alice", "a-secret")
    assert "a-secret" not in repr(made) + str(made)


def test_a_token_provider() -> None:
    provider = Tokens()
    made = options(
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        client_options={"sasl_oauth_token_provider": provider},
    )
    assert made.uses_tls
    assert made.token_provider is provider
    assert "a-secret" not in repr(made)


def test_a_token_provider_of_another_class_is_refused() -> None:
    with pytest.raises(SettingsError, match="is a object: its class must inherit from aiokafka"):
        options(
            security_protocol="SASL_SSL",
            sasl_mechanism="OAUTHBEARER",
            client_options={"sasl_oauth_token_provider": object()},
        )


def test_names_of_kerberos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    made = options(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="GSSAPI",
        client_options={"sasl_kerberos_service_name": "broker", "sasl_kerberos_domain_name": "example.com"},
    )
    assert (made.kerberos_service_name, made.kerberos_domain_name) == ("broker", "example.com")
    made = options(security_protocol="SASL_PLAINTEXT", sasl_mechanism="GSSAPI")
    assert (made.kerberos_service_name, made.kerberos_domain_name) == ("kafka", None)


def test_an_ssl_context_of_another_class_is_refused() -> None:
    context = ssl.create_default_context()
    assert options(security_protocol="SSL", client_options={"ssl_context": context}).ssl_context is context
    with pytest.raises(SettingsError, match="is a str: it must be an"):
        options(security_protocol="SSL", client_options={"ssl_context": "context"})
