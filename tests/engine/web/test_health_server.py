"""The health server: its own thread, unaffected by a blocked event loop."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from aioshard import App
from aioshard.errors import AioshardError, PortError
from aioshard.observe import Statistics
from aioshard.web import connections
from aioshard.web.health import serve_health
from aioshard.web.server import SAFE
from tests.engine.live_apps import until

pytestmark = pytest.mark.slow

LOCAL = "127.0.0.1"
THREAD = "health server"


class Idle(App):
    """An app that has not been started, asked in any thread."""

    def __init__(self) -> None:
        super().__init__("billing", bootstrap_servers="127.0.0.1:1", auto_offset_reset="earliest")
        self.asked_in: list[threading.Thread] = []

    def statistics(self) -> Statistics:
        self.asked_in.append(threading.current_thread())
        return super().statistics()


def threads() -> list[str]:
    """The servers' threads that live."""
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens until the test ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


async def test_the_server_runs_exactly_as_long_as_its_context() -> None:
    async with serve_health(Idle(), host=LOCAL, port=0) as (host, port):
        assert host == LOCAL
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            assert (await client.get("/livez")).status_code == 200
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, port)
    assert threads() == []


async def test_an_idle_connection_does_not_delay_shutdown() -> None:
    async with asyncio.timeout(5), serve_health(Idle(), host=LOCAL, port=0) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_client_that_does_not_read_is_disconnected_at_shutdown() -> None:
    much, asked = Idle(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def explain() -> str:
        loop.call_soon_threadsafe(asked.set)
        return "x" * 2**26

    much.explain = explain  # type: ignore[method-assign]
    with socket.socket() as caller:
        async with serve_health(much) as bound:
            await loop.run_in_executor(None, caller.connect, bound)
            caller.sendall(b"GET /explain HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asked.wait()
        caller.settimeout(5.0)  # a connection that was left open never ends
        while caller.recv(2**20):
            pass


async def test_the_server_does_not_touch_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serve_health(Idle(), host=LOCAL, port=0) as (host, port):
        async with httpx.AsyncClient() as client:
            await client.get(f"http://{host}:{port}/livez")
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_a_port_in_use_is_a_clear_error(taken_port: int) -> None:
    with pytest.raises(
        PortError, match=f"cannot listen on 127.0.0.1:{taken_port}: Address already in use; choose another"
    ):
        async with serve_health(Idle(), host=LOCAL, port=taken_port):
            pytest.fail("the port belongs to somebody else")
    assert issubclass(PortError, AioshardError)


async def test_a_foreign_host_is_a_clear_error() -> None:
    with pytest.raises(PortError, match=r"cannot listen on 192\.0\.2\.1:0"):
        async with serve_health(Idle(), host="192.0.2.1", port=0):
            pytest.fail("the address belongs to nobody")


# Clients that keep it waiting


async def connect(bound: tuple[str, int], request: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*bound)
    writer.write(request)
    return reader, writer


async def is_ended(reader: asyncio.StreamReader) -> bool:
    """Wait until the server ends the connection; whether it sent nothing before."""
    async with asyncio.timeout(30.0):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def holds_the_other_end(caller: socket.socket) -> bool:
    """Whether this process has a socket that is connected to the caller's."""
    held = psutil.Process().net_connections("tcp4")
    return any(end.raddr == caller.getsockname() and end.status == psutil.CONN_ESTABLISHED for end in held)


HEAD = b"POST /livez HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, HEAD + b"Content-Length: 5\r\n\r\nab"],
    ids=["nothing", "part of the headers", "part of the body"],
)
async def test_a_client_that_does_not_finish_its_request_is_disconnected(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_all(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    monkeypatch.setattr(connections, "CLIENT_TIMEOUT", 0.1)
    routes = [Route("/livez", read_all, methods=["POST"])]
    async with serve_health(Idle(), routes=routes) as bound:
        reader, writer = await connect(bound, sent)
        assert await is_ended(reader)
        writer.close()


async def test_a_client_that_sends_slowly_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CLIENT_TIMEOUT", 0.1)
    async with serve_health(Idle()) as bound:
        reader, writer = await connect(bound, HEAD)
        ended = asyncio.create_task(is_ended(reader))
        while not ended.done():
            writer.write(b"X-Header: x\r\n")
            await asyncio.sleep(0.02)
        assert ended.result()
        writer.close()


async def test_a_client_that_does_not_read_its_response_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    much, asked = Idle(), threading.Event()

    def explain() -> str:
        asked.set()
        return "x" * 2**26

    much.explain = explain  # type: ignore[method-assign]
    monkeypatch.setattr(connections, "CLIENT_TIMEOUT", 0.1)
    async with serve_health(much) as bound:
        with socket.socket() as caller:
            await asyncio.to_thread(caller.connect, bound)
            caller.sendall(b"GET /explain HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await asyncio.to_thread(asked.wait, 30.0)
            await until(lambda: not holds_the_other_end(caller), 60.0)


async def test_a_handler_that_takes_long_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CLIENT_TIMEOUT", 0.1)
    begun, released = threading.Event(), threading.Event()

    def answer_late(_: Request) -> PlainTextResponse:
        begun.set()
        released.wait(30.0)
        return PlainTextResponse("late")

    async with serve_health(Idle(), routes=[Route("/late", answer_late)]) as bound:
        late, writer = await connect(bound, b"GET /late HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await asyncio.to_thread(begun.wait, 30.0)
        idle, other = await connect(bound)
        assert await is_ended(idle), "both are older than the limit now"
        released.set()
        assert (await late.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        other.close()


async def test_idle_connections_neither_hide_probes_nor_take_all_file_descriptors() -> None:
    async with serve_health(Idle()) as bound:
        before = descriptors()
        with contextlib.ExitStack() as stack:
            for _ in range(5 * connections.MOST_CONNECTIONS):
                stack.enter_context(await asyncio.to_thread(socket.create_connection, bound, 30.0))
            async with httpx.AsyncClient(base_url=f"http://{bound[0]}:{bound[1]}", timeout=30.0) as client:
                assert (await client.get("/livez")).status_code == 200
            callers = 5 * connections.MOST_CONNECTIONS
            servers = descriptors() - before - callers
            assert servers <= connections.MOST_CONNECTIONS + connections.BACKLOG + 4


# Next to the app's loop


async def test_it_answers_while_the_event_loop_is_blocked() -> None:
    answers: list[int] = []

    def ask(address: str) -> None:
        with httpx.Client(base_url=address) as client:
            answers.extend(client.get(path).status_code for path in ("/livez", "/metrics", "/explain"))

    async with serve_health(Idle()) as (host, port):
        asking = threading.Thread(target=ask, args=(f"http://{host}:{port}",))
        asking.start()
        asking.join(20.0)  # blocks the loop
        assert answers == [200, 200, 200]


async def test_the_app_is_queried_in_its_own_thread() -> None:
    app = Idle()
    async with serve_health(app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        for path in ("/livez", "/readyz", "/metrics", "/statistics.json"):
            asked = len(app.asked_in)
            await client.get(path)
            assert len(app.asked_in) > asked
    assert not {thread.name for thread in app.asked_in} & {threading.main_thread().name, THREAD}


async def test_a_slow_response_does_not_delay_probes() -> None:
    slow, released = Idle(), threading.Event()
    explaining = asyncio.Event()
    loop = asyncio.get_running_loop()

    def explain() -> str:
        loop.call_soon_threadsafe(explaining.set)
        released.wait(20.0)
        return ""

    slow.explain = explain  # type: ignore[method-assign]
    async with serve_health(slow) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        asked = asyncio.create_task(client.get("/explain"))
        await explaining.wait()
        assert (await client.get("/livez")).status_code == 200
        assert not asked.done()
        released.set()
        assert (await asked).status_code == 200


async def test_extra_routes_take_precedence() -> None:
    async def page(_: Request) -> PlainTextResponse:
        return PlainTextResponse(threading.current_thread().name)

    routes = [Route("/", page), Route("/explain", page)]
    async with (
        serve_health(Idle(), routes=routes) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}") as client,
    ):
        assert (await client.get("/")).text == THREAD
        assert (await client.get("/explain")).text == THREAD
        assert (await client.get("/livez")).json()["state"] == "stopped"


@pytest.mark.parametrize("where", ["in a thread", "in the server's loop"])
async def test_a_hanging_request_does_not_delay_the_end_of_the_app(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioshard.web.server._THREAD_TIMEOUT", 1.5)
    hanging, released, asked = Idle(), threading.Event(), threading.Event()

    def hang() -> str:
        asked.set()
        released.wait(30.0)
        return ""

    async def page(_: Request) -> PlainTextResponse:
        return PlainTextResponse(hang())

    hanging.explain = hang  # type: ignore[method-assign]
    routes = [Route("/explain", page)] if where == "in the server's loop" else []
    async with httpx.AsyncClient() as client:
        async with asyncio.timeout(10), serve_health(hanging, routes=routes) as (host, port):
            asking = asyncio.create_task(client.get(f"http://{host}:{port}/explain"))
            await asyncio.to_thread(asked.wait, 10.0)
        assert ("the health server did not stop within 1.5 s" in caplog.text) == bool(routes)
        released.set()
        asking.cancel()
        await asyncio.wait([asking])
    while threads():  # noqa: ASYNC110 - nothing reports its end
        await asyncio.sleep(0.01)


async def test_a_server_that_ends_by_itself_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr("uvicorn.Server.serve", fail)
    async with serve_health(Idle()):
        while threads():  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.01)
    (record,) = [record for record in caplog.records if record.name == "aioshard.web"]
    assert (record.levelno, record.getMessage()) == (
        logging.CRITICAL,
        "the health server has failed; probes are not answered",
    )


# Pages of other sites

PATHS = ["/livez", "/readyz", "/statistics.json", "/explain", "/metrics"]


def kept_out(answer: httpx.Response) -> bool:
    """Whether an answer says that no page of another site may have it, and none of this site show it in a frame."""
    return SAFE.items() <= dict(answer.headers).items()


async def test_a_loopback_server_refuses_other_host_names() -> None:
    """A page of another site can have its own name lead to 127.0.0.1."""
    async with serve_health(Idle()) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        for path in (*PATHS, "/", "/nothing"):
            assert (await client.get(path)).status_code != 400
            refused = await client.get(path, headers={"host": f"elsewhere.example:{port}"})
            assert (path, refused.status_code, refused.text) == (path, 400, "Invalid host header")


NAMES = {
    "elsewhere.example:8080": 400,
    "localhost.elsewhere.example": 400,
    "127.0.0.1.elsewhere.example:1": 400,
    "elsewhere.example:[::1]": 400,
    "2130706433": 400,
    "": 400,
    "localhost:8080": 200,
    "LOCALHOST": 200,
    "127.0.0.1:1": 200,
    "[::1]:8080": 200,
    "[::1]": 200,
}


async def test_a_loopback_server_accepts_its_own_names() -> None:
    async with serve_health(Idle()) as (host, port), httpx.AsyncClient() as client:
        found = {
            name: (await client.get(f"http://{host}:{port}/livez", headers={"host": name})).status_code
            for name in NAMES
        }
    assert found == NAMES


async def test_a_server_on_all_addresses_accepts_any_host_name() -> None:
    """Prometheus and Kubernetes use the names and addresses of pods and services."""
    async with serve_health(Idle(), host="0.0.0.0") as (_, port), httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics", headers={"host": "billing-0.billing:8080"})
    assert answer.status_code == 200


async def test_every_response_has_security_headers() -> None:
    nothing = ["/", "/nothing", "/%2e%2e/etc/passwd", "//metrics", "/metrics%00", "/<script>", "/" + "x" * 5_000]
    async with serve_health(Idle()) as (host, port), httpx.AsyncClient() as client:
        for path in [*PATHS, *nothing]:
            answer = await client.get(f"http://{host}:{port}{path}")
            assert kept_out(answer), path
            if path in nothing:
                assert (answer.status_code, answer.json()) == (404, {"error": "this path does not exist"})
        posted = await client.post(f"http://{host}:{port}/metrics")
    assert (posted.status_code, "allow" in posted.headers, kept_out(posted)) == (405, True, True)
