"""`aioshard explain` and `aioshard health`: reports of running and unreachable apps."""

import asyncio
import contextlib
import dataclasses
import io
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from aioshard.observe import Diagnosis, Finding, PartitionDiagnosis
from aioshard.web.health import health_routes, serve_health
from tests.support import fake_app
from tests.support.fake_app import PARTITION, FakeApp

Aioshard = Callable[..., Awaitable[Any]]

NOWHERE = "http://127.0.0.1:1"
"""An address where nobody listens."""

FIRST = dataclasses.replace(PARTITION, partition=0)
SLOW = dataclasses.replace(FIRST, partition=1, oldest_incomplete_age=61.0)
PAUSED = dataclasses.replace(FIRST, partition=2, oldest_incomplete_age=None, paused="the buffer is full")
IDLE = dataclasses.replace(FIRST, partition=3, incomplete=0, oldest_incomplete_age=None)
STATISTICS = dataclasses.replace(
    fake_app.STATISTICS, trouble="the brokers are away", partitions=(FIRST, SLOW, PAUSED, IDLE), handlers=()
)
STUCK = PartitionDiagnosis(
    topic="orders",
    partition=1,
    verdict="stuck",
    since=61.0,
    sentence="orders/1 has not advanced for 61.0 s: it waits for record 101",
    head=None,
    findings=(Finding("paused", "paused by the application", 3.0, None),),
    window=20,
    behind=1,
)
DIAGNOSIS = Diagnosis(
    state="running",
    findings=(Finding("trouble", "the brokers are away", None, None),),
    partitions=(STUCK,),
    outliving=(),
)
EXPLANATION = "The app is running.\norders/1: it waits for record 101.\n"


@pytest.fixture
def app() -> FakeApp:
    return FakeApp(STATISTICS, DIAGNOSIS, EXPLANATION)


@pytest.fixture
async def url(app: FakeApp) -> AsyncIterator[str]:
    async with serve_health(app, host="127.0.0.1", port=0) as (address, port):
        yield f"http://{address}:{port}"


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    """A server that answers every request with these bytes, or with None never."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await over.wait()
        else:
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
        over.set()


# Explaining


async def test_the_explanation_is_printed_verbatim(aioshard: Aioshard, url: str) -> None:
    ended = await aioshard("explain", url)

    assert ended == (0, EXPLANATION, "")


async def test_json_has_the_diagnosis(aioshard: Aioshard, url: str) -> None:
    ended = await aioshard("explain", url, "--json")

    assert ended.code == 0
    assert json.loads(ended.output) == {
        "url": url,
        "error": None,
        "explanation": EXPLANATION,
        **json.loads(json.dumps(DIAGNOSIS.asdict())),
    }


async def test_a_url_may_lack_its_scheme_and_end_with_a_slash(aioshard: Aioshard, url: str) -> None:
    ended = await aioshard("explain", url.removeprefix("http://") + "/")

    assert ended.output == EXPLANATION


async def test_routes_mounted_under_a_path_are_found(aioshard: Aioshard, app: FakeApp) -> None:
    mounted = Starlette(routes=[Mount("/aioshard", routes=health_routes(app))])
    server = uvicorn.Server(uvicorn.Config(mounted, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="server")
        try:
            ended = await aioshard("explain", f"http://127.0.0.1:{listener.getsockname()[1]}/aioshard")
        finally:
            server.should_exit = True
            await serving

    assert ended.output == EXPLANATION


# Without an answer


@pytest.mark.parametrize("command", ["explain", "health"])
async def test_a_refused_connection_is_a_clear_error(aioshard: Aioshard, command: str) -> None:
    ended = await aioshard(command, NOWHERE)

    assert ended.code == 3
    assert ended.output == ""
    assert ended.errors == (
        f"Error: {NOWHERE} did not answer ([Errno 111] Connection refused): check the address, and that the app runs "
        "with --health-port or serves the health routes\n"
    )


@pytest.mark.parametrize("command", ["explain", "health"])
async def test_json_reports_an_unreachable_app(aioshard: Aioshard, command: str) -> None:
    ended = await aioshard(command, NOWHERE, "--json")

    assert ended.code == 3
    assert "Connection refused" in json.loads(ended.output)["error"]


@pytest.mark.parametrize("command", ["explain", "health"])
async def test_an_app_that_responds_too_late_is_a_clear_error(aioshard: Aioshard, command: str) -> None:
    async with answering(None) as url:
        ended = await aioshard(command, url, "--timeout", "0.2")

    assert ended.code == 3
    assert f"{url} did not answer within 0.2 s: a handler may be blocking the event loop" in ended.errors


@pytest.mark.parametrize("command", ["explain", "health"])
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "with 404 Not Found"),
        (b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n", "with 500 Broken"),
        (b"SSH-2.0-OpenSSH_9\r\n", "did not answer (SSH-2.0-OpenSSH_9"),
        (b"", "did not answer (Remote end closed connection without response)"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", "did not answer (IncompleteRead"),
    ],
)
async def test_another_server_is_a_clear_error(aioshard: Aioshard, command: str, answer: bytes, found: str) -> None:
    async with answering(answer) as url:
        ended = await aioshard(command, url)

    assert ended.code == 3
    assert found in ended.errors
    assert "check the address, and that the app runs with --health-port" in ended.errors


@pytest.mark.parametrize("body", [b"[]", b"<html>", b'{"healthy": true}'])
async def test_a_server_that_returns_200_for_everything_is_a_clear_error(aioshard: Aioshard, body: bytes) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)) as url:
        ended = await aioshard("health", url)

    assert ended.code == 3
    assert f"{url} answered /readyz without the state of an app" in ended.errors


@pytest.mark.parametrize(
    "url", ["ftp://host:1", "http://", "http://host:port", "http://host:99999", "a b", "file:///x"]
)
async def test_an_invalid_url_is_refused(aioshard: Aioshard, url: str) -> None:
    ended = await aioshard("explain", url)

    assert ended.code == 2
    assert "is not the base URL of a health server; expected one such as http://127.0.0.1:8080" in " ".join(
        ended.errors.split()
    )


async def test_proxy_variables_are_ignored(aioshard: Aioshard, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)

    assert (await aioshard("explain", url)).code == 0


# Health


async def test_a_ready_app_is_healthy(aioshard: Aioshard, url: str) -> None:
    ended = await aioshard("health", url)

    assert ended.code == 0
    assert ended.output.splitlines() == [
        "ready (the app is running)",
        "  look at: the brokers are away",
        "  look at: orders/1 has not advanced for 61.0 s: it waits for record 101",
        "  look at: orders/1: paused by the application",
    ]


async def test_with_strict_an_app_with_findings_is_not_healthy(aioshard: Aioshard, app: FakeApp, url: str) -> None:
    for which in ((), ("--live",)):
        ended = await aioshard("health", url, "--strict", *which)
        assert ended.code == 3
        assert "look at: orders/1: paused by the application" in ended.output
    assert json.loads((await aioshard("health", url, "--strict", "--json")).output)["healthy"] is False

    app.diagnosis = dataclasses.replace(DIAGNOSIS, findings=(), partitions=())
    app.current = dataclasses.replace(STATISTICS, trouble=None, handlers=(), partitions=())
    assert await aioshard("health", url, "--strict") == (0, "ready (the app is running)\n", "")


async def test_a_draining_app_is_alive_and_not_ready(aioshard: Aioshard, app: FakeApp, url: str) -> None:
    app.current = dataclasses.replace(STATISTICS, state="draining", trouble=None, partitions=())
    app.diagnosis = Diagnosis("draining", (), (), ())

    assert await aioshard("health", url, "--live") == (0, "alive (the app is draining)\n", "")
    assert await aioshard("health", url) == (
        3,
        (
            "not ready (the app is draining)\n"
            "  because the app is draining: it finishes the records in flight and starts no others\n"
        ),
        "",
    )


async def test_json_has_the_health(aioshard: Aioshard, app: FakeApp, url: str) -> None:
    failure = "the app has failed: the brokers are away"
    app.current = dataclasses.replace(STATISTICS, state="failed", partitions=(), restart_cures=(failure,))
    app.diagnosis = dataclasses.replace(DIAGNOSIS, partitions=())

    ended = await aioshard("health", url, "--live", "--json")

    assert ended.code == 3
    assert json.loads(ended.output) == {
        "url": url,
        "healthy": False,
        "error": None,
        "status": "unavailable",
        "state": "failed",
        "reasons": [failure],
        "findings": ["the brokers are away"],
    }


async def test_several_apps_are_healthy_only_if_every_one_is(aioshard: Aioshard, app: FakeApp, url: str) -> None:
    async with serve_health(app) as (host, port):
        both = await aioshard("health", url, f"http://{host}:{port}", "--json")
        one = await aioshard("health", url, NOWHERE, "--json")

    assert (both.code, one.code) == (0, 3)
    assert [json.loads(line)["healthy"] for line in both.output.splitlines()] == [True, True]
    assert [json.loads(line)["healthy"] for line in one.output.splitlines()] == [True, False]


@pytest.mark.parametrize("command", ["explain", "health"])
async def test_each_of_several_apps_is_named(aioshard: Aioshard, app: FakeApp, url: str, command: str) -> None:
    async with serve_health(app) as (host, port):
        other = f"http://{host}:{port}"
        both = await aioshard(command, url, other)
        alone = await aioshard(command, url)

    first, _, second = both.output.partition(f"{other}:\n")
    assert first == f"{url}:\n{alone.output}"
    assert second == alone.output


async def test_a_reason_is_not_repeated_as_a_finding(aioshard: Aioshard, app: FakeApp, url: str) -> None:
    trouble = "the group still rebalances"
    app.current = dataclasses.replace(STATISTICS, state="starting", trouble=trouble, handlers=(), partitions=())
    app.diagnosis = Diagnosis("starting", (Finding("trouble", trouble, None, None),), (), ())

    ended = await aioshard("health", url)

    assert ended.code == 3
    assert ended.output.count(trouble) == 1


@pytest.mark.parametrize("command", ["explain", "health"])
async def test_the_default_url_is_port_8080_on_localhost(aioshard: Aioshard, command: str) -> None:
    ended = await aioshard(command, "--json", "--timeout", "1")

    assert json.loads(ended.output)["url"] == "http://127.0.0.1:8080"


async def test_text_that_cannot_be_encoded_is_printed_with_escapes(
    aioshard: Aioshard, url: str, app: FakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    trouble = Finding("trouble", "cannot open caf\udce9.txt", None, None)
    app.diagnosis = dataclasses.replace(DIAGNOSIS, findings=(trouble,))

    ended = await aioshard("health", url)

    sys.stdout.flush()
    assert (ended.code, ended.errors) == (0, "")
    assert rb"cannot open caf\udce9.txt" in written.getvalue()
