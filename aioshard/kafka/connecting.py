"""Find a broker that answers, or explain why none does. aiokafka itself only logs the causes."""

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from aiokafka import errors as kafka
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.errors import AuthenticationError, ConnectError, SettingsError, TransportError
from aioshard.kafka.translate import reason

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = [
    "CONNECT_TIMEOUT",
    "START_TIMEOUT",
    "advertised_by",
    "connected",
    "find_broker",
    "silence_client",
    "why_unreachable",
]

C = TypeVar("C")

CONNECT_TIMEOUT = 3.0
"""Seconds for a broker to accept a connection, authenticate us and answer. The default `start_timeout` has room for
three of them, so that the app reports the cause instead of a start that took too long."""
START_TIMEOUT = 1.5 * CONNECT_TIMEOUT
"""Seconds for a client to get an answer from an advertised broker: the first one it tries may hang."""

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


async def connected(
    settings: "Settings",
    options: Mapping[str, Any],
    make: Callable[[dict[str, Any]], C],
    *,
    begin: Callable[[C], Awaitable[bool]],
    end: Callable[[C], Awaitable[object]],
    advertised: Callable[[C], Collection[tuple[str, int]]] = lambda _: (),
    timeout: float = START_TIMEOUT,
) -> C:
    """Return a client connected to a broker that answers; takes at most *timeout* plus twice `CONNECT_TIMEOUT`.

    Args:
        settings: For the error messages.
        options: The client's options.
        make: Makes the client from its options.
        begin: Connects the client; returns whether a broker has answered. A `KafkaError` counts as no answer; any
            other error is raised.
        end: Closes a client that failed to connect.
        advertised: Returns the broker addresses that the client received from a bootstrap server.
        timeout: Seconds that *begin* may take.

    Raises:
        ConnectError: No broker could be reached.
        AuthenticationError: The brokers rejected our credentials, or we rejected their certificate.
        SettingsError: The client refused an option.
    """
    server = await find_broker(settings, options)
    try:
        client = make({**options, "bootstrap_servers": server})
    except (ValueError, TypeError, RuntimeError) as error:
        raise SettingsError(f"the Kafka client refused an option: {reason(error)}") from error
    answered = False
    try:
        try:
            async with asyncio.timeout(timeout):
                answered = await begin(client)
        except (TimeoutError, kafka.KafkaError):
            answered = False
    except BaseException:
        await end(client)
        raise
    if not answered:
        named = advertised(client)
        await end(client)
        raise await why_unreachable(settings, options, named)
    return client


async def find_broker(settings: "Settings", options: Mapping[str, Any]) -> str:
    """Return the address of the first bootstrap server that answers; tries all of them concurrently.

    Args:
        settings: For the error messages: user, mechanism, files.
        options: The client's options.

    Raises:
        AuthenticationError: A server rejected our credentials, or we rejected its certificate, and no server
            accepted.
        ConnectError: No server answered within `CONNECT_TIMEOUT`.
    """
    addresses = _addresses(options["bootstrap_servers"])
    asking = {
        asyncio.create_task(_ask(host, port, options), name=f"ask {host}:{port}"): f"{host}:{port}"
        for host, port in addresses
    }
    waiting = set(asking)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.result() is None:
                    return asking[task]
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    failures = [(address, error) for task, address in asking.items() if (error := task.result()) is not None]
    raise _refusal(failures, settings) or ConnectError(
        f"none of bootstrap_servers={options['bootstrap_servers']} could be reached ({_told(failures, settings)}): "
        "check the addresses and that the brokers run"
    )


def advertised_by(cluster: Any) -> Collection[tuple[str, int]]:
    """Return the advertised broker addresses from a client's `ClusterMetadata`."""
    return [(broker.host, broker.port) for broker in cluster.brokers()]


async def why_unreachable(
    settings: "Settings", options: Mapping[str, Any], advertised: Collection[tuple[str, int]]
) -> TransportError:
    """Explain why no advertised broker answers although a bootstrap server did."""
    found = await asyncio.gather(*(_ask(host, port, options) for host, port in advertised))
    failures = [
        (f"{host}:{port}", error) for (host, port), error in zip(advertised, found, strict=True) if error is not None
    ]
    if (refused := _refusal(failures, settings)) is not None:
        return refused
    servers, told = options["bootstrap_servers"], _told(failures, settings)
    if len(failures) < len(advertised):
        return ConnectError(
            f"the brokers of bootstrap_servers={servers} did not answer in time, and "
            + (f"one or more still do not ({told}): check these brokers" if told else "all did a moment later")
        )
    return ConnectError(
        f"a broker of bootstrap_servers={servers} answered, but the addresses that it advertises do not ({told}): "
        "advertised.listeners of the brokers must name addresses that this machine can reach"
    )


def _addresses(servers: str) -> list[tuple[str, int]]:
    return [(host, port) for host, port, _ in collect_hosts(servers, randomize=False)]


def _refusal(failures: Collection[tuple[str, Exception]], settings: "Settings") -> AuthenticationError | None:
    for address, error in failures:
        refused = _authentication(error, address, settings)
        if refused is not None:
            return refused
    return None


def _told(failures: Collection[tuple[str, Exception]], settings: "Settings") -> str:
    return "; ".join(f"{address}: {_connection(error, settings)}" for address, error in failures)


async def _ask(host: str, port: int, options: Mapping[str, Any]) -> Exception | None:
    connection = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            connection = await create_conn(
                host,
                port,
                request_timeout_ms=int(CONNECT_TIMEOUT * 1000),
                **{name: value for name, value in options.items() if name in _CONNECTION_OPTIONS},
            )
            await connection.send(MetadataRequest([]))
    except Exception as error:  # noqa: BLE001 - any error is a valid result
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
                f"the certificate of {address} was not accepted ({cause.verify_message or cause.reason}) when checked "
                f"against {trusted}: give the CA that signed it as ssl_cafile, and connect under a name that it has"
            )
        if isinstance(cause, kafka.UnsupportedSaslMechanismError | kafka.IllegalSaslStateError):
            return AuthenticationError(
                f"{address} does not take sasl_mechanism={settings.sasl_mechanism}: use one that its listener enables"
            )
        if isinstance(cause, kafka.SaslAuthenticationFailed | kafka.AuthenticationFailedError):
            return AuthenticationError(
                f"{address} refused user {settings.sasl_username!r} with sasl_mechanism={settings.sasl_mechanism}: "
                "check sasl_username and sasl_password"
            )
    return None


def _connection(error: Exception, settings: "Settings") -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({_tls_reason(error)}); security_protocol is {settings.security_protocol}"
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT:g} s"
    if isinstance(error, kafka.KafkaConnectionError | ConnectionResetError | EOFError):
        told = (
            "the connection was closed before an answer came; "
            f"security_protocol is {settings.security_protocol}, the listener may expect another one"
        )
        # A broker that requires a client certificate reports it in a TLS alert, which asyncio swallows.
        wanted = settings.security_protocol.endswith("SSL") and settings.ssl_certfile is None
        return f"{told}, or a certificate of ours (ssl_certfile)" if wanted else told
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio's own text leaves out the reason
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return reason(error)


def _tls_reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def silence_client() -> None:
    """Hide aiokafka's log lines if no logging is configured; error messages already say what went wrong."""
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())
