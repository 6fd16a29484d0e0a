"""Dead letters on the dashboard: who may see and do what, and that a dry run has no effects on Kafka."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from aioshard import App, DeadLetter, Message, Park, Record, Retry
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.errors import AuthorizationError, SettingsError, TransportError
from aioshard.serde.side_records import Failure
from aioshard.settings import Settings
from aioshard.testing import TestClient
from aioshard.web import dashboard, serve_health
from aioshard.web.page import dashboard_routes
from tests.engine.live_apps import until
from tests.support.dead_letters import ReaderInMemory, dead_letters_in_memory, failure, record

TOKEN = "correct-horse-battery"
TOPIC = "orders.dlt"
DEADLINE = 20.0
NEED_TOKEN: dict[str, dict[str, Any]] = {
    "letter": {"topic": TOPIC, "partition": 0, "offset": 0},
    "count": {"topic": TOPIC},
    "try": {"topic": TOPIC, "partition": 0, "offset": 0},
    "send": {"topic": TOPIC},
    "confirm": {"job": 1},
    "stop": {"job": 1},
    "jobs": {},
    "release": {"topic": "bills.parked", "source": "bills", "partition": 0, "offset": 0},
    "drop": {"topic": "bills.parked", "source": "bills", "partition": 0, "offset": 0},
}


class Line(BaseModel):
    price: float


class Order(BaseModel):
    id: int
    lines: list[Line]


def fixed(original: Record) -> bytes | None:
    """A transform that changes the orders without a price."""
    return b'{"id": 7, "lines": []}' if original.offset == 41 else None


class Shop:
    """An app with dead letters, whose handler publishes a receipt.

    Attributes:
        runs: The orders on which the handler has run.
        loops: Their event loops.
        may_end: The handler waits for it, if there is one.
        ended: The event loops in which such a wait has ended.
    """

    def __init__(self, **settings: Any) -> None:
        self.app = App("billing", **settings)
        self.runs: list[int] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.ended: set[asyncio.AbstractEventLoop] = set()
        self.may_end: asyncio.Event | None = None
        self.app.consume("orders", retry=Retry(attempts=1), on_failure=DeadLetter(TOPIC))(self.on_order)
        self.app.consume("bills", retry=Retry(attempts=1), on_failure=Park("bills.parked"))(self.on_bill)

    async def on_order(self, order: Order) -> None:
        self.runs.append(order.id)
        self.loops.add(asyncio.get_running_loop())
        await self.app.publish("receipts", {"order": order.id})
        if self.may_end is not None:
            try:
                await self.may_end.wait()
            finally:
                self.ended.add(asyncio.get_running_loop())
        if order.id == 13:
            raise LookupError("no such customer")

    async def on_bill(self, _: Record) -> None:
        pass


def order(number: int, value: bytes | None = None, **fields: Any) -> Record:
    content = b'{"id": %d, "lines": [{"price": 2.5}]}' % number if value is None else value
    return record(number, value=content, headers=(("tenant", b"acme"),), **fields)


LETTERS: Sequence[tuple[int, Record, Failure]] = [
    (0, order(1), failure(1)),
    (1, order(41, b'{"id": "seven", "lines": [{"prize": 2.5}]}'), failure(2, error="DecodeError")),
    (2, order(3, key=None), failure(3, error="TimeoutError", message="5 s")),
    (3, order(4), failure(4, group="accounts")),
    (4, order(13), failure(5, error="LookupError")),
]


class Topics:
    """Opens topics from memory instead of from brokers.

    Attributes:
        may_read: Reading waits until this is set.
        opened: How many are open.
        error: Raised instead of opening one.
        progress_error: Raised instead of fetching the progress.
    """

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.opened = 0
        self.error: Exception | None = None
        self.progress_error: Exception | None = None

    @contextlib.asynccontextmanager
    async def open(self, _: Settings, topic: str, __: Collection[int] = ()) -> AsyncIterator[DeadLetterTopic]:
        if self.error is not None:
            raise self.error
        letters, reader = dead_letters_in_memory(topic, {0: LETTERS})
        self._wait_in(reader)
        letters.fetch_progress = self._fetch_progress(letters)  # type: ignore[method-assign]
        self.opened += 1
        try:
            yield letters
        finally:
            self.opened -= 1

    def _wait_in(self, reader: ReaderInMemory) -> None:
        read = reader.read

        async def read_later(*bounds: Any) -> AsyncIterator[list[Record]]:
            await self.may_read.wait()
            async for records in read(*bounds):
                yield records

        reader.read = read_later  # type: ignore[method-assign, assignment]

    def _fetch_progress(self, letters: DeadLetterTopic) -> Any:
        async def fetch() -> None:
            if self.progress_error is not None:
                raise self.progress_error
            letters.progress[0].finish([2])

        return fetch


@pytest.fixture(autouse=True)
def topics(monkeypatch: pytest.MonkeyPatch) -> Topics:
    topics = Topics()
    monkeypatch.setattr(DeadLetterTopic, "opened", topics.open)
    return topics


@pytest.fixture
def shop() -> Shop:
    return Shop(show_keys=True, show_payloads=True)


@contextlib.asynccontextmanager
async def client_of(app: App, token: str | None = TOKEN, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=dashboard(app, token=token, **options))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as made:
        yield made


@pytest.fixture
async def client(shop: Shop) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(shop.app, transforms=[fixed]) as made:
        yield made


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Gives the lines of the audit log."""
    caplog.set_level(logging.INFO, "aioshard.web.audit")
    return lambda: [line.getMessage() for line in caplog.records if line.name == "aioshard.web.audit"]


async def ask(
    client: httpx.AsyncClient, path: str, body: Any = None, token: str | None = TOKEN, **headers: str
) -> httpx.Response:
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    return await client.post(f"/dead-letters/{path}", json={} if body is None else body, headers=headers)


async def done(client: httpx.AsyncClient, kind: str, *, leaves: Collection[str] = ("reading", "running")) -> Any:
    """The job of a kind once it has left these states."""
    async with asyncio.timeout(DEADLINE):
        while True:
            job = (await ask(client, "jobs")).json()[kind]
            if job["state"] not in leaves:
                return job
            await asyncio.sleep(0.01)


async def started(client: httpx.AsyncClient, path: str, body: Any) -> Any:
    answer = await ask(client, path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# Authorization ------------------------------------------------------------------------


@pytest.mark.parametrize("path", NEED_TOKEN)
@pytest.mark.parametrize("token", [None, "another-token-than-ours"])
async def test_only_clients_with_the_token_may_act(
    client: httpx.AsyncClient, topics: Topics, audit: Callable[[], list[str]], path: str, token: str | None
) -> None:
    topics.error = AssertionError("a topic was opened")

    answer = await ask(client, path, NEED_TOKEN[path], token)

    assert answer.status_code == 401, answer.text
    assert (await ask(client, "jobs")).json() == {}
    (line,) = audit()
    assert line.startswith(f"dead-letters/{path} by 127.0.0.1")
    assert "refused (401)" in line


@pytest.mark.parametrize("path", NEED_TOKEN)
async def test_without_a_token_there_is_nothing_to_act_with(shop: Shop, path: str) -> None:
    async with client_of(shop.app, token=None) as client:
        assert (await ask(client, path, NEED_TOKEN[path])).status_code == 404


@pytest.mark.parametrize("path", [*NEED_TOKEN, "page", "parked"])
async def test_pages_of_other_sites_and_forms_are_refused(client: httpx.AsyncClient, path: str) -> None:
    body = {"topic": TOPIC} if path in {"page", "parked"} else NEED_TOKEN[path]

    assert (await ask(client, path, body, origin="http://elsewhere.example")).status_code == 403
    assert (await client.post(f"/dead-letters/{path}", data={"topic": TOPIC})).status_code in {401, 415}


async def test_a_wrong_token_is_refused_where_none_is_needed(client: httpx.AsyncClient) -> None:
    assert (await ask(client, "page", {"topic": TOPIC}, "another-token-than-ours")).status_code == 401


# Pages --------------------------------------------------------------------------------


async def test_the_topics_of_the_handlers_are_named(client: httpx.AsyncClient) -> None:
    assert (await client.get("/dead-letters.json")).json() == {
        "topics": [
            {"topic": TOPIC, "parked": False, "handlers": ["on_order"]},
            {"topic": "bills.parked", "parked": True, "handlers": ["on_bill"]},
        ],
        "transforms": [f"{__name__}:fixed"],
        "show_payloads": True,
        "show_keys": True,
    }


async def test_pages_show_the_newest_of_the_group_first_and_no_payloads(client: httpx.AsyncClient) -> None:
    first = await started(client, "page", {"topic": TOPIC, "size": 3})
    second = await started(client, "page", {"topic": TOPIC, "size": 3, "cursor": first["cursor"]})

    shown = [letter["record"]["offset"] for letter in first["letters"] + second["letters"]]
    assert shown == [13, 3, 41, 1], "4 belongs to another group"
    assert second["cursor"] is None
    newest = first["letters"][0]
    assert newest["record"]["key"] == "b'alice'"
    assert (newest["error"], newest["message"], newest["replayed"]) == ("LookupError", "no such customer", False)
    assert first["letters"][1]["replayed"] is True
    assert newest["size"] == len(order(13).value or b"")
    assert "acme" not in json.dumps(first)
    assert "price" not in json.dumps(first)


@pytest.mark.parametrize(
    ("filters", "offsets"),
    [
        ({"error": "DecodeError"}, [41]),
        ({"handler": "on_refund"}, []),
        ({"done": True}, [3]),
        ({"done": False, "since": 1_700_000_002.0}, [13, 41]),
        ({"until": 1_700_000_002}, [1]),
        ({"key": "alice"}, [13, 41, 1]),
        ({"header": "tenant=acme", "text": "prize"}, [41]),
        ({"source": "refunds"}, []),
    ],
    ids=str,
)
async def test_pages_are_filtered(client: httpx.AsyncClient, filters: dict[str, Any], offsets: list[int]) -> None:
    page = await started(client, "page", {"topic": TOPIC, **filters})

    assert [letter["record"]["offset"] for letter in page["letters"]] == offsets


async def test_keys_are_hashed_unless_they_may_be_shown() -> None:
    async with client_of(Shop().app) as client:
        page = await started(client, "page", {"topic": TOPIC})

    assert page["letters"][0]["record"]["key"].startswith("#")
    assert "alice" not in json.dumps(page)


@pytest.mark.parametrize("path", ["page", "count", "send"])
@pytest.mark.parametrize("filters", [{"text": "alice"}, {"header": "tenant"}, {"key": "alice"}], ids=str)
async def test_a_filter_cannot_reveal_what_is_hidden(path: str, filters: dict[str, str]) -> None:
    async with client_of(Shop().app) as client:
        assert (await ask(client, path, {"topic": TOPIC, **filters})).status_code == 403


async def test_a_filter_by_text_cannot_reveal_keys() -> None:
    async with client_of(Shop(show_payloads=True).app) as client:
        assert (await ask(client, "page", {"topic": TOPIC, "text": "alice"})).status_code == 403
        assert (await ask(client, "page", {"topic": TOPIC, "header": "tenant"})).status_code == 200


@pytest.mark.parametrize("filters", [{"text": "alice"}, {"header": "tenant"}], ids=str)
async def test_a_filter_by_payload_needs_the_token(client: httpx.AsyncClient, filters: dict[str, str]) -> None:
    assert (await ask(client, "page", {"topic": TOPIC, **filters}, None)).status_code == 403


async def test_progress_that_may_not_be_read_is_unknown(client: httpx.AsyncClient, topics: Topics) -> None:
    topics.progress_error = AuthorizationError("not allowed")

    page = await started(client, "page", {"topic": TOPIC})

    assert {letter["replayed"] for letter in page["letters"]} == {None}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("page", {"topic": "secrets"}, 404),
        ("page", {"topic": "bills.parked"}, 404),
        ("page", {"topic": TOPIC, "cursor": "0:x"}, 422),
        ("page", {"topic": TOPIC, "size": 201}, 422),
        ("page", {"topic": TOPIC, "sise": 1}, 422),
        ("page", {"topic": TOPIC, "text": "x" * 70_000}, 413),
        ("parked", {"topic": TOPIC}, 404),
        ("letter", {"topic": TOPIC, "partition": 0, "offset": 99}, 404),
        ("letter", {"topic": TOPIC, "partition": 0, "offset": 3}, 404),
        ("letter", {"topic": TOPIC, "partition": -1, "offset": 0}, 422),
        ("try", {"topic": "secrets", "partition": 0, "offset": 0}, 404),
        ("try", {"topic": TOPIC, "partition": 0, "offset": 0, "transform": "os:system"}, 403),
        ("try", {"topic": TOPIC, "partition": 0, "offset": 0, "transform": f"{__name__}:fixed", "value": "x"}, 422),
        ("send", {"topic": TOPIC, "transform": "os:system"}, 403),
        ("send", {"topic": TOPIC, "value": "x"}, 422),
        ("send", {"topic": TOPIC, "at": [{"partition": 0, "offset": n} for n in range(1001)]}, 422),
        ("confirm", {"job": 1}, 409),
        ("stop", {"job": 1}, 409),
        ("release", {"topic": TOPIC, "source": "bills", "partition": 0, "offset": 0}, 404),
        ("drop", {"topic": TOPIC, "source": "bills", "partition": 0, "offset": 0}, 404),
    ],
    ids=str,
)
async def test_a_request_that_cannot_be_answered_is_refused_with_a_reason(
    shop: Shop, client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int
) -> None:
    async with TestClient(shop.app):
        answer = await ask(client, path, body)

    assert answer.status_code == status, answer.text
    assert len(answer.json()["error"]) > 20
    assert shop.runs == []


async def test_brokers_that_do_not_answer_are_reported(client: httpx.AsyncClient, topics: Topics) -> None:
    topics.error = TransportError("no broker answers")

    answer = await ask(client, "page", {"topic": TOPIC})

    assert (answer.status_code, answer.json()) == (502, {"error": "no broker answers"})


async def test_one_client_reads_pages_at_a_time(client: httpx.AsyncClient, topics: Topics) -> None:
    topics.may_read.clear()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(ask(client, "page", {"topic": TOPIC}), name="a page")
        await until(lambda: topics.opened)
        assert (await ask(client, "page", {"topic": TOPIC}, None)).status_code == 409
        topics.may_read.set()

    assert reading.result().status_code == 200
    assert topics.opened == 0
    assert (await ask(client, "page", {"topic": TOPIC})).status_code == 200


# One dead letter ----------------------------------------------------------------------


async def test_one_is_shown_in_full_and_as_its_handler_decodes_it(client: httpx.AsyncClient) -> None:
    letter = await started(client, "letter", {"topic": TOPIC, "partition": 0, "offset": 0})

    assert letter["hidden"] is False
    assert letter["record"]["value"] == '{"id": 1, "lines": [{"price": 2.5}]}'
    assert letter["record"]["headers"] == [["tenant", "acme"]]
    assert letter["decoded"]["handler"] == "on_order"
    assert letter["decoded"]["type"] == "Order"
    assert letter["decoded"]["value"] == {"id": 1, "lines": [{"price": 2.5}]}
    assert json.loads(letter["decoded"]["text"]) == letter["decoded"]["value"]


async def test_faults_name_their_fields(client: httpx.AsyncClient) -> None:
    letter = await started(client, "letter", {"topic": TOPIC, "partition": 0, "offset": 1})

    assert [fault["location"] for fault in letter["decoded"]["faults"]] == ["id", "lines.0.price"]
    assert all(fault["message"] for fault in letter["decoded"]["faults"])


async def test_payloads_are_hidden_unless_they_may_be_shown() -> None:
    async with client_of(Shop().app) as client:
        letter = await started(client, "letter", {"topic": TOPIC, "partition": 0, "offset": 1})

    assert letter["hidden"] is True
    assert (letter["record"]["value"], letter["record"]["headers"]) == (None, None)
    assert [fault["location"] for fault in letter["decoded"]["faults"]] == ["id", "lines.0.price"]
    for secret in ("acme", "seven", "alice", "prize"):
        assert secret not in json.dumps(letter)


# Counting -----------------------------------------------------------------------------


async def test_matches_are_counted_by_error_and_handler(client: httpx.AsyncClient) -> None:
    job = await started(client, "count", {"topic": TOPIC, "key": "alice"})
    assert (job["kind"], job["state"]) == ("count", "reading")

    job = await done(client, "count")

    assert (job["state"], job["read"], job["offsets"]) == ("done", 5, 5)
    summary = job["summary"]
    assert (summary["selected"], summary["dead_letters"], summary["replayed"]) == (3, 5, 0)
    assert summary["errors"] == {"ValueError": 1, "DecodeError": 1, "LookupError": 1}
    assert summary["handlers"] == {"on_order": 3}


async def test_one_job_of_a_kind_runs_at_a_time_and_can_be_stopped(client: httpx.AsyncClient, topics: Topics) -> None:
    topics.may_read.clear()
    first = await started(client, "count", {"topic": TOPIC})
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert f"count dead letters of {TOPIC}" in names

    refused = await ask(client, "count", {"topic": TOPIC})
    assert refused.status_code == 409
    assert "another client is counting" in refused.json()["error"]
    other = await started(client, "send", {"topic": TOPIC})
    assert other["state"] == "reading"
    assert (await ask(client, "send", {"topic": TOPIC})).status_code == 409

    await started(client, "stop", {"job": first["job"]})
    assert (await done(client, "count"))["state"] == "stopped"
    await started(client, "stop", {"job": other["job"]})
    assert (await done(client, "send"))["state"] == "stopped"
    await until(lambda: not topics.opened)
    topics.may_read.set()
    await started(client, "count", {"topic": TOPIC})
    assert (await done(client, "count"))["state"] == "done"


async def test_a_job_that_fails_says_why(client: httpx.AsyncClient, topics: Topics) -> None:
    topics.error = TransportError("no broker answers")
    await started(client, "count", {"topic": TOPIC})

    job = await done(client, "count")

    assert (job["state"], job["error"]) == ("failed", "no broker answers")


async def test_an_unexpected_error_is_logged_and_named(
    client: httpx.AsyncClient, topics: Topics, caplog: pytest.LogCaptureFixture
) -> None:
    topics.error = ZeroDivisionError("a secret")
    await started(client, "count", {"topic": TOPIC})

    job = await done(client, "count")

    assert job["state"] == "failed"
    assert "ZeroDivisionError" in job["error"]
    assert "secret" not in job["error"]
    assert any(line.exc_info for line in caplog.records)


# Dry runs -----------------------------------------------------------------------------


async def test_a_dry_run_runs_the_handler_and_publishes_nothing(
    shop: Shop, client: httpx.AsyncClient, audit: Callable[[], list[str]]
) -> None:
    async with TestClient(shop.app) as broker:
        await started(client, "try", {"topic": TOPIC, "partition": 0, "offset": 0})
        job = await done(client, "try")
        assert broker.records("receipts") == []
        assert shop.app.statistics().handlers[0].processed == 0

    outcome = job["outcome"]
    assert (job["state"], outcome["succeeded"], outcome["record"]) == ("done", True, "orders/0/1")
    assert shop.runs == [1]
    assert [(message["topic"], message["value"]) for message in outcome["messages"]] == [("receipts", '{"order":1}')]
    (line,) = audit()
    assert line.startswith(f'try topic="{TOPIC}" records="0/0" by 127.0.0.1')


@pytest.mark.parametrize(
    ("change", "runs", "succeeds"),
    [
        ({}, [13], False),
        ({"value": '{"id": 8, "lines": []}'}, [8], True),
        ({"value": {"base64": "eyJpZCI6IDksICJsaW5lcyI6IFtdfQ=="}}, [9], True),
        ({"value": "{}"}, [], False),
        ({"transform": f"{__name__}:fixed"}, [], False),
    ],
    ids=str,
)
async def test_a_dry_run_takes_a_change(
    shop: Shop, client: httpx.AsyncClient, change: dict[str, Any], runs: list[int], succeeds: bool
) -> None:
    async with TestClient(shop.app):
        await started(client, "try", {"topic": TOPIC, "partition": 0, "offset": 4, **change})
        job = await done(client, "try")

    assert shop.runs == runs
    assert job["outcome"]["succeeded"] is succeeds
    assert job["outcome"]["left"] is ("transform" in change)
    assert job["outcome"]["edited"] is ("value" in change)


async def test_the_result_of_a_dry_run_has_no_payload_that_is_hidden(audit: Callable[[], list[str]]) -> None:
    shop = Shop()
    async with TestClient(shop.app), client_of(shop.app) as client:
        await started(client, "try", {"topic": TOPIC, "partition": 0, "offset": 4})
        job = await done(client, "try")

    assert job["outcome"]["hidden"] is True
    assert (job["outcome"]["error"], job["outcome"]["messages"]) == ("LookupError", 1)
    assert "customer" not in json.dumps(job)
    assert len(audit()) == 1


async def test_a_dry_run_needs_a_running_app(shop: Shop, client: httpx.AsyncClient) -> None:
    answer = await ask(client, "try", {"topic": TOPIC, "partition": 0, "offset": 0})

    assert answer.status_code == 409
    assert "is not running" in answer.json()["error"]
    assert shop.runs == []


async def test_a_dry_run_can_be_stopped_and_is_the_only_one(shop: Shop, client: httpx.AsyncClient) -> None:
    shop.may_end = asyncio.Event()
    async with TestClient(shop.app):
        job = await started(client, "try", {"topic": TOPIC, "partition": 0, "offset": 0})
        await until(lambda: shop.runs)
        assert (await ask(client, "try", {"topic": TOPIC, "partition": 0, "offset": 0})).status_code == 409
        await started(client, "stop", {"job": job["job"]})
        assert (await done(client, "try"))["state"] == "stopped"


async def test_handlers_run_in_the_event_loop_of_the_app(shop: Shop) -> None:
    """Also if the dashboard is served from a thread of its own."""
    async with TestClient(shop.app), serve_health(shop.app, routes=dashboard_routes(shop.app, token=TOKEN)) as bound:
        host, port = bound
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            await started(client, "try", {"topic": TOPIC, "partition": 0, "offset": 0})
            job = await done(client, "try")
            letter = await started(client, "letter", {"topic": TOPIC, "partition": 0, "offset": 0})

    assert job["outcome"]["succeeded"] is True
    assert shop.loops == {asyncio.get_running_loop()}
    assert letter["decoded"]["value"]["id"] == 1


async def test_a_stop_reaches_the_event_loop_of_the_app(shop: Shop) -> None:
    shop.may_end = asyncio.Event()
    async with TestClient(shop.app), serve_health(shop.app, routes=dashboard_routes(shop.app, token=TOKEN)) as bound:
        host, port = bound
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            job = await started(client, "try", {"topic": TOPIC, "partition": 0, "offset": 0})
            await until(lambda: shop.runs)
            await started(client, "stop", {"job": job["job"]})
            assert (await done(client, "try"))["state"] == "stopped"
            await until(lambda: shop.ended)

    assert shop.ended == {asyncio.get_running_loop()}


# Plans --------------------------------------------------------------------------------


async def test_a_plan_counts_before_anything_is_sent(client: httpx.AsyncClient) -> None:
    job = await started(client, "send", {"topic": TOPIC, "transform": f"{__name__}:fixed"})

    job = await done(client, "send")

    assert job["state"] == "waiting"
    assert job["planned"] == {
        "selected": 3,
        "topics": {"orders": 3},
        "errors": {"ValueError": 1, "DecodeError": 1, "LookupError": 1},
        "changed": 1,
        "left": 2,
        "failed": 0,
    }
    assert job["sent"] == 0


async def test_a_selection_is_planned_by_its_positions(client: httpx.AsyncClient) -> None:
    at = [{"partition": 0, "offset": offset} for offset in (0, 2, 4)]
    await started(client, "send", {"topic": TOPIC, "at": at})
    assert (await done(client, "send"))["planned"]["selected"] == 2, "one of them is done"

    await started(client, "send", {"topic": TOPIC, "at": at, "again": True})
    assert (await done(client, "send"))["planned"]["selected"] == 3


async def test_a_plan_that_was_replaced_or_dropped_is_not_sent(client: httpx.AsyncClient) -> None:
    first = await started(client, "send", {"topic": TOPIC})
    await done(client, "send")
    second = await started(client, "send", {"topic": TOPIC})
    assert (await ask(client, "confirm", {"job": first["job"]})).status_code == 409
    await done(client, "send")

    await started(client, "stop", {"job": second["job"]})
    assert (await ask(client, "confirm", {"job": second["job"]})).status_code == 409
    assert (await done(client, "send"))["state"] == "discarded"


# Transforms ---------------------------------------------------------------------------


def test_transforms_without_names_or_with_equal_names_are_refused(shop: Shop) -> None:
    class Nameless:
        def __call__(self, original: Record) -> Message | None: ...

    for transforms in ([Nameless()], [fixed, fixed]):
        with pytest.raises(SettingsError):
            dashboard(shop.app, transforms=transforms)
