"""Why no broker could be reached, as a sentence: aiokafka itself only logs the causes."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiokafka import errors as kafka
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.errors import AuthenticationError, ConnectError, TransportError
from aioshard.kafka.translate import reason

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["why_unreachable"]

PROBE_TIMEOUT = 4.0
"""Seconds that each broker is given to answer when the cause is looked for."""

_CONNECTION_OPTIONS = frozenset(
    {
        "client_id",
        "ssl_context",
        "security_protocol",
        "sasl_mechanism",
        "sasl_plain_username",
        "sasl_plain_password",
        "sasl_kerberos_service_name",
        "sasl_kerberos_domain_name",
        "sasl_oauth_token_provider",
    }
)


async def why_unreachable(
    settings: "Settings", options: Mapping[str, Any], addresses: str, *, advertised: bool = False
) -> TransportError:
    """Try every address once more, all at the same time, and say what is wrong.

    Args:
        settings: Names for the sentence: user, mechanism, files.
        options: The client's options.
        addresses: `host:port`, separated by commas.
        advertised: Whether a broker named these addresses, rather than the user.
    """
    hosts = [(host, port) for host, port, _ in collect_hosts(addresses, randomize=False)]
    found = await asyncio.gather(*(_probe(host, port, options) for host, port in hosts))
    failures = [(f"{host}:{port}", error) for (host, port), error in zip(hosts, found, strict=True) if error is not None]
    for address, error in failures:
        refused = _authentication(error, address, settings)
        if refused is not None:
            return refused
    told = "; ".join(f"{address}: {_connection(error, settings)}" for address, error in failures)
    if advertised:
        return ConnectError(
            f"a broker of {settings.bootstrap_servers} answered, but the addresses that it advertises cannot be "
            f"reached ({told or 'no answer'}): advertised.listeners of the brokers must name addresses that this "
            "machine can reach"
        )
    return ConnectError(
        f"none of bootstrap_servers={addresses} could be reached "
        f"({told or 'a second attempt just now succeeded'}): check the addresses and that the brokers run"
    )


async def _probe(host: str, port: int, options: Mapping[str, Any]) -> Exception | None:
    connection = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            connection = await create_conn(
                host,
                port,
                request_timeout_ms=int(PROBE_TIMEOUT * 1000),
                **{name: value for name, value in options.items() if name in _CONNECTION_OPTIONS},
            )
            await connection.send(MetadataRequest([]))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return error
    finally:
        if connection is not None:
            closed = connection.close()
            if closed is not None:
                await asyncio.wait([closed], timeout=1)
    return None


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _authentication(error: Exception, address: str, settings: "Settings") -> AuthenticationError | None:
    for cause in _chain(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            trusted = f"ssl_cafile={settings.ssl_cafile}" if settings.ssl_cafile else "the system's certificates"
            return AuthenticationError(
                f"the certificate of {address} was not accepted ({cause.verify_message or cause.reason}): it was checked "
                f"against {trusted}; give the CA that signed it as ssl_cafile, and connect under a name that it contains"
            )
        if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "").upper():
            own = f"ssl_certfile={settings.ssl_certfile}" if settings.ssl_certfile else "no certificate (ssl_certfile)"
            return AuthenticationError(
                f"{address} ended the TLS handshake ({_tls_reason(cause)}); we sent {own}: "
                "the broker may ask for a certificate that it trusts"
            )
        if isinstance(cause, kafka.UnsupportedSaslMechanismError | kafka.IllegalSaslStateError):
            return AuthenticationError(
                f"{address} does not offer sasl_mechanism={settings.sasl_mechanism} ({cause.args[0] if cause.args else ''})"
                if isinstance(cause, kafka.UnsupportedSaslMechanismError) and cause.args and isinstance(cause.args[0], str)
                else f"{address} does not offer sasl_mechanism={settings.sasl_mechanism}: use one that its listener enables"
            )
        if isinstance(cause, kafka.SaslAuthenticationFailed | kafka.AuthenticationFailedError):
            return AuthenticationError(
                f"{address} refused user {settings.sasl_username!r} with sasl_mechanism={settings.sasl_mechanism}: "
                "check sasl_username and sasl_password"
            )
    return None


def _connection(error: Exception, settings: "Settings") -> str:
    if isinstance(error, ssl.SSLError):
        return f"{_tls_reason(error)}; a listener without TLS? security_protocol is {settings.security_protocol}"
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return f"no answer within {PROBE_TIMEOUT:g} s"
    if isinstance(error, kafka.KafkaConnectionError):
        return (
            "the connection was closed before an answer came; "
            f"security_protocol is {settings.security_protocol}, the listener may expect another one"
        )
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return reason(error)


def _tls_reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
