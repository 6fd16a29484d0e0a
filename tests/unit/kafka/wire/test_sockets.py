"""Connections on real sockets, on asyncio's event loop and on uvloop."""

import asyncio
import gc
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from aioshard.kafka.wire.connection import Connection
from aioshard.kafka.wire.errors import ConnectionLostError, RequestTimedOutError, UnexpectedResponseError
from aioshard.kafka.wire.options import ConnectionOptions
from aioshard.kafka.wire.pool import ConnectionPool, Purpose
from aioshard.kafka.wire.requests import FIND_COORDINATOR
from tests.support.certificates import Certificates, make_certificates
from tests.support.loops import LOOPS, NewLoop, run_on
from tests.support.model_broker import ModelBroker, Received, hold

FIND = FIND_COORDINATOR(key="billing", kind=0)


@asynccontextmanager
async def listening(broker: ModelBroker, host: str = "127.0.0.1", port: int = 0, **options: Any) -> AsyncIterator[int]:
    """Lets a model broker listen; gives its port."""
    server = await asyncio.get_running_loop().create_server(broker.protocol, host, port, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for session in broker.sessions:
            session.abort()
        await asyncio.gather(*(session.closed.wait() for session in broker.sessions))


@asynccontextmanager
async def pooled(options: ConnectionOptions | None = None) -> AsyncIterator[ConnectionPool]:
    """A pool that is closed at the end; nothing may be left open."""
    pool = ConnectionPool(options or ConnectionOptions())
    try:
        yield pool
    finally:
        await pool.close()
        gc.collect()


@contextmanager
def black_hole(host: str, port: int) -> Iterator[None]:
    """An address behind which nothing is left: the kernel drops the packets, as the queue for connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex((host, port))
        yield


@contextmanager
def frozen(host: str, port: int) -> Iterator[None]:
    """An address behind which the kernel accepts connections, and the program does nothing."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(100)
        yield


def resolve(name: str, *addresses: str) -> None:
    """Gives a name these addresses in the running event loop."""
    loop: Any = asyncio.get_running_loop()
    resolver = loop.getaddrinfo

    async def getaddrinfo(host: Any, port: Any, **options: Any) -> Any:
        if host != name:
            return await resolver(host, port, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    loop.getaddrinfo = getaddrinfo


SILENT = pytest.mark.parametrize("silent", [black_hole, frozen])


# Every address of a name ----------------------------------------------------------------


@LOOPS
@SILENT
def test_a_silent_address_does_not_prevent_a_connection(new_loop: NewLoop, silent: Any) -> None:
    """Connected in time, or `ask` would raise; so is the second one, for another purpose."""

    async def test() -> None:
        async with listening(broker := ModelBroker(), "127.0.0.1") as port, pooled() as pool:
            with silent("127.0.0.2", port), silent("127.0.0.3", port):
                resolve("kafka", "127.0.0.2", "127.0.0.3", "127.0.0.1")
                for purpose in (Purpose.GENERAL, Purpose.FETCH):
                    assert (await pool.ask(("kafka", port), FIND, purpose=purpose)).error == 0
                assert len(broker.open_sessions) == 2

    run_on(new_loop, test())


@LOOPS
@SILENT
def test_a_silent_address_is_silent(new_loop: NewLoop, silent: Any) -> None:
    """Guards the test above, and shows that one address has all the time there is."""

    async def test() -> None:
        async with listening(ModelBroker(), "127.0.0.1") as port:
            with silent("127.0.0.2", port), pytest.raises(ConnectionLostError, match="no answer within"):
                await Connection.open("127.0.0.2", port, ConnectionOptions(), timeout=0.5)
        gc.collect()

    run_on(new_loop, test())


@LOOPS
def test_a_name_whose_addresses_are_all_silent_fails_in_time(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with listening(ModelBroker(), "127.0.0.1") as port:
            with black_hole("127.0.0.2", port), frozen("127.0.0.3", port):
                resolve("kafka", "127.0.0.2", "127.0.0.3")
                text = "127.0.0.2: no answer within 0.5 s; 127.0.0.3: no answer within 0.5 s"
                with pytest.raises(ConnectionLostError, match=re.escape(text)):
                    await Connection.open("kafka", port, ConnectionOptions(), timeout=0.5)
        gc.collect()

    run_on(new_loop, test())


@LOOPS
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_needs_no_resolver(new_loop: NewLoop, address: str) -> None:
    """The resolver works in the threads of the event loop, which handlers may occupy."""

    async def test() -> None:
        loop: Any = asyncio.get_running_loop()
        async with listening(ModelBroker(), address) as port, pooled() as pool:
            loop.getaddrinfo = None
            assert (await pool.ask((address, port), FIND)).error == 0

    run_on(new_loop, test())


# The socket -----------------------------------------------------------------------------


@LOOPS
def test_the_kernel_keeps_an_idle_connection_alive(new_loop: NewLoop) -> None:
    """Load balancers drop a silent connection after 4 minutes, and tell nobody."""

    async def test() -> None:
        async with listening(ModelBroker()) as port, pooled() as pool:
            connection = await pool.connection(("127.0.0.1", port))
            sock = connection._transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 240

    run_on(new_loop, test())


@LOOPS
def test_requests_wait_while_the_broker_reads_nothing(new_loop: NewLoop) -> None:
    """Without that, the buffer of the transport would hold all of them."""
    size = 1_000_000

    async def test() -> None:
        broker = ModelBroker()
        async with listening(broker) as port, pooled() as pool:
            connection = await pool.connection(("127.0.0.1", port))
            broker.sessions[0].stop_reading()
            large = FIND_COORDINATOR(key="x" * 30_000, kind=0)
            asked = [asyncio.create_task(connection.ask(large, 600)) for _ in range(3_000)]
            sent = -1
            while sent != connection.in_flight:
                sent = connection.in_flight
                for _ in range(100):
                    await asyncio.sleep(0)
            assert 0 < sent < len(asked)
            assert connection._transport.get_write_buffer_size() < size  # type: ignore[union-attr]
            broker.sessions[0]._transport.resume_reading()
            await asyncio.gather(*asked)
            assert [len(request.values.key) for request in broker.received(FIND_COORDINATOR)] == [30_000] * 3_000

    run_on(new_loop, test())


@LOOPS
def test_a_write_to_a_lost_transport_is_a_lost_connection(new_loop: NewLoop) -> None:
    """uvloop raises a `RuntimeError`, asyncio does nothing; the connection is told only in a later iteration."""

    async def test() -> None:
        async with listening(ModelBroker()) as port, pooled() as pool:
            connection = await pool.connection(("127.0.0.1", port))
            connection._transport.abort()  # type: ignore[union-attr]
            with pytest.raises(ConnectionLostError):
                await connection.ask(FIND, 10)
            assert (await pool.ask(("127.0.0.1", port), FIND)).error == 0

    run_on(new_loop, test())


@LOOPS
def test_large_responses_arrive_in_pieces(new_loop: NewLoop) -> None:
    async def test() -> None:
        broker = ModelBroker()
        broker.on(FIND_COORDINATOR, lambda request: request.reply(message="x" * 5_000_000, node=7))
        async with listening(broker) as port, pooled() as pool:
            responses = await asyncio.gather(*(pool.ask(("127.0.0.1", port), FIND) for _ in range(4)))
            assert [len(response.message) for response in responses] == [5_000_000] * 4

    run_on(new_loop, test())


@LOOPS
def test_a_blocked_event_loop_is_not_a_silent_broker(new_loop: NewLoop) -> None:
    """The response waits in the socket when the loop runs again, and uvloop runs timers first."""
    limit = 0.3
    answered = threading.Event()

    def reply(request: Received) -> None:
        request.reply(node=3)
        answered.set()

    async def test(port: int) -> None:
        async with pooled() as pool:
            connection = await pool.connection(("127.0.0.1", port))
            asked = asyncio.create_task(connection.ask(FIND, limit))
            await asyncio.sleep(0)
            assert connection.in_flight == 1
            answered.wait(30)
            time.sleep(2 * limit)  # noqa: ASYNC251 - a handler that blocks
            assert (await asked).node == 3

    broker = ModelBroker()
    broker.on(FIND_COORDINATOR, reply)
    with in_a_thread(broker) as port:
        run_on(new_loop, test(port))


@LOOPS
def test_a_silent_broker_is_still_recognized_after_the_loop_was_blocked(new_loop: NewLoop) -> None:
    async def test() -> None:
        broker = ModelBroker()
        broker.on(FIND_COORDINATOR, hold([]))
        async with listening(broker) as port, pooled() as pool:
            connection = await pool.connection(("127.0.0.1", port))
            asked = asyncio.create_task(connection.ask(FIND, 0.1))
            await broker.arrival(FIND_COORDINATOR)
            time.sleep(0.3)  # noqa: ASYNC251 - a handler that blocks
            with pytest.raises(RequestTimedOutError):
                await asked

    run_on(new_loop, test())


@LOOPS
def test_a_protocol_that_blocks_is_not_a_silent_broker(new_loop: NewLoop) -> None:
    """uvloop calls it after it has looked for what arrived, and then runs the timers."""
    limit = 1.0
    arrived, blocked, answered = threading.Event(), threading.Event(), threading.Event()

    def reply(request: Received) -> None:
        arrived.set()
        blocked.wait(30)
        request.reply(node=3)
        answered.set()

    class Blocking(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:  # noqa: ARG002 - as the base class
            blocked.set()
            answered.wait(30)
            time.sleep(1.2 * limit)

    async def test(port: int) -> None:
        ours, theirs = socket.socketpair()
        async with pooled() as pool:
            connection = await pool.connection(("127.0.0.1", port))
            transport, _ = await asyncio.get_running_loop().create_connection(Blocking, sock=ours)
            with theirs:
                asked = asyncio.create_task(connection.ask(FIND, limit))
                await asyncio.to_thread(arrived.wait, 30)
                theirs.send(b"x")
                assert (await asked).node == 3
                transport.abort()

    broker = ModelBroker()
    broker.on(FIND_COORDINATOR, reply)
    with in_a_thread(broker) as port:
        run_on(new_loop, test(port))


@contextmanager
def in_a_thread(broker: ModelBroker) -> Iterator[int]:
    """Lets a model broker listen in a thread with an event loop of its own; gives its port."""
    started: threading.Event = threading.Event()
    ports: list[int] = []
    stop: list[Any] = []

    async def serve() -> None:
        done = asyncio.Event()
        stop.append((asyncio.get_running_loop(), done))
        async with listening(broker) as port:
            ports.append(port)
            started.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="model broker")
    thread.start()
    assert started.wait(30)
    try:
        yield ports[0]
    finally:
        loop, done = stop[0]
        loop.call_soon_threadsafe(done.set)
        thread.join()


@LOOPS
def test_closing_does_not_wait_until_everything_is_written(new_loop: NewLoop) -> None:
    async def test() -> None:
        broker = ModelBroker()
        async with listening(broker) as port, pooled() as pool:
            connection = await pool.connection(("127.0.0.1", port))
            broker.sessions[0].stop_reading()
            asked = asyncio.create_task(pool.ask(("127.0.0.1", port), FIND_COORDINATOR(key="x" * 30_000, kind=0)))
            while connection.is_open and not connection._write_paused:
                connection.send(FIND_COORDINATOR(key="x" * 30_000, kind=0)).cancel()
                await asyncio.sleep(0)
            await pool.close()
            async with asyncio.timeout(10):
                await connection.ended
            with pytest.raises(ConnectionLostError):
                await asked

    run_on(new_loop, test())


# TLS ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def trusting(file: Path) -> ConnectionOptions:
    return ConnectionOptions(security_protocol="SSL", ssl_context=ssl.create_default_context(cafile=str(file)))


def server_tls(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server_file)
    return context


@LOOPS
def test_tls_checks_the_name_by_which_the_broker_was_asked(new_loop: NewLoop, certificates: Certificates) -> None:
    async def test() -> None:
        options = trusting(certificates.ca_file)
        async with listening(ModelBroker(), ssl=server_tls(certificates)) as port, pooled(options) as pool:
            for host in ("127.0.0.1", "localhost"):
                assert (await pool.ask((host, port), FIND)).error == 0
            resolve("kafka.example", "127.0.0.1")
            with pytest.raises(ConnectionLostError, match=r"TLS failed \(Hostname mismatch") as raised:
                await pool.ask(("kafka.example", port), FIND)
            assert isinstance(raised.value.__cause__, ssl.SSLCertVerificationError)

    run_on(new_loop, test())


@LOOPS
def test_an_untrusted_certificate_is_told_from_other_failures(new_loop: NewLoop, certificates: Certificates) -> None:
    async def test() -> None:
        options = trusting(certificates.stranger_file)
        async with listening(ModelBroker(), ssl=server_tls(certificates)) as port, pooled(options) as pool:
            with pytest.raises(ConnectionLostError, match="TLS failed") as raised:
                await pool.ask(("127.0.0.1", port), FIND)
            assert isinstance(raised.value.__cause__, ssl.SSLCertVerificationError)

    run_on(new_loop, test())


@LOOPS
def test_tls_to_a_listener_without_tls_and_the_other_way_round(new_loop: NewLoop, certificates: Certificates) -> None:
    class Plain(asyncio.Protocol):
        """Sends what is no TLS."""

        def connection_made(self, transport: Any) -> None:
            transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            transport.close()

    async def test() -> None:
        server = await asyncio.get_running_loop().create_server(Plain, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ConnectionLostError, match="TLS failed") as raised:
                await Connection.open("127.0.0.1", port, trusting(certificates.ca_file), timeout=10)
            assert isinstance(raised.value.__cause__, ssl.SSLError)
            with pytest.raises(UnexpectedResponseError, match="HTTP"):
                await Connection.open("127.0.0.1", port, ConnectionOptions(), timeout=10)
        async with listening(ModelBroker(), ssl=server_tls(certificates)) as port:
            with pytest.raises(ConnectionLostError, match=r"before it answered|Connection reset|looks like TLS;"):
                await Connection.open("127.0.0.1", port, ConnectionOptions(), timeout=10)
        gc.collect()

    run_on(new_loop, test())


@LOOPS
def test_closing_does_not_wait_for_a_broker_that_hangs(new_loop: NewLoop, certificates: Certificates) -> None:
    """TLS ends with a message from both sides."""

    async def test() -> None:
        broker = ModelBroker()
        options = trusting(certificates.ca_file)
        async with listening(broker, ssl=server_tls(certificates)) as port, pooled(options) as pool:
            asked = [asyncio.create_task(pool.ask(("127.0.0.1", port), FIND, purpose=purpose)) for purpose in Purpose]
            broker.on(FIND_COORDINATOR, hold([]))
            await broker.arrival(FIND_COORDINATOR, len(Purpose))
            for session in broker.sessions:
                session.stop_reading()
            async with asyncio.timeout(10):
                await pool.close()
            for task in asked:
                with pytest.raises(ConnectionLostError, match="was closed"):
                    await task
            assert asyncio.all_tasks() == {asyncio.current_task()}

    run_on(new_loop, test())
