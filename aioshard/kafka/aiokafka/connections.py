"""Connect to brokers, explain why none answers, and keep connections usable."""

import asyncio
import contextlib
import functools
import logging
import os
import random
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from aiokafka import errors as kafka
from aiokafka.client import ConnectionGroup
from aiokafka.conn import CloseReason, collect_hosts, create_conn
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.group import HeartbeatRequest, LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest

from aioshard.errors import AuthenticationError, ConnectError, SettingsError, TransportError
from aioshard.kafka.aiokafka.answers import reason
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.aiokafka.connections")

CONNECT_TIMEOUT = 3.0
"""Seconds for a broker to accept a connection, authenticate us and answer. The default `start_timeout` has room for
three of them, so that the app reports the cause instead of a start that took too long."""
START_TIMEOUT = 1.5 * CONNECT_TIMEOUT
"""Seconds for a client to get a response from an advertised broker: the first one it tries may hang."""

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


C = TypeVar("C", bound=Any)
"""`BareClient` or `Internals`; this module is below them."""


async def connected(settings: Settings, options: Mapping[str, Any], make: Callable[[dict[str, Any]], C]) -> C:
    """Return a client connected to a broker that answers; takes at most `START_TIMEOUT` plus twice `CONNECT_TIMEOUT`.

    Args:
        settings: For the error messages.
        options: The client's options.
        make: Makes the client from its options.

    Raises:
        ConnectError: No broker could be reached.
        AuthenticationError: The brokers refused our credentials, or we refused their certificate.
        SettingsError: The client refused an option.
    """
    # The client itself would try the servers in turn, with its full timeout for each.
    server = await find_broker(settings, options)
    answered = False
    try:
        client = make({**options, "bootstrap_servers": server})
        try:
            async with asyncio.timeout(START_TIMEOUT):
                answered = await client.begin()
        except (RuntimeError, TimeoutError) as error:  # a KafkaError, or uvloop's error for a connection that was lost
            logger.debug("connecting failed: %s", reason(error))
        except BaseException:
            await client.tear_down()
            raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise SettingsError(f"the Kafka client refused an option: {reason(error)}") from error
    if not answered:
        advertised = [(broker.host, broker.port) for broker in client.cluster.brokers()]
        await client.tear_down()
        raise await why_unreachable(settings, options, advertised)
    return client


async def find_broker(settings: Settings, options: Mapping[str, Any]) -> str:
    """Return the address of the first bootstrap server that answers; tries all of them concurrently.

    Args:
        settings: For the error messages: user, mechanism, files.
        options: The client's options.

    Raises:
        AuthenticationError: A server refused our credentials, or we refused its certificate, and no server
            accepted.
        ConnectError: No server answered within `CONNECT_TIMEOUT`.
    """
    servers = collect_hosts(options["bootstrap_servers"], randomize=False)
    probes = [asyncio.create_task(_probe(host, port, options), name=f"try {host}:{port}") for host, port, _ in servers]
    try:
        for probe in asyncio.as_completed(probes):
            address, error = await probe
            if error is None:
                return address
    finally:
        await end_tasks(probes)
    failures = [probe.result() for probe in probes]
    raise _refusal(failures, settings) or ConnectError(
        f"none of bootstrap_servers={options['bootstrap_servers']} could be reached "
        f"({_describe_failures(failures, settings)}): check the addresses and that the brokers run"
    )


async def why_unreachable(
    settings: Settings, options: Mapping[str, Any], advertised: Collection[tuple[str, int]]
) -> TransportError:
    """Explain why no advertised broker answers although a bootstrap server did."""
    results = await asyncio.gather(*(_probe(host, port, options) for host, port in advertised))
    failures = [result for result in results if result[1] is not None]
    if (refused := _refusal(failures, settings)) is not None:
        return refused
    servers, details = options["bootstrap_servers"], _describe_failures(failures, settings)
    if len(failures) < len(advertised):
        return ConnectError(
            f"the brokers of bootstrap_servers={servers} did not answer in time, and "
            + (f"one or more still do not ({details}): check these brokers" if details else "all did a moment later")
        )
    return ConnectError(
        f"a broker of bootstrap_servers={servers} answered, but the addresses that it advertises do not ({details}): "
        "advertised.listeners of the brokers must name addresses that this machine can reach"
    )


_ProbeResult = tuple[str, Exception | None]
"""The address of a broker, and why it did not answer."""


def _refusal(failures: Collection[_ProbeResult], settings: Settings) -> AuthenticationError | None:
    return next(filter(None, (_authentication_error(error, address, settings) for address, error in failures)), None)


def _describe_failures(failures: Collection[_ProbeResult], settings: Settings) -> str:
    return "; ".join(f"{address}: {_describe_failure(error, settings)}" for address, error in failures)


async def _probe(host: str, port: int, options: Mapping[str, Any]) -> _ProbeResult:
    address, connection = f"{host}:{port}", None
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
        return address, error
    finally:
        if connection is not None and (closed := connection.close()) is not None:
            await asyncio.wait([closed], timeout=1)
    return address, None


def _authentication_error(error: Exception | None, address: str, settings: Settings) -> AuthenticationError | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        trusted = f"ssl_cafile={settings.ssl_cafile}" if settings.ssl_cafile else "the system's certificates"
        return AuthenticationError(
            f"the certificate of {address} was not accepted ({error.verify_message or error.reason}) when checked "
            f"against {trusted}: set ssl_cafile to the CA that signed it, and connect under a name that it contains"
        )
    if isinstance(error, kafka.UnsupportedSaslMechanismError | kafka.IllegalSaslStateError):
        return AuthenticationError(
            f"{address} does not support sasl_mechanism={settings.sasl_mechanism}: use one that its listener enables"
        )
    if isinstance(error, kafka.SaslAuthenticationFailed | kafka.AuthenticationFailedError):
        return AuthenticationError(
            f"{address} refused user {settings.sasl_username!r} with sasl_mechanism={settings.sasl_mechanism}: "
            "check sasl_username and sasl_password"
        )
    return None


def _describe_failure(error: Exception | None, settings: Settings) -> str:
    if isinstance(error, ssl.SSLError):
        failed = (error.reason or str(error)).replace("_", " ").lower()
        return f"TLS failed ({failed}); security_protocol is {settings.security_protocol}"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT:g} s"
    if isinstance(error, kafka.KafkaConnectionError | ConnectionResetError | EOFError):
        message = (
            "the connection was closed before the broker answered; "
            f"security_protocol is {settings.security_protocol}, the listener may expect another one"
        )
        # A broker that requires a client certificate reports it in a TLS alert, which asyncio swallows.
        wanted = settings.security_protocol.endswith("SSL") and settings.ssl_certfile is None
        return f"{message}, or a client certificate (ssl_certfile)" if wanted else message
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio's own text leaves out the reason
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return reason(error) if error is not None else "it answers"


def silence_client() -> None:
    """Hide aiokafka's log lines if no logging is configured; error messages already say what went wrong."""
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())


_ANSWERED_IMMEDIATELY = (
    FindCoordinatorRequest,
    HeartbeatRequest,
    LeaveGroupRequest,
    MetadataRequest,
)
"""Requests that brokers answer without delay. Joins wait for members, fetches for records, commits for replicas."""

_HUNG_PAUSE = 1.0
"""Seconds to leave a broker alone after a connection attempt timed out: other brokers come first."""
CLOSE_GRACE = 1.0
"""Seconds to wait until cancelled tasks and closed connections end."""


def is_connected(client: Any) -> bool:
    """Whether a connection to any broker is open."""
    return any(connection.connected() for connection in client._conns.values())


def refuse_useless_connections(client: Any, patience: float = 10.0) -> None:
    """Make the client fail fast, as with a broker that is down, instead of using a broken connection.

    * A broker that is just starting may report no API versions. The client would keep the connection and fail every
      request on it, silently, until the connection has been idle for minutes.
    * The client notices a lost connection only a few event loop iterations later. Until then, uvloop rejects writes
      with a `RuntimeError`, which the client treats as a bug: its heartbeat, commit or sender task ends, and
      everything else with it.
    * A client that was torn down would connect again for a request that was waiting.
    * A hanging broker would block a metadata look-up or heartbeat for the full request timeout. The client also
      opens only one connection at a time, so the broker would block new connections to every other broker. With
      this patch, the client opens one connection at a time per broker. It leaves a hanging broker alone for a
      moment, and does not ask it for coordinators while another broker is connected.

    Call it before the client connects.

    Args:
        client: The client.
        patience: Seconds to wait for the response to a request that brokers answer without delay. Opening a
            connection may take as long, but no longer than `CONNECT_TIMEOUT`.
    """
    any_connection = client._get_conn
    client._get_conn_lock_value = contextlib.nullcontext()
    connecting: defaultdict[tuple[Any, Any], asyncio.Lock] = defaultdict(asyncio.Lock)
    hung_at: dict[tuple[Any, Any], float] = {}

    async def usable_connection(node: Any, *, group: Any = ConnectionGroup.DEFAULT, no_hint: bool = False) -> Any:
        clock = asyncio.get_running_loop().time
        async with connecting[node, group]:
            ended = client._sync_task is not None and client._sync_task.done()
            if ended or clock() < hung_at.get((node, group), -_HUNG_PAUSE) + _HUNG_PAUSE:
                return None
            try:
                async with asyncio.timeout(min(patience, CONNECT_TIMEOUT)):
                    connection = await any_connection(node, group=group, no_hint=no_hint)
            except (RuntimeError, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    hung_at[node, group] = clock()
                logger.info("the connection to broker %s was not made: %s", node, str(error) or "no answer in time")
                client.force_metadata_update()
                return None
        if connection is None:
            return None
        if not connection._versions:
            client._conns.pop((node, group), None)
            connection.close(reason=CloseReason.OUT_OF_SYNC)
            return None
        if "send" not in vars(connection):
            connection.send = _sending_in_time(connection, patience)
        return connection

    client._get_conn = usable_connection
    client.get_random_node = functools.partial(_connected_node, client, client.get_random_node)


def _connected_node(client: Any, any_node: Callable[[], Any]) -> Any:
    """Return a broker with an open connection, or any broker if there is none."""
    nodes = [
        node
        for (node, group), connection in client._conns.items()
        if group is ConnectionGroup.DEFAULT and node != "bootstrap" and connection.connected()
    ]
    return random.choice(nodes) if nodes else any_node()  # noqa: S311 - no secret


def _sending_in_time(connection: Any, patience: float) -> Callable[..., Awaitable[Any]]:
    """Wrap `send`: close a connection that was lost, or whose broker leaves a quick request unanswered."""
    send_any = connection.send

    async def in_time(response: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(patience):
                return await response
        except TimeoutError:
            connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
            raise

    def send(request: Any, expect_response: bool = True) -> Awaitable[Any]:
        try:
            response: Awaitable[Any] = send_any(request, expect_response)
        except (kafka.KafkaError, NotImplementedError):
            raise  # Also RuntimeErrors: the broker does not support the request, for example.
        except RuntimeError as error:
            connection.close(reason=CloseReason.CONNECTION_BROKEN)
            raise kafka.KafkaConnectionError(f"the connection is lost: {error}") from error
        return in_time(response) if isinstance(request, _ANSWERED_IMMEDIATELY) else response

    return send


async def close_client(client: Any, tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """End *tasks*, the client's own task and every connection, in any state.

    Use this instead of aiokafka's `close` and `stop`. They cancel a task, await it, and mistake a cancellation of
    their caller for the end of that task. The cancellation gets lost, so a command keeps running after SIGINT.

    Cancels and closes everything before the first await, so that nothing stays behind even after a second
    cancellation. Takes at most twice `CLOSE_GRACE`.
    """
    closing = []
    for connection in list(client._conns.values()):
        transport = connection._writer and connection._writer.transport
        if (closed := connection.close(reason=CloseReason.SHUTDOWN)) is not None:
            closing.append((closed, transport))
    client._conns.clear()
    if client._md_update_fut is not None and not client._md_update_fut.done():
        client._md_update_fut.set_result(False)  # Nobody else will set it; its waiters would wait forever.
    await end_tasks(task for task in (client._sync_task, *tasks) if task is not None)
    if closing:
        await asyncio.wait([closed for closed, _ in closing], timeout=CLOSE_GRACE)
    for closed, transport in closing:
        if not closed.done() and transport is not None:
            transport.abort()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they end, with any result, for at most `CLOSE_GRACE`."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if not ending:
        return
    done, _ = await asyncio.wait(ending, timeout=CLOSE_GRACE)
    for task in done:
        if not task.cancelled():
            task.exception()  # Retrieve it, so that the event loop does not log it.
