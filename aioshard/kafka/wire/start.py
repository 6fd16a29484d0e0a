"""Connect to a cluster for the first time, and explain why that is not possible."""

import asyncio
import errno
import os
import ssl
from collections.abc import Collection
from typing import NamedTuple

from aiokafka.conn import collect_hosts

from aioshard.errors import AuthenticationError, ConnectError, TransportError
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.errors import (
    AuthenticationFailedError,
    ConnectionLostError,
    RequestTimedOutError,
    UnexpectedResponseError,
    UnsupportedMechanismError,
    UnsupportedVersionError,
    WireError,
)
from aioshard.kafka.wire.options import connection_options
from aioshard.kafka.wire.pool import CONNECT_TIMEOUT, IDLE_TIMEOUT
from aioshard.settings import Settings

START_TIMEOUT = 1.5 * CONNECT_TIMEOUT
"""Seconds for a client to get a response from an advertised broker: the first one that it tries may hang."""
_CLOSED = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})
"""Errors of a connection that the other side closed."""


class _Failure(NamedTuple):
    """A broker that did not answer."""

    address: str
    error: WireError


async def connect(settings: Settings, topics: Collection[str] = ()) -> Cluster:
    """Return a cluster of which a bootstrap server and an advertised broker have answered.

    Takes at most `START_TIMEOUT` plus twice `CONNECT_TIMEOUT`.

    Args:
        settings: The brokers, TLS and SASL.
        topics: The topics to look up and follow.

    Raises:
        ConnectError: No broker could be reached.
        AuthenticationError: The brokers rejected our credentials, or we rejected their certificate.
        SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
    """
    cluster = new_cluster(settings)
    await reach(cluster, settings, topics)
    return cluster


def new_cluster(settings: Settings) -> Cluster:
    """Return a cluster that is not connected yet.

    Raises:
        SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
    """
    hosts = collect_hosts(settings.require_bootstrap_servers(), randomize=False)
    servers = [(host, port) for host, port, _ in hosts]
    idle_ms = settings.client_options.get("connections_max_idle_ms")
    return Cluster(
        servers,
        connection_options(settings),
        metadata_max_age=settings.metadata_max_age,
        idle_timeout=IDLE_TIMEOUT if idle_ms is None else float(idle_ms) / 1000,
    )


async def reach(cluster: Cluster, settings: Settings, topics: Collection[str] = ()) -> None:
    """Connect a cluster, and start it; close it if that is not possible. See `connect`."""
    try:
        await _reach_server(cluster, settings)
        await _reach_advertised(cluster, topics, settings)
    except BaseException:
        await cluster.close()
        raise
    cluster.follow(topics)
    cluster.start()


async def _reach_server(cluster: Cluster, settings: Settings) -> None:
    """Ask all bootstrap servers concurrently for the brokers; the first answer is enough."""
    failures = await _first_answer(cluster, cluster.bootstrap, ())
    if not failures:
        return
    raise _refusal(failures, settings) or ConnectError(
        f"none of bootstrap_servers={settings.bootstrap_servers} could be reached "
        f"({_describe_failures(failures, settings)}): check the addresses and that the brokers run"
    )


async def _reach_advertised(cluster: Cluster, topics: Collection[str], settings: Settings) -> None:
    """Ask the advertised brokers for the topics; the first answer is enough."""
    nodes = list(cluster.metadata.brokers)
    failures: list[_Failure] = []
    try:
        async with asyncio.timeout(START_TIMEOUT):
            failures = await _first_answer(cluster, nodes, topics)
        if not failures:
            return
    except TimeoutError:
        failures = await _first_answer(cluster, nodes, topics)  # once more, to learn why; it ends by itself
    if (refused := _refusal(failures, settings)) is not None:
        raise refused
    details = _describe_failures(failures, settings)
    if len(failures) < len(nodes):
        explanation = (
            f"one or more still do not ({details}): check these brokers" if details else "all did a moment later"
        )
        raise ConnectError(
            f"the brokers of bootstrap_servers={settings.bootstrap_servers} did not answer in time, and {explanation}"
        )
    raise ConnectError(
        f"a broker of bootstrap_servers={settings.bootstrap_servers} answered, but the addresses that it advertises do "
        f"not ({details}): advertised.listeners of the brokers must name addresses that this machine can reach"
    )


async def _first_answer(
    cluster: Cluster, targets: Collection[int | tuple[str, int]], topics: Collection[str]
) -> list[_Failure]:
    """Ask brokers concurrently; return nothing once one has answered, else why each of them has not."""
    attempts = [
        asyncio.create_task(cluster.look_up_at(target, topics), name=f"try broker {target}") for target in targets
    ]
    try:
        for attempt in asyncio.as_completed(attempts):
            try:
                await attempt
            except WireError:
                continue
            return []
    finally:
        for task in attempts:
            task.cancel()
        if attempts:
            await asyncio.wait(attempts)
    failures = []
    for target, task in zip(targets, attempts, strict=True):
        error = task.exception()
        if isinstance(error, WireError):
            failures.append(_Failure(cluster.address_of(target), error))
    return failures


# Explanations -----------------------------------------------------------------------------


def _refusal(failures: Collection[_Failure], settings: Settings) -> TransportError | None:
    """Return the error of a broker that does not accept us, or that we do not trust or speak, if there is one."""
    for address, error in failures:
        if isinstance(error, UnsupportedVersionError):
            return ConnectError(str(error))
        refusal = _authentication_error(error, address, settings)
        if refusal is not None:
            return refusal
    return None


def _authentication_error(error: WireError, address: str, settings: Settings) -> AuthenticationError | None:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        trusted = f"ssl_cafile={settings.ssl_cafile}" if settings.ssl_cafile else "the system's certificates"
        return AuthenticationError(
            f"the certificate of {address} was not accepted ({cause.verify_message or cause.reason}) when checked "
            f"against {trusted}: set ssl_cafile to the CA that signed it, and connect under a name that it contains"
        )
    if isinstance(error, UnsupportedMechanismError):
        return AuthenticationError(
            f"{address} does not support sasl_mechanism={settings.sasl_mechanism}: use one that its listener enables"
        )
    if isinstance(error, AuthenticationFailedError):
        return AuthenticationError(
            f"{address} refused user {settings.sasl_username!r} with sasl_mechanism={settings.sasl_mechanism}: "
            "check sasl_username and sasl_password"
        )
    return None


def _describe_failures(failures: Collection[_Failure], settings: Settings) -> str:
    return "; ".join(f"{address}: {_describe_failure(address, error, settings)}" for address, error in failures)


def _describe_failure(address: str, error: WireError, settings: Settings) -> str:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLError):
        failed = (cause.reason or str(cause)).replace("_", " ").lower()
        return f"TLS failed ({failed}); security_protocol is {settings.security_protocol}"
    if isinstance(error, RequestTimedOutError) or isinstance(cause, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT:g} s"
    is_closed = isinstance(error, ConnectionLostError) and (cause is None or isinstance(cause, ConnectionError))
    if isinstance(cause, OSError) and cause.errno and cause.errno not in _CLOSED:
        # asyncio's own text leaves out the reason.
        return os.strerror(cause.errno) if cause.errno > 0 else cause.strerror or str(cause)
    if is_closed:
        found = "the connection was closed before the broker answered"
        if isinstance(error, UnexpectedResponseError):
            found = str(error).removeprefix(f"{address} ").rstrip(".")
        message = f"{found}; security_protocol is {settings.security_protocol}, the listener may expect another one"
        # A broker that requires a client certificate reports it in a TLS alert, which asyncio swallows.
        wanted = settings.security_protocol.endswith("SSL") and settings.ssl_certfile is None
        return f"{message}, or a client certificate (ssl_certfile)" if wanted else message
    return str(error)
