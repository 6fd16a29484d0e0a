"""`aioshard run --web`: the page beside the health routes, and the token that allows its actions."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from aioshard.cli.run_options import WORKER_VARIABLE, RunOptions
from aioshard.cli.web import Page, warn_of_readers
from tests.support.running import Running

Start = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]

TOKEN = "a-token-of-the-operator"
APP = """
from aioshard import App, Record

app = App("billing", bootstrap_servers="127.0.0.1:1", auto_offset_reset="earliest", start_timeout=None)

@app.consume("orders")
async def on_order(record: Record) -> None: ...
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts an app that finds no broker, and gives a client of its page."""
    (tmp_path / "shop.py").write_text(APP)

    @contextlib.asynccontextmanager
    async def started(*arguments: str, **variables: str) -> AsyncIterator[httpx.AsyncClient]:
        app = await Running.start(tmp_path, "run", "shop:app", "--web", *arguments, variables=variables)
        try:
            line = await app.warns("the page is at")
            async with httpx.AsyncClient(base_url=line.split()[-1]) as client:
                yield client
        finally:
            await app.kill()

    return started


def asked(action: str = "check", token: str = TOKEN) -> dict[str, Any]:
    return {"json": {"action": action}, "headers": {"authorization": f"Bearer {token}"}}


async def test_the_page_is_beside_the_health_routes_and_only_shows(start: Start) -> None:
    async with start() as client:
        assert client.base_url.host == "127.0.0.1"
        assert "<title>aioshard</title>" in (await client.get("/")).text
        assert (await client.get("/livez")).status_code == 200
        found = (await client.get("/processes.json")).json()
        assert (found["actions"], found["processes"][0]["statistics"]["group_id"]) == (False, "billing")
        assert (await client.post("/actions", **asked())).status_code == 404
        rebound = await client.get("/processes.json", headers={"host": "elsewhere.example"})
        assert (rebound.status_code, "localhost" in rebound.json()["error"]) == (403, True)


@pytest.mark.parametrize("given_in", ["file", "variable"])
async def test_a_token_allows_actions(start: Start, tmp_path: Path, given_in: str) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    arguments = ["--token-file", str(file)] if given_in == "file" else []
    other = "another-token-of-the-operator"

    async with start(*arguments, AIOSHARD_WEB_TOKEN=other if given_in == "file" else TOKEN) as client:
        assert (await client.get("/processes.json")).json()["actions"] is True
        assert (await client.post("/actions", **asked())).json() == {"done": "the token is right"}
        assert (await client.post("/actions", **asked(token=other))).status_code == 401


@pytest.mark.parametrize(
    ("arguments", "token", "sentence"),
    [
        (["--token-file", "token"], None, "--token-file was given without --web"),
        (["--web", "--token-file", "missing"], None, "missing"),
        (["--web", "--token-file", "token"], "short", "the token of the page has 5 characters"),
        (["--web", "--token-file", "token"], "", "the token of the page has 0 characters"),
    ],
    ids=["without the page", "no file", "short", "empty"],
)
async def test_what_is_wrong_with_a_token_is_told_before_anything_runs(
    tmp_path: Path, arguments: list[str], token: str | None, sentence: str
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "token").write_text(TOKEN if token is None else token)

    app = await Running.start(tmp_path, "run", "shop:app", *arguments)

    assert await app.ends() == 2
    assert sentence in app.errors


def test_an_empty_variable_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHARD_WEB_TOKEN", "")

    assert Page.of(None).token is None


@pytest.mark.parametrize(("mode", "warned"), [(0o604, True), (0o644, True), (0o640, False), (0o600, False)])
def test_a_token_that_anybody_may_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, *, warned: bool
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)

    warn_of_readers(str(file))

    assert (f"anybody on this machine can read the token in {file}: chmod 600 {file}" in caplog.text) == warned


@pytest.mark.parametrize("whose", ["of another user", "mounted"])
def test_but_not_where_its_mode_is_not_ours_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    if whose == "mounted":
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    else:
        owner = file.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    warn_of_readers(str(file))

    assert caplog.text == ""


@pytest.mark.parametrize("worker", [None, "0"])
def test_of_several_processes_the_supervisor_tells_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, worker: str | None
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    if worker is not None:
        monkeypatch.setenv(WORKER_VARIABLE, worker)
    chosen: dict[str, Any] = {**dict.fromkeys(RunOptions.__dataclass_fields__), "web": True, "token_file": str(file)}

    page = RunOptions(**chosen).page()

    assert page == Page(TOKEN)
    assert caplog.text.count("chmod 600") == (worker is None)
