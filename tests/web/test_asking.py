"""Asking a worker that goes away meanwhile: no answer, whatever the event loop calls it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioshard.web.asking import NoAnswerError, ask_worker
from tests.support.loops import LOOPS, NewLoop, run_on


@LOOPS
def test_a_worker_that_goes_away_before_it_was_asked_gives_no_answer(
    new_loop: NewLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = asyncio.open_unix_connection

    async def lost(path: str) -> Any:
        reader, writer = await connect(path)
        transport: Any = writer.transport
        transport._force_close(ConnectionResetError())
        await asyncio.sleep(0)
        return reader, writer

    async def test() -> None:
        path = str(tmp_path / "0.sock")
        server = await asyncio.start_unix_server(lambda _reader, writer: writer.close(), path)
        async with server:
            monkeypatch.setattr(asyncio, "open_unix_connection", lost)
            with pytest.raises(NoAnswerError):
                await ask_worker(path, "/livez", within=5)

    run_on(new_loop, test())
