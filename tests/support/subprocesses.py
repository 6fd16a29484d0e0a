"""A command in its own process, whose output is read continuously."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import httpx

from tests.support.paths import PROJECT

DEADLINE = 40.0
RUN_DEADLINE = 60.0
"""Seconds for a whole run of a module."""


class CommandProcess:
    """An `aioshard run` in its own directory, whose output is read continuously."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._news = asyncio.Condition()
        self._readers = [
            asyncio.create_task(self._read(name, stream), name=f"read {name}")
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
            if stream is not None
        ]

    @classmethod
    async def start(cls, directory: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> Self:
        """`aioshard` with these arguments, in this directory."""
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "aioshard", *arguments),
                cwd=directory,
                env={**environment(), "PYTHONPATH": str(PROJECT), **(variables or {})},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        )

    @property
    def output(self) -> str:
        return "".join(self._lines["stdout"])

    @property
    def errors(self) -> str:
        return "".join(self._lines["stderr"])

    async def _read(self, name: str, stream: asyncio.StreamReader) -> None:
        while line := (await stream.readline()).decode():
            async with self._news:
                self._lines[name].append(line)
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def says(self, text: str) -> str:
        """Wait for a line with *text* on standard output."""
        return await self._line("stdout", text)

    async def warns(self, text: str) -> str:
        """Wait for a line with *text* on standard error."""
        return await self._line("stderr", text)

    async def _line(self, name: str, text: str) -> str:
        def found() -> str | None:
            return next((line for line in self._lines[name] if text in line), None)

        def over() -> bool:
            return self.process.stdout is not None and self.process.stdout.at_eof()

        async with asyncio.timeout(DEADLINE), self._news:
            await self._news.wait_for(lambda: found() is not None or over())
        line = found()
        assert line is not None, f"{text!r} was never said; on standard error:\n{self.errors}"
        return line

    async def health(self) -> httpx.AsyncClient:
        """A client of the health server."""
        line = await self.warns("health server listens on")
        return httpx.AsyncClient(base_url=line.split()[-1], timeout=DEADLINE)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def release(self) -> None:
        """Let one held record finish."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    async def ends(self) -> int:
        """Wait for the end; `output` and `errors` are complete then."""
        try:
            async with asyncio.timeout(DEADLINE):
                await asyncio.wait(self._readers)  # leaves them running for `kill` if it is cancelled
                return await self.process.wait()
        except TimeoutError:
            raise TimeoutError(f"it still runs after {DEADLINE:g} s; on standard error:\n{self.errors}") from None

    async def kill(self) -> None:
        """End the process if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.ends()


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("AIOSHARD_")}


async def run_module(module: str, *arguments: str, directory: Path = PROJECT, code: int = 0) -> str:
    """Run a module in a process that ends by itself, in this directory; return the standard output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=directory,
        env={**environment(), "PYTHONPATH": str(PROJECT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_DEADLINE):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == code, (output + errors).decode()
    return output.decode()


async def until_answer(
    client: httpx.AsyncClient, path: str, condition: Callable[[httpx.Response], bool]
) -> httpx.Response:
    """The first answer of *path* that fulfils the condition."""
    async with asyncio.timeout(DEADLINE):
        while not condition(response := await client.get(path)):  # noqa: ASYNC110 (HTTP sends no event)
            await asyncio.sleep(0.05)
    return response
