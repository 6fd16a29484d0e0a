"""The pool on a real broker: TLS, every SASL mechanism, refusals, short sessions, idle and frozen brokers."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from aiokafka.abc import AbstractTokenProvider

from aioshard.kafka.embedded import EmbeddedBroker
from aioshard.kafka.wire.errors import (
    AuthenticationFailedError,
    ConnectionLostError,
    RequestTimedOutError,
    UnexpectedResponseError,
    UnsupportedMechanismError,
)
from aioshard.kafka.wire.options import ConnectionOptions, connection_options
from aioshard.kafka.wire.pool import ConnectionPool, Purpose
from aioshard.kafka.wire.requests import FETCH, METADATA
from aioshard.settings import Settings
from tests.kafka.wire.conftest import LIFETIME, PROTOCOLS, Listeners, unsigned_token
from tests.support.kafka_properties import PLAIN_USER, SCRAM_USER, SUPER_USER
from tests.support.ports import free_port

pytestmark = pytest.mark.kafka

BROKERS = METADATA(topics=[], create_topics=False, cluster_operations=False, topic_operations=False)
WRONG = "a-wrong-secret"
SECRETS = [SCRAM_USER.password, PLAIN_USER.password, SUPER_USER.password, WRONG]

MakePool = Callable[[ConnectionOptions], ConnectionPool]


@pytest.fixture
async def pool() -> AsyncIterator[MakePool]:
    """Makes pools that are closed with the test."""
    pools: list[ConnectionPool] = []

    def make(options: ConnectionOptions) -> ConnectionPool:
        pools.append(ConnectionPool(options))
        return pools[-1]

    yield make
    for made in pools:
        await made.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture(autouse=True)
def no_secret_is_shown(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    records = [record for phase in ("setup", "call") for record in caplog.get_records(phase)]
    output = "\n".join(f"{record.getMessage()} {record.exc_text}" for record in records)
    assert [secret for secret in SECRETS if secret in output] == []


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """Tokens with a lifetime in seconds; negative for expired ones."""

    def __init__(self, lifetime: float = 3600) -> None:
        self.lifetime = lifetime
        self.asked = 0

    async def token(self) -> str:
        self.asked += 1
        return unsigned_token(self.lifetime)


def options_for(
    listeners: Listeners, listener: str, mechanism: str | None = None, **overrides: Any
) -> ConnectionOptions:
    """Options for a listener, by way of the settings that users write."""
    protocol = PROTOCOLS[listener]
    settings: dict[str, Any] = {"security_protocol": protocol}
    if protocol.endswith("SSL"):
        settings["ssl_cafile"] = str(listeners.certificates.ca_file)
    if protocol.startswith("SASL"):
        settings["sasl_mechanism"] = mechanism or "PLAIN"
        if mechanism == "OAUTHBEARER":
            settings["client_options"] = {"sasl_oauth_token_provider": Tokens()}
        else:
            user = SCRAM_USER if (mechanism or "").startswith("SCRAM") else PLAIN_USER
            settings |= {"sasl_username": user.username, "sasl_password": user.password}
    return connection_options(Settings(**(settings | overrides)))


@pytest.mark.parametrize(
    ("listener", "mechanism"),
    [
        ("PLAINTEXT", None),
        ("TLS", None),
        *[
            (listener, mechanism)
            for listener in ("LOGIN", "SECURE")
            for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
        ],
    ],
)
async def test_every_way_to_connect(listeners: Listeners, pool: MakePool, listener: str, mechanism: str | None) -> None:
    made = pool(options_for(listeners, listener, mechanism))
    response = await made.ask(listeners[listener], BROKERS)
    assert [(broker.host, broker.port) for broker in response.brokers] == [listeners[listener]]
    connection = await made.connection(listeners[listener])
    assert connection.features["group.version"] >= 1
    if mechanism == "OAUTHBEARER":
        assert connection.lifetime <= 3600, "that of the token"
    else:
        assert connection.lifetime == float("inf")


async def test_connections_by_name(listeners: Listeners, pool: MakePool) -> None:
    """`localhost` may also have an address on which the broker does not listen."""
    made = pool(options_for(listeners, "TLS"))
    assert (await made.ask(("localhost", listeners.ports["TLS"]), BROKERS)).brokers


# Refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_a_wrong_password_is_refused(listeners: Listeners, pool: MakePool, mechanism: str) -> None:
    made = pool(options_for(listeners, "LOGIN", mechanism, sasl_password=WRONG))
    with pytest.raises(AuthenticationFailedError, match="refused the login: Authentication failed") as raised:
        await made.ask(listeners["LOGIN"], BROKERS)
    assert not raised.value.retriable
    assert WRONG not in repr(raised.value) + repr(raised.value.__cause__) + repr(raised.value.__context__)


async def test_an_expired_token_is_refused(listeners: Listeners, pool: MakePool) -> None:
    overrides = {"client_options": {"sasl_oauth_token_provider": Tokens(-3600)}}
    made = pool(options_for(listeners, "LOGIN", "OAUTHBEARER", **overrides))
    with pytest.raises(AuthenticationFailedError, match="invalid_token"):
        await made.ask(listeners["LOGIN"], BROKERS)


async def test_a_mechanism_that_is_not_offered_is_named(listeners: Listeners, pool: MakePool) -> None:
    made = pool(ConnectionOptions(security_protocol="SASL_PLAINTEXT", sasl_mechanism="GSSAPI"))
    with pytest.raises(UnsupportedMechanismError, match=r"does not offer SASL mechanism GSSAPI; it offers .*SCRAM"):
        await made.ask(listeners["LOGIN"], BROKERS)


async def test_sasl_on_a_listener_without_it_is_recognized(listeners: Listeners, pool: MakePool) -> None:
    made = pool(options_for(listeners, "LOGIN"))
    with pytest.raises(UnsupportedMechanismError, match="does not offer SASL mechanism PLAIN; it offers none"):
        await made.ask(listeners["PLAINTEXT"], BROKERS)


async def test_an_untrusted_certificate_is_recognized(listeners: Listeners, pool: MakePool) -> None:
    made = pool(options_for(listeners, "TLS", ssl_cafile=str(listeners.certificates.stranger_file)))
    with pytest.raises(ConnectionLostError, match="TLS failed") as raised:
        await made.ask(listeners["TLS"], BROKERS)
    assert isinstance(raised.value.__cause__, ssl.SSLCertVerificationError)


@pytest.mark.parametrize(("ours", "theirs"), [("PLAINTEXT", "TLS"), ("LOGIN", "SECURE")])
async def test_a_listener_with_tls_is_recognized(listeners: Listeners, pool: MakePool, ours: str, theirs: str) -> None:
    made = pool(options_for(listeners, ours))
    with pytest.raises(UnexpectedResponseError, match="looks like TLS; security_protocol is"):
        await made.ask(listeners[theirs], BROKERS)


@pytest.mark.parametrize(("ours", "theirs"), [("PLAINTEXT", "LOGIN"), ("TLS", "PLAINTEXT"), ("TLS", "SECURE")])
async def test_a_listener_with_another_protocol_closes_the_connection(
    listeners: Listeners, pool: MakePool, ours: str, theirs: str
) -> None:
    made = pool(options_for(listeners, ours))
    with pytest.raises(ConnectionLostError) as raised:
        await made.ask(listeners[theirs], BROKERS)
    cause = raised.value.__cause__
    assert "closed the connection" in str(raised.value) or isinstance(cause, ConnectionResetError)


async def test_a_stopped_broker_refuses_connections(listeners: Listeners, pool: MakePool) -> None:
    made = pool(options_for(listeners, "PLAINTEXT"))
    with pytest.raises(ConnectionLostError, match="Connection refused") as raised:
        await made.ask(("127.0.0.1", free_port()), BROKERS)
    assert isinstance(raised.value.__cause__, ConnectionRefusedError)


# Connections that the broker ends ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["PLAIN", "OAUTHBEARER"])
async def test_no_request_fails_over_several_lifetimes(listeners: Listeners, pool: MakePool, mechanism: str) -> None:
    """The broker cuts a connection on which a request arrives after its lifetime (KIP-368)."""
    options = options_for(listeners, "SHORT", mechanism)
    made = pool(options)
    loop = asyncio.get_running_loop()
    end = loop.time() + 3.5 * LIFETIME
    connections = set()

    async def ask() -> None:
        while loop.time() < end:
            await made.ask(listeners["SHORT"], BROKERS)
            connections.add(await made.connection(listeners["SHORT"]))
            await asyncio.sleep(0.02)

    async def fetch() -> None:
        request = FETCH(
            replica=-1, max_wait_ms=700, min_bytes=1, max_bytes=1_000_000, isolation=0, session=0, session_epoch=-1,
            topics=[], forgotten=[], rack="",
        ).up_to(12)  # fmt: skip
        while loop.time() < end:
            await made.ask(listeners["SHORT"], request, purpose=Purpose.FETCH)

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        group.create_task(fetch())
    assert {connection.lifetime for connection in connections} == {LIFETIME}
    assert 4 <= len(connections) <= 5
    if isinstance(options.token_provider, Tokens):
        assert options.token_provider.asked >= 8, "a token for each connection"


async def test_a_frozen_broker_costs_one_request_its_limit(listeners: Listeners, pool: MakePool) -> None:
    made = pool(options_for(listeners, "PLAINTEXT"))
    await made.ask(listeners["PLAINTEXT"], BROKERS)
    listeners.broker.freeze()
    try:
        with pytest.raises(RequestTimedOutError, match=r"did not answer Metadata within 0\.5 s"):
            await made.ask(listeners["PLAINTEXT"], BROKERS, timeout=0.5)
        with pytest.raises(ConnectionLostError, match="no answer within 3 s"):
            await made.ask(listeners["PLAINTEXT"], BROKERS)
    finally:
        listeners.broker.thaw()
    async with asyncio.timeout(30):
        assert (await made.ask(listeners["PLAINTEXT"], BROKERS)).cluster


# Another broker ---------------------------------------------------------------------------


async def test_the_embedded_broker_speaks_what_we_need(pool: MakePool) -> None:
    async with EmbeddedBroker() as broker:
        host, port = broker.bootstrap_servers.rsplit(":", 1)
        response = await pool(ConnectionOptions()).ask((host, int(port)), BROKERS)
        assert response.brokers
