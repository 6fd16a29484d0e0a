"""FastAPI around an app: start, stop, forced exit and failure under uvicorn, in separate processes (I3, I11)."""

import asyncio
import contextlib
import itertools
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from aioshard import Settings
from aioshard.kafka.admin import KafkaAdmin
from tests.guarantees.servers import Server
from tests.support.brokers import SharedKafka

TARGET = "tests.services.fastapi_member:api"
RECORDS = 40
GRACE = 1
"""Seconds that uvicorn leaves to open requests."""


class Api:
    """A topic with records, and processes that handle them within FastAPI, one after the other."""

    def __init__(self, kafka: SharedKafka, topic: str, group: str, directory: Path) -> None:
        self._kafka = kafka
        self._topic = topic
        self._group = group
        self._directory = directory
        self._numbers = itertools.count(1)
        self._exit = contextlib.ExitStack()

    async def start(self, *, seconds: float, records: int = RECORDS, stop_server: bool = False) -> Server:
        """Starts a process and returns once its first records are in flight."""
        before = len(self.notes)
        server = await self.begin(seconds=seconds, records=records, stop_server=stop_server)
        await server.until_ready("/readyz")
        await until(lambda: len(self.notes) > before)
        return server

    async def begin(
        self, *, seconds: float, records: int = RECORDS, stop_server: bool = False, **settings: str
    ) -> Server:
        """Starts a process, whose settings may differ, and does not wait for it."""
        number = next(self._numbers)
        if number == 1:
            await self._kafka.create_topic(self._topic, partitions=2)
            await self._kafka.produce(self._topic, [(b"k%d" % n, b"") for n in range(records)])
        described = {
            "group": self._group,
            "topic": self._topic,
            "seconds": seconds,
            "notes": str(self._directory / "notes"),
            "stop_server": stop_server,
        }
        environment = {
            "MEMBER": json.dumps(described),
            "AIOSHARD_BOOTSTRAP_SERVERS": self._kafka.bootstrap,
            "AIOSHARD_SESSION_TIMEOUT": "3",
            "AIOSHARD_HEARTBEAT_INTERVAL": "0.5",
            "AIOSHARD_START_TIMEOUT": "40",
            **{f"AIOSHARD_{name.upper()}": value for name, value in settings.items()},
        }
        options = f"--timeout-graceful-shutdown={GRACE}"
        return self._exit.enter_context(Server(TARGET, self._directory / f"{number}.log", environment, options))

    async def members(self) -> list[str]:
        """The ids of the group's members, with those that have died and are not yet removed."""
        async with KafkaAdmin(Settings(bootstrap_servers=self._kafka.bootstrap)) as admin:
            return [member.member_id for member in (await admin.group(self._group)).members]

    @property
    def notes(self) -> list[str]:
        """The begin and the end of each run."""
        file = self._directory / "notes"
        return file.read_text().splitlines() if file.exists() else []

    def times(self, what: str) -> Counter[str]:
        """How often each record began, or ended."""
        return Counter(record_id for kind, record_id in map(str.split, self.notes) if kind == what)

    async def committed(self) -> int:
        """How many records are."""
        return sum((await self._kafka.committed(self._group, self._topic)).values())

    async def finish(self) -> None:
        """Another process finishes the remaining records; each one has ended then (I3)."""
        await self.start(seconds=0.0)
        await self._kafka.wait_for_lag(self._group, self._topic, timeout=60.0)
        assert len(self.times("ended")) == RECORDS

    def close(self) -> None:
        """Ends what still runs."""
        self._exit.close()


@pytest.fixture
def api(kafka: SharedKafka, topic: str, group: str, tmp_path: Path) -> Iterator[Api]:
    api = Api(kafka, topic, group, tmp_path)
    try:
        yield api
    finally:
        api.close()


async def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Waits for what another process does."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


async def test_the_app_drains_after_the_server_has_closed(api: Api) -> None:
    server = await api.start(seconds=GRACE + 2.0)
    async with httpx.AsyncClient(base_url=server.base, timeout=30.0) as client:
        request = asyncio.create_task(client.get("/greeting?seconds=0.7"))
        await asyncio.sleep(0.3)
        server.send(signal.SIGTERM)

        assert (await request).json() == "hello", "the state of the lifespan was not there, or the request was cut off"
        with pytest.raises(httpx.ConnectError):
            await client.get("/livez")
    code = await server.ended()

    assert code == -signal.SIGTERM, "uvicorn ends by the signal that it was sent"
    began, ended = api.times("began"), api.times("ended")
    assert began == ended
    assert set(began.values()) == {1}
    assert await api.committed() == len(ended) < RECORDS
    assert "opened\n" in server.log
    assert "closed after the app was stopped\n" in server.log, server.tail


@pytest.mark.chaos
async def test_a_kill_during_the_drain_loses_nothing(api: Api) -> None:
    server = await api.start(seconds=30.0)
    server.send(signal.SIGTERM)
    await until(lambda: "Waiting for application shutdown" in server.log)

    server.kill()

    assert await api.committed() == 0
    await api.finish()


async def test_after_a_crash_the_port_opens_and_readiness_names_the_dead_member(api: Api) -> None:
    """With `start_timeout=None`, the start does not wait for the session of the killed process."""
    crashed = await api.begin(seconds=0.0, session_timeout="15", start_timeout="none")
    await crashed.until_ready("/readyz")
    (dead,) = await api.members()
    crashed.kill()

    server = await api.begin(seconds=0.0, session_timeout="15", start_timeout="none")
    reasons: list[str] = []
    async with httpx.AsyncClient(base_url=server.base, timeout=30.0) as client, asyncio.timeout(60.0):
        while not any(dead in reason for reason in reasons):
            with contextlib.suppress(httpx.ConnectError):
                answer = await client.get("/readyz")
                assert (answer.status_code, answer.json()["state"]) == (503, "starting")
                reasons = answer.json()["reasons"]
            await asyncio.sleep(0.1)
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/greeting")).json() == "hello"
    await server.until_ready("/readyz")
    assert dead in server.log


@pytest.mark.chaos
async def test_a_forced_exit_skips_the_drain_and_loses_nothing(api: Api) -> None:
    server = await api.start(seconds=30.0)
    async with httpx.AsyncClient(base_url=server.base, timeout=60.0) as client:
        request = asyncio.create_task(client.get("/greeting?seconds=60"))
        await asyncio.sleep(0.3)
        server.send(signal.SIGINT)
        await until(lambda: "Waiting for connections to close" in server.log)
        asked = time.monotonic()
        server.send(signal.SIGINT)
        with contextlib.suppress(httpx.TransportError):
            await request
    await server.ended()

    assert time.monotonic() - asked < 15.0, "it waited for runs that the loop had cancelled"
    assert await api.committed() == 0
    await api.finish()


async def test_a_failed_app_is_visible_and_the_server_continues(api: Api) -> None:
    server = await api.start(seconds=0.0)
    async with httpx.AsyncClient(base_url=server.base, timeout=30.0) as client:
        await client.post("/fail")

        for path in ("/livez", "/readyz"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["state"]) == (503, "failed")
        assert (await client.get("/greeting")).json() == "hello"
    server.send(signal.SIGTERM)
    await server.ended()

    assert re.search(r"^app '.+' has failed and no longer consumes: access was taken away$", server.log, re.MULTILINE)
    assert "Application shutdown complete" in server.log


async def test_a_failed_app_stops_the_server_on_request(api: Api) -> None:
    server = await api.start(seconds=1.0, stop_server=True)
    async with httpx.AsyncClient(base_url=server.base, timeout=30.0) as client:
        request = asyncio.create_task(client.get("/greeting?seconds=0.5"))
        await asyncio.sleep(0.2)
        await client.post("/fail")

        assert (await request).status_code == 200, "requests in progress were cut off"
    code = await server.ended()

    assert code == -signal.SIGTERM
    assert "the app has failed: stopping the server (SIGTERM)" in server.log
    assert "closed after the app was failed\n" in server.log
    assert await api.committed() == len(api.times("ended")) > 0, "what had run was not committed"
