"""Dashboard actions: only with the token, from the same origin, small, and logged."""

import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import pytest

from aioshard import App
from aioshard.errors import HandlerError, SettingsError, StateError
from aioshard.web.actions import Action, parse, perform
from aioshard.web.authorization import RefusedError, check_token
from aioshard.web.page import dashboard

TOKEN = "correct-horse-battery"
CHECK = b'{"action": "check"}'
PAUSE = {"action": "pause", "topic": "orders", "partition": 3}


class FakeApp(App):
    """An app that does not run and records the calls of its controls."""

    def __init__(self) -> None:
        super().__init__("billing")
        self.calls: list[tuple[object, ...]] = []
        self.refuses: Exception | None = None

    def _called(self, *call: object) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append(call)

    def pause(self, topic: str, partition: int | None = None, *, why: str = "") -> None:
        assert "operator" in why
        self._called("pause", topic, partition)

    def resume(self, topic: str, partition: int | None = None) -> None:
        self._called("resume", topic, partition)

    def pause_handler(self, name: str, *, why: str = "") -> None:
        assert "operator" in why
        self._called("pause_handler", name)

    def resume_handler(self, name: str) -> None:
        self._called("resume_handler", name)

    def retry_now(self, topic: str, partition: int, offset: int) -> None:
        self._called("retry_now", topic, partition, offset)

    def cancel_run(self, topic: str, partition: int, offset: int) -> None:
        self._called("cancel_run", topic, partition, offset)

    def skip(self, topic: str, partition: int, offset: int) -> None:
        self._called("skip", topic, partition, offset)

    def release_parked(self, topic: str, partition: int, offset: int) -> None:
        self._called("release_parked", topic, partition, offset)


@pytest.fixture
def app() -> FakeApp:
    return FakeApp()


@pytest.fixture
async def client(app: FakeApp) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=dashboard(app, token=TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://app:8080") as made:
        yield made


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Gives the lines of the audit log."""
    caplog.set_level(logging.INFO, "aioshard.web.audit")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "aioshard.web.audit"]


async def post(
    client: httpx.AsyncClient, body: bytes | dict[str, Any] = CHECK, **headers: str | None
) -> httpx.Response:
    """Ask for an action; a header of None is left out."""
    given: dict[str, str | None] = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {name: value for name, value in given.items() if value is not None}
    return await client.post("/actions", content=content, headers=sent)


# Authorization ----------------------------------------------------------------------------


async def test_a_client_with_the_token_may_act(client: httpx.AsyncClient, app: FakeApp) -> None:
    answer = await post(client, PAUSE)

    assert (answer.status_code, answer.json()) == (200, {"done": "orders/3 is paused"})
    assert app.calls == [("pause", "orders", 3)]


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN.upper()}",
    ],
    ids=["missing", "empty", "no-token", "blank", "basic", "shorter", "longer", "upper-case"],
)
async def test_a_client_without_the_token_may_not_act(
    client: httpx.AsyncClient, app: FakeApp, given: str | None
) -> None:
    answer = await post(client, PAUSE, authorization=given)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert app.calls == []


async def test_tokens_are_compared_in_constant_time(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def compare(given: bytes, token: bytes) -> bool:
        compared.append((given, token))
        return compare_digest(given, token)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for given, status in ((TOKEN[:-1] + "x", 401), (TOKEN, 200)):
        assert (await post(client, authorization=f"Bearer {given}")).status_code == status

    assert compared == [(TOKEN[:-1].encode() + b"x", TOKEN.encode()), (TOKEN.encode(), TOKEN.encode())]


async def test_a_token_in_the_url_is_ignored(client: httpx.AsyncClient, app: FakeApp) -> None:
    answer = await client.post(
        f"/actions?token={TOKEN}&access_token={TOKEN}", json=PAUSE, headers={"cookie": f"token={TOKEN}"}
    )

    assert answer.status_code == 401
    assert app.calls == []


async def test_a_token_with_odd_bytes_is_rejected_without_error(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/actions",
        content=CHECK,
        headers=[(b"authorization", b"Bearer \xff\xfe\xe4\xf6"), (b"content-type", b"application/json")],
    )

    assert answer.status_code == 401


@pytest.mark.parametrize(
    "origin",
    [
        "http://elsewhere.example",
        "http://app:8081",
        "http://app",
        "http://app.elsewhere.example:8080",
        "null",
        "",
        "://",
    ],
)
async def test_a_page_of_another_site_is_refused_even_with_the_token(
    client: httpx.AsyncClient, app: FakeApp, origin: str
) -> None:
    answer = await post(client, PAUSE, origin=origin)

    assert answer.status_code == 403
    assert app.calls == []


async def test_two_origin_headers_are_refused(client: httpx.AsyncClient, app: FakeApp) -> None:
    given = [("authorization", f"Bearer {TOKEN}"), ("content-type", "application/json"), ("origin", "http://app:8080")]

    answer = await client.post("/actions", json=PAUSE, headers=[*given, ("origin", "http://elsewhere.example")])

    assert answer.status_code == 403
    assert app.calls == []


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("app:8080", "http://app:8080"),
        ("app:8080", "HTTP://APP:8080"),
        ("ops.example", "https://ops.example"),  # TLS ends at a proxy
        ("[::1]:8080", "http://[::1]:8080"),
        ("app:8080", None),
    ],
)
async def test_the_dashboard_and_non_browser_clients_may_act(
    client: httpx.AsyncClient, host: str, origin: str | None
) -> None:
    assert (await post(client, origin=origin, host=host)).status_code == 200


async def test_a_null_origin_does_not_match_an_empty_host(client: httpx.AsyncClient) -> None:
    assert (await post(client, origin="null", host="")).status_code == 403


async def test_without_a_token_there_are_no_actions(app: FakeApp) -> None:
    transport = httpx.ASGITransport(app=dashboard(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        assert (await post(client, PAUSE)).status_code == 404
        assert (await post(client, PAUSE, authorization="Bearer ")).status_code == 404
        assert (await client.get("/dashboard.json")).json()["actions"] is False
    assert app.calls == []


@pytest.mark.parametrize(
    "token", ["", "  ", "short", "x" * 15, " " + "x" * 15 + "\n", "a token with spaces", "schlüssel-schlüssel"]
)
def test_a_weak_or_unsendable_token_is_refused(app: FakeApp, token: str) -> None:
    with pytest.raises(SettingsError, match="token of the dashboard"):
        dashboard(app, token=token)


def test_whitespace_around_a_token_is_ignored() -> None:
    assert check_token(f" {TOKEN}\n") == TOKEN


# Actions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "call"),
    [
        ({"action": "pause", "topic": "orders", "partition": 0}, ("pause", "orders", 0)),
        ({"action": "resume", "topic": "orders", "partition": 0}, ("resume", "orders", 0)),
        ({"action": "pause_handler", "handler": "on_order"}, ("pause_handler", "on_order")),
        ({"action": "resume_handler", "handler": "on_order"}, ("resume_handler", "on_order")),
        ({"action": "retry_now", "topic": "t", "partition": 1, "offset": 7}, ("retry_now", "t", 1, 7)),
        ({"action": "cancel_run", "topic": "t", "partition": 1, "offset": 7}, ("cancel_run", "t", 1, 7)),
        ({"action": "skip", "topic": "t", "partition": 1, "offset": 7}, ("skip", "t", 1, 7)),
        ({"action": "release_parked", "topic": "t", "partition": 1, "offset": 7}, ("release_parked", "t", 1, 7)),
    ],
    ids=["pause", "resume", "pause-handler", "resume-handler", "retry", "cancel", "skip", "release"],
)
async def test_each_action_reaches_the_app(
    client: httpx.AsyncClient, app: FakeApp, requested: dict[str, Any], call: tuple[object, ...]
) -> None:
    answer = await post(client, requested)

    assert answer.status_code == 200, answer.text
    assert app.calls == [call]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff", 400),
        (b"[" * 4000, 400),
        (b"null", 422),
        (b"[]", 422),
        (b"{}", 422),
        (b'{"action": 1}', 422),
        (b'{"action": ["pause"]}', 422),
        (b'{"action": "seek", "topic": "t", "partition": 0}', 422),
        (b'{"action": "__class__"}', 422),
        (b'{"action": "pause", "topic": "t"}', 422),
        (b'{"action": "pause", "topic": "t", "partition": null}', 422),
        (b'{"action": "pause", "topic": "t", "partition": true}', 422),
        (b'{"action": "pause", "topic": "t", "partition": "0"}', 422),
        (b'{"action": "pause", "topic": "t", "partition": 0.0}', 422),
        (b'{"action": "pause", "topic": "t", "partition": -1}', 422),
        (b'{"action": "pause", "topic": ["t"], "partition": 0}', 422),
        (b'{"action": "pause", "topic": "t", "partition": 0, "why": "x"}', 422),
        (b'{"action": "check", "why": "x"}', 422),
        (rb'{"action": "pause", "topic": "\ud800", "partition": 0}', 400),
        (rb'{"action": "check", "\udfff": 0}', 400),
    ],
    ids=str,
)
async def test_an_unknown_action_is_refused_with_a_reason(
    client: httpx.AsyncClient, app: FakeApp, body: bytes, status: int
) -> None:
    answer = await post(client, body)

    assert answer.status_code == status, answer.text
    assert len(answer.json()["error"]) > 20
    assert app.calls == []


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
async def test_content_types_of_html_forms_are_refused(
    client: httpx.AsyncClient, app: FakeApp, kind: str | None
) -> None:
    assert (await post(client, PAUSE, content_type=kind)).status_code == 415
    assert app.calls == []


@pytest.mark.parametrize("error", [StateError("orders/3 is not assigned"), HandlerError("it has fixed shards")])
async def test_a_refusal_of_the_app_is_passed_on_verbatim(
    client: httpx.AsyncClient, app: FakeApp, error: Exception
) -> None:
    app.refuses = error

    answer = await post(client, PAUSE)

    assert (answer.status_code, answer.json()) == (409, {"error": str(error)})


def test_an_unresponsive_app_is_reported(app: FakeApp) -> None:
    app.refuses = TimeoutError()

    with pytest.raises(RefusedError, match="did not answer in time") as refused:
        perform(app, Action(action="pause", topic="orders", partition=3))
    assert refused.value.status_code == 504


# The body ---------------------------------------------------------------------------------


async def begun(app: FakeApp, then: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> int:
    """Send half a body; *then* is what comes behind it. The status of the answer."""
    headers = {b"authorization": f"Bearer {TOKEN}".encode(), b"content-type": b"application/json"}
    scope = {"type": "http", "method": "POST", "path": "/actions", "query_string": b"", "headers": [*headers.items()]}
    first: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": b'{"act', "more_body": True}]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return first.pop() if first else await then()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await dashboard(app, token=TOKEN)(scope, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_a_truncated_body_is_refused_without_error(app: FakeApp) -> None:
    async def disconnect() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    assert await begun(app, disconnect) == 400
    assert app.calls == []


async def test_a_chunked_body_is_reassembled(client: httpx.AsyncClient, app: FakeApp) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for byte in json.dumps(PAUSE).encode():
            yield bytes([byte])

    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    assert (await client.post("/actions", content=pieces(), headers=headers)).status_code == 200
    assert app.calls == [("pause", "orders", 3)]


async def test_the_body_of_an_unauthorized_request_is_not_read(client: httpx.AsyncClient) -> None:
    pulled = 0

    async def large() -> AsyncIterator[bytes]:
        nonlocal pulled
        for _ in range(100):
            pulled += 1
            yield b" " * 1024

    answer = await client.post("/actions", content=large(), headers={"authorization": "Bearer wrong"})

    assert answer.status_code == 401
    assert pulled <= 1


# Paths and methods ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_only_post_requests_act(client: httpx.AsyncClient, app: FakeApp, method: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = await client.request(method, "/actions?action=pause&topic=orders&partition=3", headers=headers)

    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    assert app.calls == []


# The log ----------------------------------------------------------------------------------


async def test_every_attempt_is_logged_without_the_token(
    client: httpx.AsyncClient, app: FakeApp, audit: Callable[[], list[str]]
) -> None:
    await post(client, PAUSE)
    await post(client, PAUSE, authorization="Bearer a-guess-of-the-token")
    app.refuses = StateError("it is not ours")
    await post(client, {"action": "skip", "topic": "or\nders", "partition": 3, "offset": 9})

    done, guessed, refused = audit()
    assert done.startswith('pause topic="orders" partition=3 by 127.0.0.1:')
    assert done.endswith("orders/3 is paused")
    assert "refused (401)" in guessed
    assert refused.startswith('skip topic="or\\nders" partition=3 offset=9 by ')
    assert refused.endswith("refused (409): it is not ours")
    assert not any(TOKEN in line or "a-guess" in line or "\n" in line for line in audit())


async def test_refused_attempts_cannot_flood_the_log(client: httpx.AsyncClient, audit: Callable[[], list[str]]) -> None:
    for _ in range(60):
        await post(client, authorization=None)

    assert len(audit()) == 20


async def test_a_refused_request_cannot_inject_log_lines(
    client: httpx.AsyncClient, audit: Callable[[], list[str]]
) -> None:
    for body in (b'{"action": "a\\nb"}', b'{"action": "check", "a\\nb": 1}'):
        assert (await post(client, body)).status_code == 422

    assert len(audit()) == 2
    assert not any("\n" in line for line in audit())


def test_an_action_is_logged_on_one_line() -> None:
    action = parse(b'{"action": "pause", "topic": "orders", "partition": 8}')

    assert str(action) == 'pause topic="orders" partition=8'
