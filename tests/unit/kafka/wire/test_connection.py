"""A connection: versions, frames, limits, throttling, login and end, on a network in memory with virtual time."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from aioshard.kafka.wire.connection import MAX_FRAME, Connection
from aioshard.kafka.wire.errors import (
    AuthenticationFailedError,
    BrokerError,
    ConnectionLostError,
    RequestTimedOutError,
    UnexpectedResponseError,
    UnsupportedMechanismError,
    UnsupportedVersionError,
)
from aioshard.kafka.wire.options import ConnectionOptions
from aioshard.kafka.wire.requests import (
    API_VERSIONS,
    FETCH,
    FIND_COORDINATOR,
    METADATA,
    OFFSET_FETCH,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
)
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import ModelBroker, Received, encode_response, hold

Scenario = Callable[[ModelBroker, "Dial"], Awaitable[None]]
FIND = FIND_COORDINATOR(key="billing", kind=0)
LOGIN = ConnectionOptions(
    security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", sasl_username="bob", sasl_password="bob-secret"
)


class Dial:
    """Opens connections to the model broker, and closes them at the end."""

    def __init__(self) -> None:
        self.opened: list[Connection] = []

    async def __call__(self, options: ConnectionOptions | None = None, timeout: float = 3.0) -> Connection:
        connection = await Connection.open("kafka", 9092, options or ConnectionOptions(), timeout=timeout)
        self.opened.append(connection)
        return connection


def scenario(test: Scenario, broker: ModelBroker | None = None) -> None:
    async def live(network: MemoryNetwork) -> None:
        model = broker or ModelBroker()
        network.add("kafka", model.protocol)
        dial = Dial()
        try:
            await test(model, dial)
        finally:
            for connection in dial.opened:
                connection.close()
                await connection.closed()
        await asyncio.sleep(1)
        assert model.open_sessions == []

    run_on_network(live)


def now() -> float:
    return asyncio.get_running_loop().time()


# Versions -------------------------------------------------------------------------------


def test_every_connection_asks_for_versions_and_says_who_we_are() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        await dial(ConnectionOptions(client_id="billing-app"))
        await dial(ConnectionOptions(client_id="billing-app"))
        first, second = broker.requests
        for request in (first, second):
            assert (request.api, request.version, request.client_id) == (API_VERSIONS, 4, "billing-app")
            assert request.values.software == "aioshard"
            assert request.values.software_version[0].isdigit()

    scenario(test)


@pytest.mark.parametrize("offered", [(0, 3), (0, 2), (0, 0)], ids=str)
def test_a_broker_that_does_not_know_the_newest_version_is_asked_in_its_own(offered: tuple[int, int]) -> None:
    """It answers in version 0, because it can read neither the request nor the wish."""

    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        assert [request.version for request in broker.received(API_VERSIONS)] == [4, offered[1]]
        assert (await connection.send(FIND)).error == 0

    scenario(test, ModelBroker({API_VERSIONS: offered}))


def test_a_broker_that_names_no_versions_at_all_is_asked_in_version_0() -> None:
    """Before Kafka 2.4, the answer with error 35 is empty."""

    def old(request: Received) -> None:
        apis = [{"key": METADATA.key, "lowest": 0, "highest": 9}]
        request.reply_bytes(encode_response(API_VERSIONS, 0, error=35 if request.version else 0, apis=apis))

    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(API_VERSIONS, old)
        await dial()
        assert [request.version for request in broker.requests] == [4, 0]

    scenario(test)


def test_a_refusal_that_cannot_be_read_is_a_refusal() -> None:
    """librdkafka's mock cluster answers in a mixture of two versions."""

    def old(request: Received) -> None:
        if request.version:
            request.reply_bytes(bytes.fromhex("0023 01 0012 0000 0002 00000000"))
        else:
            request.reply(apis=[{"key": METADATA.key, "lowest": 0, "highest": 9}])

    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(API_VERSIONS, old)
        await dial()
        assert [request.version for request in broker.requests] == [4, 0]

    scenario(test)


def test_the_error_code_of_the_versions_is_read() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(API_VERSIONS, lambda request: request.reply(error=42))
        with pytest.raises(BrokerError, match="kafka:9092 refused ApiVersions: error code 42") as raised:
            await dial()
        assert raised.value.code == 42

    scenario(test)


def test_a_starting_broker_without_versions_is_refused() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(API_VERSIONS, lambda request: request.reply())
        with pytest.raises(ConnectionLostError, match="reports no API versions"):
            await dial()

    scenario(test)


def test_finalized_features_are_kept() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.features = {"transaction.version": 2, "group.version": 1}
        assert dict((await dial()).features) == {"transaction.version": 2, "group.version": 1}

    scenario(test)


@pytest.mark.parametrize(
    ("offered", "most", "sent"),
    [((0, 99), 999, 10), ((0, 8), 999, 8), ((0, 99), 7, 7), ((7, 7), 999, 7)],
    ids=["our newest", "the broker's newest", "the newest that the request allows", "the only one"],
)
def test_the_newest_common_version_is_chosen_when_a_request_is_sent(
    offered: tuple[int, int], most: int, sent: int
) -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        fields: dict[str, Any] = {"group": "g", "topics": None, "groups": [], "stable": True}
        await connection.send(OFFSET_FETCH(**fields).up_to(most))
        assert [request.version for request in broker.received(OFFSET_FETCH)] == [sent]

    scenario(test, ModelBroker({OFFSET_FETCH: offered}))


@pytest.mark.parametrize(("offered", "most"), [((0, 5), 999), ((11, 12), 999), ((0, 99), 5)])
def test_a_request_without_a_common_version_is_refused_and_nothing_else(offered: tuple[int, int], most: int) -> None:
    """Compatible services lack versions of one API, and are usable otherwise."""

    async def test(_: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        fields: dict[str, Any] = {"group": "g", "topics": None, "groups": [], "stable": True}
        with pytest.raises(
            UnsupportedVersionError, match=r"no version of OffsetFetch .* supports Kafka 2\.8 and newer"
        ):
            connection.send(OFFSET_FETCH(**fields).up_to(most))
        assert (await connection.send(FIND)).error == 0
        assert connection.is_open

    scenario(test, ModelBroker({OFFSET_FETCH: offered}))


def test_a_broker_that_is_too_old_is_refused_at_the_start() -> None:
    async def test(_: ModelBroker, dial: Dial) -> None:
        with pytest.raises(UnsupportedVersionError, match=r"offers its versions 0 to 7\. aioshard supports Kafka 2\.8"):
            await dial()

    scenario(test, ModelBroker({METADATA: (0, 7)}))


def test_an_api_that_the_broker_does_not_have_is_refused() -> None:
    broker = ModelBroker()
    del broker.versions[FETCH]

    async def test(_: ModelBroker, dial: Dial) -> None:
        with pytest.raises(UnsupportedVersionError, match="the broker does not offer it"):
            (await dial()).send(FETCH())

    scenario(test, broker)


# Frames ---------------------------------------------------------------------------------


def test_a_response_may_arrive_byte_by_byte_or_with_others() -> None:
    def in_bytes(request: Received) -> None:
        for byte in request.frame(node=1):
            request.session.write(bytes([byte]))

    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        broker.on(FIND_COORDINATOR, in_bytes)
        assert (await connection.send(FIND)).node == 1

        held: list[Received] = []
        broker.on(FIND_COORDINATOR, hold(held))
        responses = [connection.send(FIND) for _ in range(3)]
        await broker.arrival(FIND_COORDINATOR, 4)
        frames = b"".join(request.frame(node=node) for node, request in enumerate(held))
        held[0].session.write(frames[:-1])
        held[0].session.write(frames[-1:])
        assert [(await response).node for response in responses] == [0, 1, 2]

    scenario(test)


@pytest.mark.parametrize(
    ("received", "hint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "It looks like HTTP"),
        (
            b"\x15\x03\x03\x00\x02\x02\x46",
            "security_protocol is PLAINTEXT, the listener may expect another one",
        ),
        (struct.pack(">i", MAX_FRAME + 1), "something other than Kafka"),
        (struct.pack(">i", -1), "something other than Kafka"),
        (struct.pack(">i", 3) + b"abc", "something other than Kafka"),
    ],
)
def test_something_other_than_kafka_is_recognized_before_memory_is_taken(received: bytes, hint: str) -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(API_VERSIONS, lambda request: request.session.write(received))
        with pytest.raises(UnexpectedResponseError, match=hint):
            await dial()

    scenario(test)


@pytest.mark.parametrize("body", [b"", b"\0\0", b"\0" * 5 + b"\xff" * 20], ids=["empty", "short", "damaged"])
def test_a_damaged_response_closes_the_connection(body: bytes) -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        broker.on(FIND_COORDINATOR, lambda request: request.reply_bytes(body))
        damaged = connection.send(FIND)
        behind = connection.send(FIND)
        with pytest.raises(UnexpectedResponseError, match="FindCoordinator"):
            await damaged
        with pytest.raises(ConnectionLostError, match="damaged"):
            await behind
        assert not connection.is_open

    scenario(test)


def test_responses_are_matched_by_correlation_id() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        held: list[Received] = []
        broker.on(FIND_COORDINATOR, hold(held))
        connection = await dial()
        responses = [connection.send(FIND) for _ in range(3)]
        await broker.arrival(FIND_COORDINATOR, 3)
        for node in (2, 0, 1):
            held[node].reply(node=node)
        assert [(await response).node for response in responses] == [0, 1, 2]
        assert connection.in_flight == 0

    scenario(test)


def test_a_response_to_nothing_closes_the_connection() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()

        def confuse(request: Received) -> None:
            request.correlation += 7
            request.reply()

        broker.on(FIND_COORDINATOR, confuse)
        with pytest.raises(UnexpectedResponseError, match="answered request 9, which was not sent"):
            await connection.send(FIND)
        assert not connection.is_open

    scenario(test)


def test_a_second_response_to_a_request_closes_the_connection() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        broker.on(FIND_COORDINATOR, lambda request: request.session.write(2 * request.frame(node=1)))
        assert (await connection.send(FIND)).node == 1
        await connection.ended
        with pytest.raises(ConnectionLostError, match="was not sent"):
            connection.send(FIND)

    scenario(test)


# Cancelled requests ---------------------------------------------------------------------


def test_the_late_response_to_a_cancelled_request_is_skipped_undecoded() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        held: list[Received] = []
        broker.on(FIND_COORDINATOR, hold(held))
        connection = await dial()
        given_up = asyncio.create_task(connection.ask(FIND, 10))
        behind = asyncio.create_task(connection.ask(FIND, 10))
        await broker.arrival(FIND_COORDINATOR, 2)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert connection.in_flight == 2
        held[0].reply_bytes(b"\0\0\0\0 and then what no decoder accepts")
        held[1].reply(node=5)
        assert (await behind).node == 5
        assert connection.is_open

    scenario(test)


def test_a_cancelled_request_that_the_broker_may_hold_closes_the_connection() -> None:
    """The broker would read nothing behind a join until the group is complete."""

    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(FIND_COORDINATOR, hold([]))
        connection = await dial()
        join = asyncio.create_task(connection.ask(FIND, 300, held=True))
        await broker.arrival(FIND_COORDINATOR)
        join.cancel()
        await asyncio.wait([join])
        assert not connection.is_open
        await connection.closed()

    scenario(test)


def test_a_cancelled_request_that_was_not_sent_yet_leaves_no_trace() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        broker.on(FIND_COORDINATOR, lambda request: request.reply(throttle_ms=5_000))
        await connection.ask(FIND, 10)
        waiting = asyncio.create_task(connection.ask(FIND, 10, held=True))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert connection.is_open
        assert not connection.is_busy
        await connection.ask(FIND, 10)
        assert len(broker.received(FIND_COORDINATOR)) == 2

    scenario(test)


# Limits ---------------------------------------------------------------------------------


def test_an_overdue_response_closes_the_connection() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(FIND_COORDINATOR, hold([]))
        connection = await dial()
        began = now()
        late = connection.send(FIND, 4)
        behind = connection.send(FIND, 1)
        with pytest.raises(RequestTimedOutError, match="kafka:9092 did not answer FindCoordinator within 4 s"):
            await late
        assert now() - began == pytest.approx(4, abs=0.1)
        with pytest.raises(ConnectionLostError, match="did not answer FindCoordinator"):
            await behind
        assert not connection.is_open

    scenario(test)


def test_the_time_of_a_request_begins_when_it_is_first_in_line() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        waits = iter([8, 16, 24, 100])
        broker.on(FIND_COORDINATOR, lambda request: request.reply_later(next(waits)))
        connection = await dial()
        began = now()
        responses = [connection.send(FIND, 10) for _ in range(4)]
        for response in responses[:3]:
            await response
        assert now() - began == pytest.approx(24, abs=0.1)
        with pytest.raises(RequestTimedOutError):
            await responses[3]
        assert now() - began == pytest.approx(34, abs=0.1)

    scenario(test)


def test_a_cancelled_request_still_has_its_limit() -> None:
    """Otherwise a broker that hangs would keep those behind it waiting for ever."""

    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(FIND_COORDINATOR, hold([]))
        connection = await dial()
        began = now()
        connection.send(FIND, 4).cancel()
        with pytest.raises(ConnectionLostError):
            await connection.send(FIND, 4)
        assert now() - began == pytest.approx(4, abs=0.1)

    scenario(test)


def test_a_shorter_limit_behind_a_longer_one_is_kept() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        held: list[Received] = []
        broker.on(FIND_COORDINATOR, hold(held))
        connection = await dial()
        first, second = connection.send(FIND, 300), connection.send(FIND, 5)
        await broker.arrival(FIND_COORDINATOR, 2)
        held[0].reply()
        await first
        began = now()
        with pytest.raises(RequestTimedOutError):
            await second
        assert now() - began == pytest.approx(5, abs=0.1)

    scenario(test)


def test_a_large_response_over_a_slow_line_is_not_overdue() -> None:
    def trickle(request: Received) -> None:
        frame = request.frame(message="x" * 1_000)
        loop = asyncio.get_running_loop()
        for index, at in enumerate(range(0, len(frame), 100)):
            loop.call_later(3 * index, request.session.write, frame[at : at + 100])

    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        broker.on(FIND_COORDINATOR, trickle)
        began = now()
        assert len((await connection.ask(FIND, 4)).message) == 1_000
        assert now() - began > 20
        # The line that falls silent in the middle of a response is overdue after all.
        broker.on(FIND_COORDINATOR, lambda request: request.session.write(struct.pack(">i", 100) + b"abc"))
        began = now()
        with pytest.raises(RequestTimedOutError):
            await connection.ask(FIND, 4)
        assert now() - began == pytest.approx(4, abs=0.2)

    scenario(test)


def test_a_request_without_a_limit_waits() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(FIND_COORDINATOR, lambda request: request.reply_later(3_000, node=3))
        assert (await (await dial()).ask(FIND)).node == 3

    scenario(test)


# Throttling -----------------------------------------------------------------------------


def test_nothing_is_sent_while_the_broker_throttles_us() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        delays = iter([20_000, 0, 0])
        broker.on(FIND_COORDINATOR, lambda request: request.reply(throttle_ms=next(delays), node=len(broker.requests)))
        began = now()
        await connection.ask(FIND, 10)
        responses = await asyncio.gather(connection.ask(FIND, 10), connection.ask(FIND, 10))
        assert [request.at - began for request in broker.received(FIND_COORDINATOR)][1:] == [
            pytest.approx(20, abs=0.1)
        ] * 2
        assert [response.node for response in responses] == [3, 4], "in the order of the calls"

    scenario(test)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_throttle_is_added_to_the_limits_of_requests_in_flight(cancelled: bool) -> None:
    """The broker reads them only when it has passed. Closing, reconnecting and being throttled again helps nobody."""

    async def test(broker: ModelBroker, dial: Dial) -> None:
        held: list[Received] = []
        broker.on(FIND_COORDINATOR, hold(held))
        connection = await dial()
        first, second = connection.send(FIND, 10), connection.send(FIND, 10)
        await broker.arrival(FIND_COORDINATOR, 2)
        if cancelled:
            first.cancel()
        held[0].reply(throttle_ms=60_000)
        held[1].reply_later(65, node=2)
        assert (await second).node == 2
        assert connection.is_open

    scenario(test)


def test_a_request_does_not_overtake_those_that_wait_for_the_end_of_a_throttle() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        connection = await dial()
        throttles = iter([20_000, 0, 0])
        broker.on(FIND_COORDINATOR, lambda request: request.reply(throttle_ms=next(throttles)))
        await connection.ask(FIND, 10)
        tasks = [asyncio.create_task(connection.ask(FIND_COORDINATOR(key="first", kind=0), 10))]

        def ask_at_the_same_moment() -> None:
            tasks.append(asyncio.create_task(connection.ask(FIND_COORDINATOR(key="second", kind=0), 10)))

        # In the same pass of the event loop, but before the throttle ends.
        asyncio.get_running_loop().call_at(connection._throttled_until - 5e-10, ask_at_the_same_moment)
        await asyncio.sleep(21)
        await asyncio.gather(*tasks)
        assert [request.values.key for request in broker.received(FIND_COORDINATOR)] == ["billing", "first", "second"]

    scenario(test)


# Login ----------------------------------------------------------------------------------


def test_a_login_comes_before_anything_else_and_says_its_lifetime() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.lifetime = 60
        connection = await dial(LOGIN)
        assert [request.api for request in broker.requests] == [API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE]
        assert broker.requests[1].values.mechanism == "PLAIN"
        assert broker.requests[2].values.content == b"bob\0bob\0bob-secret"
        assert connection.lifetime == 60
        assert connection.logged_in_at <= now()

    scenario(test)


def test_without_a_lifetime_a_login_lasts() -> None:
    async def test(_: ModelBroker, dial: Dial) -> None:
        assert (await dial(LOGIN)).lifetime == float("inf")
        assert (await dial()).lifetime == float("inf")

    scenario(test)


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (33, UnsupportedMechanismError, "does not offer SASL mechanism PLAIN; it offers SCRAM-SHA-512"),
        (34, UnsupportedMechanismError, "does not offer SASL mechanism PLAIN"),
        (15, BrokerError, "error code 15"),
    ],
)
def test_a_refused_handshake_says_why(code: int, error: type[Exception], text: str) -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(SASL_HANDSHAKE, lambda request: request.reply(error=code, mechanisms=["SCRAM-SHA-512"]))
        with pytest.raises(error, match=text):
            await dial(LOGIN)

    scenario(test)


@pytest.mark.parametrize(("code", "error"), [(58, AuthenticationFailedError), (-1, BrokerError)])
def test_a_refused_login_has_the_brokers_text_and_no_secret(code: int, error: type[Exception]) -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(SASL_AUTHENTICATE, lambda request: request.reply(error=code, message="Authentication failed"))
        with pytest.raises(error, match="kafka refused the login: Authentication failed") as raised:
            await dial(LOGIN)
        assert "secret" not in repr(raised.value) + repr(LOGIN)

    scenario(test)


class Tokens:
    """A provider of tokens that may fail."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    async def token(self) -> str:
        if self.failure is not None:
            raise self.failure
        return "a-token"


def oauth(provider: Any) -> ConnectionOptions:
    return ConnectionOptions(security_protocol="SASL_PLAINTEXT", sasl_mechanism="OAUTHBEARER", token_provider=provider)


def test_a_rejected_token_is_a_failed_login() -> None:
    """The broker answers without an error code first, and waits for the client to give up (RFC 7628)."""

    def reject(request: Received) -> None:
        if request.values.content == b"\x01":
            request.reply(error=58, message="invalid_token")
        else:
            assert b"auth=Bearer a-token" in request.values.content
            request.reply(content=b'{"status":"invalid_token"}')

    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(SASL_AUTHENTICATE, reject)
        with pytest.raises(AuthenticationFailedError, match="invalid_token"):
            await dial(oauth(Tokens()))
        broker.on(SASL_AUTHENTICATE, lambda request: request.reply(content=b"{}"))
        with pytest.raises(AuthenticationFailedError, match="rejected the token"):
            await dial(oauth(Tokens()))

    scenario(test)


def test_a_token_provider_that_fails_may_succeed_later() -> None:
    async def test(_: ModelBroker, dial: Dial) -> None:
        with pytest.raises(ConnectionLostError, match="failed on our side: OSError: no route") as raised:
            await dial(oauth(Tokens(OSError("no route"))))
        assert raised.value.retriable
        await dial(oauth(Tokens()))

    scenario(test)


def test_a_scram_server_that_does_not_know_the_password_is_not_trusted() -> None:
    options = ConnectionOptions(
        security_protocol="SASL_PLAINTEXT", sasl_mechanism="SCRAM-SHA-256", sasl_username="u", sasl_password="p"
    )

    def pretend(request: Received) -> None:
        text = request.values.content.decode()
        nonce = text.split("r=")[1].split(",")[0]
        first = text.startswith("n,,")
        request.reply(content=f"r={nonce}x,s=c2FsdA==,i=4096".encode() if first else b"v=d3Jvbmc=")

    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.mechanisms = ("SCRAM-SHA-256",)
        broker.on(SASL_AUTHENTICATE, pretend)
        with pytest.raises(AuthenticationFailedError, match="wrong signature"):
            await dial(options)

    scenario(test)


class Kerberos:
    """The client's side of a login with Kerberos: its last message is not followed by a computation."""

    principals: ClassVar[list[str]] = []

    def __init__(self, *, loop: asyncio.AbstractEventLoop, principal: str) -> None:  # noqa: ARG002 - as theirs
        self.principals.append(principal)
        self.steps = iter([(None, (b"ticket", True)), (b"token", (b"", True)), (b"layers", (b"layer", False))])

    async def step(self, received: bytes | None) -> tuple[bytes, bool] | None:
        expected, message = next(self.steps, (b"", None))
        assert received == expected
        return message


@pytest.mark.parametrize(("domain", "principal"), [(None, "broker@kafka"), ("example.com", "broker@example.com")])
def test_a_login_with_kerberos(monkeypatch: pytest.MonkeyPatch, domain: str | None, principal: str) -> None:
    answers = {b"ticket": b"token", b"": b"layers", b"layer": b""}

    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.mechanisms = ("GSSAPI",)
        broker.on(
            SASL_AUTHENTICATE,
            lambda request: request.reply(content=answers[request.values.content], lifetime_ms=5_000),
        )
        options = ConnectionOptions(
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="GSSAPI",
            kerberos_service_name="broker",
            kerberos_domain_name=domain,
        )
        assert (await dial(options)).lifetime == 5
        assert Kerberos.principals[-1] == principal

    monkeypatch.setattr("aioshard.kafka.wire.sasl.SaslGSSAPIAuthenticator", Kerberos)
    scenario(test)


def test_a_login_that_is_not_answered_ends_in_time() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(SASL_AUTHENTICATE, hold([]))
        began = now()
        with pytest.raises(ConnectionLostError, match="did not finish the login within 3 s") as raised:
            await dial(LOGIN)
        assert isinstance(raised.value.__cause__, TimeoutError)
        assert now() - began == pytest.approx(3)

    scenario(test)


# The causes of failed starts ------------------------------------------------------------


def test_silence_before_the_versions_is_a_timeout() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.silent = True
        with pytest.raises(ConnectionLostError, match="kafka:9092: no answer within 3 s") as raised:
            await dial()
        assert isinstance(raised.value.__cause__, TimeoutError)

    scenario(test)


def test_a_connection_that_is_closed_before_an_answer_has_no_cause() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(API_VERSIONS, lambda request: request.cut())
        with pytest.raises(ConnectionLostError, match="kafka:9092 closed the connection before it answered") as raised:
            await dial()
        assert raised.value.__cause__ is None

    scenario(test)


def test_a_name_that_does_not_exist_is_named() -> None:
    async def live(_: MemoryNetwork) -> None:
        with pytest.raises(ConnectionLostError, match="kafka:9092: Name or service not known"):
            await Connection.open("kafka", 9092, ConnectionOptions(), timeout=3)
        with pytest.raises(ConnectionLostError, match="refused") as raised:
            await Connection.open("10.9.9.9", 9092, ConnectionOptions(), timeout=3)
        assert isinstance(raised.value.__cause__, ConnectionRefusedError)

    run_on_network(live)


# End ------------------------------------------------------------------------------------


def test_all_requests_in_flight_learn_that_the_connection_is_lost() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        held: list[Received] = []
        broker.on(FIND_COORDINATOR, hold(held))
        connection = await dial()
        assert connection.is_open
        asked = [asyncio.create_task(connection.ask(FIND, 10)) for _ in range(3)]
        await broker.arrival(FIND_COORDINATOR, 3)
        held[0].cut()
        for task in asked:
            with pytest.raises(ConnectionLostError, match="kafka:9092 closed the connection"):
                await task
        assert not connection.is_open
        with pytest.raises(ConnectionLostError, match="kafka:9092 closed the connection"):
            await connection.ask(FIND, 10)

    scenario(test)


def test_a_transport_that_cannot_write_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop raises it for a transport that was lost a moment ago."""

    async def test(_: ModelBroker, dial: Dial) -> None:
        connection = await dial()

        def write(_: object) -> None:
            raise RuntimeError("unable to perform operation; the handler is closed")

        monkeypatch.setattr(connection._transport, "write", write)
        with pytest.raises(ConnectionLostError, match="the handler is closed"):
            await connection.ask(FIND, 10)
        assert not connection.is_open

    scenario(test)


def test_closing_is_synchronous_and_idempotent() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(FIND_COORDINATOR, hold([]))
        connection = await dial()
        response = connection.send(FIND, 10)
        connection.close()
        connection.close()
        assert not connection.is_open
        with pytest.raises(ConnectionLostError, match="was closed"):
            await response
        await connection.closed()
        await connection.closed()
        assert connection.ended.done()

    scenario(test)


def test_a_retired_connection_waits_for_its_last_responses() -> None:
    async def test(broker: ModelBroker, dial: Dial) -> None:
        broker.on(FIND_COORDINATOR, lambda request: request.reply_later(5, node=5))
        connection = await dial()
        asked = asyncio.create_task(connection.ask(FIND, 10))
        await broker.arrival(FIND_COORDINATOR)
        connection.retire()
        assert connection.is_open
        assert (await asked).node == 5
        assert not connection.is_open

    scenario(test)
