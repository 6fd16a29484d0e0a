"""Dead letters and parked records of a real broker are sent back, released and dropped through the dashboard."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from aioshard import App, DeadLetter, Park, Record, Settings
from aioshard.dead_letters.filters import EVERYTHING, Filters
from aioshard.dead_letters.parked import ParkedTopic
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.kafka.side_topics import opened_topic
from aioshard.serde.side_records import Failure, dead_letter, park
from aioshard.web import dashboard, dead_letters, serve_health
from aioshard.web.page import dashboard_routes
from tests.support.brokers import SharedKafka
from tests.support.dead_letters import failure, record, write

TOKEN = "correct-horse-battery"
DEADLINE = 60.0
HEADERS = {"authorization": f"Bearer {TOKEN}"}
MANY = 12_000
LOGGER = "aioshard.web.audit"


def marked(original: Record) -> bytes | None:
    """A transform: every second value is marked."""
    return (original.value or b"") + b"!" if original.offset % 2 else None


class Shop:
    """An app that does not run, with its dead letters in a broker."""

    def __init__(self, kafka: SharedKafka, topic: str, group: str) -> None:
        self.topic = f"{topic}.dlt"
        self.source = topic
        self.parked = f"{topic}.parked"
        self.kafka = kafka
        self.app = App(group, bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest", show_keys=True)
        self.app.consume(topic, on_failure=DeadLetter(self.topic))(self.on_order)
        self.app.consume(f"{topic}.bills", on_failure=Park(self.parked))(self.on_bill)

    async def on_order(self, _: Record) -> None: ...

    async def on_bill(self, _: Record) -> None: ...

    async def fill(self, total: int) -> None:
        for name in (self.source, self.topic):
            await self.kafka.create_topic(name, 2, {"retention.ms": "-1"})
        letters = [dead_letter(self.topic, self.order(n), self.failure(n)) for n in range(total)]
        await write(self.kafka.bootstrap, [letter._replace(partition=n % 2) for n, letter in enumerate(letters)])

    def order(self, number: int) -> Record:
        return record(number, topic=self.source, partition=number % 2)

    def failure(self, number: int) -> Failure:
        return failure(number, group=self.app.group_id)

    async def arrived(self) -> Counter[bytes | None]:
        """How often each value is in the topic of the records."""
        return Counter(record.value for record in await self.kafka.read(self.source))

    async def done(self) -> set[bytes | None]:
        """The values of the dead letters that another reader sees as done."""
        async with DeadLetterTopic.opened(Settings(bootstrap_servers=self.kafka.bootstrap), self.topic) as letters:
            await letters.fetch_progress()
            return {letter.original.value async for letter in letters.dead_letters(Filters(done=True))}


@pytest.fixture
def shop(kafka: SharedKafka, topic: str, group: str) -> Shop:
    return Shop(kafka, topic, group)


@contextlib.asynccontextmanager
async def client_of(shop: Shop) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=dashboard(shop.app, token=TOKEN, transforms=[marked]))
    async with httpx.AsyncClient(transport=transport, base_url="http://app", headers=HEADERS) as client:
        yield client


async def ask(client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
    answer = await client.post(f"/dead-letters/{path}", json={} if body is None else body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def sending(client: httpx.AsyncClient, condition: Callable[[Any], bool]) -> Any:
    """The job that sends dead letters back, once it meets a condition."""
    async with asyncio.timeout(DEADLINE):
        while not condition(job := (await ask(client, "jobs"))["send"]):  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.01)
    return job


def has_ended(job: Any) -> bool:
    return job["state"] in {"done", "stopped", "failed"}


async def planned(client: httpx.AsyncClient, body: Any) -> Any:
    await ask(client, "send", body)
    job = await sending(client, lambda job: job["state"] != "reading")
    assert job["state"] == "waiting", job["error"]
    return job


async def send(client: httpx.AsyncClient, body: Any) -> Any:
    """Send dead letters back, and return the job when it has ended."""
    await ask(client, "confirm", {"job": (await planned(client, body))["job"]})
    return await sending(client, has_ended)


async def test_dead_letters_are_sent_once_they_are_confirmed(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    await shop.fill(10)
    async with client_of(shop) as client:
        at = [{"partition": 0, "offset": 1}, {"partition": 1, "offset": 3}]
        job = await planned(client, {"topic": shop.topic, "at": at})
        assert (job["planned"]["selected"], job["planned"]["topics"]) == (2, {shop.source: 2})
        assert await shop.arrived() == {}
        assert await shop.done() == set()

        await ask(client, "confirm", {"job": job["job"]})
        job = await sending(client, has_ended)
        assert (job["state"], job["sent"], job["failed"]) == ("done", 2, 0)
        assert await shop.arrived() == {b"2": 1, b"7": 1}
        assert await shop.done() == {b"2", b"7"}
        page = await ask(client, "page", {"topic": shop.topic})
        assert {letter["record"]["offset"] for letter in page["letters"] if letter["replayed"]} == {2, 7}

        job = await send(client, {"topic": shop.topic})
        assert (job["planned"]["selected"], job["sent"]) == (8, 8)
    assert await shop.arrived() == {b"%d" % n: 1 for n in range(10)}
    lines = [line.getMessage() for line in caplog.records if line.name == LOGGER]
    assert [line.split(" by ")[0] for line in lines] == [
        f'send topic="{shop.topic}" records="0/1,1/3"',
        f'send topic="{shop.topic}" records="0/0,0/2-4,1/0-2,1/4"',
    ]
    assert all(" by 127.0.0.1:" in line for line in lines)


async def test_a_value_or_a_transform_changes_what_is_sent(shop: Shop) -> None:
    await shop.fill(6)
    async with client_of(shop) as client:
        at = [{"partition": 1, "offset": 0}]
        job = await send(client, {"topic": shop.topic, "at": at, "value": "one"})
        assert (job["state"], job["sent"]) == ("done", 1)

        transform = f"{__name__}:marked"
        job = await planned(client, {"topic": shop.topic, "transform": transform})
        assert {name: job["planned"][name] for name in ("selected", "changed", "left", "failed")} == {
            "selected": 5,
            "changed": 2,
            "left": 3,
            "failed": 0,
        }
        job = await send(client, {"topic": shop.topic, "transform": transform})
        assert (job["sent"], job["left"]) == (2, 3)
    assert await shop.arrived() == {b"one": 1, b"3!": 1, b"5!": 1}
    assert await shop.done() == {b"1", b"3", b"5"}


async def test_a_stop_leaves_the_rest_unsent_and_due(shop: Shop) -> None:
    await shop.fill(MANY)
    async with client_of(shop) as client:
        job = await planned(client, {"topic": shop.topic})
        await ask(client, "confirm", {"job": job["job"]})
        await sending(client, lambda job: job["sent"] > 0)
        await ask(client, "stop", {"job": job["job"]})
        job = await sending(client, has_ended)

        assert job["state"] == "stopped"
        assert 0 < job["sent"] < MANY
        first = await shop.arrived()
        assert (first.total(), len(first)) == (job["sent"], job["sent"])
        assert await shop.done() == set(first)

        job = await send(client, {"topic": shop.topic})
        assert job["sent"] == MANY - first.total()
    assert await shop.arrived() == {b"%d" % n: 1 for n in range(MANY)}


async def test_a_server_that_ends_takes_its_jobs_along(shop: Shop) -> None:
    await shop.fill(MANY)
    routes = dashboard_routes(shop.app, token=TOKEN)
    async with serve_health(shop.app, routes=routes) as (host, port), httpx.AsyncClient(headers=HEADERS) as client:
        client.base_url = f"http://{host}:{port}"
        job = await planned(client, {"topic": shop.topic})
        await ask(client, "confirm", {"job": job["job"]})
        await sending(client, lambda job: job["sent"] > 0)

    async with client_of(shop) as client:
        job = await send(client, {"topic": shop.topic})
        assert job["state"] == "done", job["error"]
        assert 0 < job["sent"] < MANY
    assert await shop.arrived() == {b"%d" % n: 1 for n in range(MANY)}
    assert len(await shop.done()) == MANY


async def test_two_runs_at_a_time_send_nothing_twice(shop: Shop) -> None:
    await shop.fill(MANY)
    async with client_of(shop) as client, client_of(shop) as other:
        job = await planned(client, {"topic": shop.topic})
        later = await planned(other, {"topic": shop.topic})
        await ask(client, "confirm", {"job": job["job"]})
        await sending(client, lambda job: job["sent"] > 0)
        await ask(other, "confirm", {"job": later["job"]})

        second = await sending(other, has_ended)
        first = await sending(client, has_ended)

    assert second["state"] == "done", second["error"]
    if first["state"] == "failed":  # unless it was done before the second one has begun
        assert "another run" in first["error"]
    assert await shop.arrived() == {b"%d" % n: 1 for n in range(MANY)}


async def test_parked_keys_are_listed_released_and_dropped(
    shop: Shop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    await shop.kafka.create_topic(shop.parked, 2, {"cleanup.policy": "compact"})
    bills = [record(n, topic=f"{shop.source}.bills", key=b"ab"[n // 2 : n // 2 + 1]) for n in range(4)]
    await write(
        shop.kafka.bootstrap,
        [park(shop.parked, bill, shop.failure(n), generation=1, due=4e9) for n, bill in enumerate(bills)],
    )
    at = {"topic": shop.parked, "source": f"{shop.source}.bills", "partition": 0}
    async with client_of(shop) as client:
        found = await ask(client, "parked", {"topic": shop.parked})
        assert (found["total"], found["records"], found["complete"]) == (2, 4, True)
        assert [(key["key"], key["offsets"], key["records"]) for key in found["keys"]] == [
            ("b'a'", [0], 2),
            ("b'b'", [2], 2),
        ]

        monkeypatch.setattr(dead_letters, "MOST_PARKED", 1)
        assert (await ask(client, "parked", {"topic": shop.parked}))["complete"] is False
        monkeypatch.undo()

        await ask(client, "release", {**at, "offset": 0})
        await ask(client, "drop", {**at, "offset": 2})
        found = await ask(client, "parked", {"topic": shop.parked})
        again = await client.post("/dead-letters/drop", json={**at, "offset": 2})

    assert [(key["release_requested"], key["offsets"], key["records"]) for key in found["keys"]] == [
        (True, [0], 2),
        (False, [3], 1),
    ]
    assert again.status_code == 404
    async with opened_topic(Settings(bootstrap_servers=shop.kafka.bootstrap), shop.parked) as (_, reader):
        content = ParkedTopic(EVERYTHING)
        await content.read_from(reader)
    assert [place.offset for place in sorted(content.records)] == [0, 1, 3]
    lines = [line.getMessage() for line in caplog.records if line.name == LOGGER]
    assert [line.split(" ")[0] for line in lines] == ["release", "drop", "dead-letters/drop"]
