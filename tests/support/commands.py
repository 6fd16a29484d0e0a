"""The command line in the test process: faster than a subprocess, and measured by coverage.

A `conftest.py` imports the fixture `aioshard` for its tests.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from aioshard.cli.main import main


class Ended(NamedTuple):
    """The result of a command."""

    code: int
    output: str
    errors: str


Run = Callable[..., Awaitable[Ended]]


@pytest.fixture
def aioshard(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `aioshard` with these arguments in a thread, next to the loop of the test."""
    for variable in [name for name in os.environ if name.startswith("AIOSHARD_") and "TEST" not in name]:
        monkeypatch.delenv(variable)

    def call(arguments: tuple[str, ...]) -> int:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert isinstance(ended.value.code, int)
        return ended.value.code

    async def run(*arguments: str) -> Ended:
        capsys.readouterr()
        code = await asyncio.to_thread(call, arguments)
        return Ended(code, *capsys.readouterr())

    return run
