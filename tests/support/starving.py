"""Starts an app in a process that gets little CPU, and reads its reports."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

Report = dict[str, Any]
PATIENCE = 60.0
STARVED = 5.0
"""Seconds for which `starve` takes the core away at a time."""
_BURN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


class Member:
    """A running `starved_member`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.reports: list[Report] = []

    async def until(self, condition: Callable[[Report], bool], *, patience: float = PATIENCE) -> Report:
        """Read reports until one fulfills a condition, and return it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(patience):
            while line := await self.process.stdout.readline():
                report: Report = json.loads(line)
                self.reports.append(report)
                if condition(report):
                    return report
        raise AssertionError(self.reports)

    async def end(self) -> None:
        """Stop the app, and read the remaining reports."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.until(lambda report: report["kind"] == "ended")


@contextlib.asynccontextmanager
async def member(handlers_that: str, *broker: str, core: int | None = None, niceness: int = 0) -> AsyncIterator[Member]:
    """Start an app in another process; wait until it runs.

    Args:
        handlers_that: `await`, `sleep` or `compute`.
        broker: Addresses, topic and group; the in-memory broker without.
        core: The only core that the process uses; None for all.
        niceness: How little of that core it gets if another process uses it, from 0 for half to 19 for a hundredth.
    """
    arguments = [handlers_that, str(-1 if core is None else core), str(niceness), *broker]
    program = ["-m", "tests.support.starved_member", *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *program, stdin=pipe, stdout=pipe)
    try:
        member = Member(process)
        await member.until(lambda report: report["kind"] == "ready")
        yield member
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def burning(core: int) -> AsyncIterator[None]:
    """Keep a core busy with another process."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _BURN, str(core))
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def starve(member: Member, core: int, condition: Callable[[Report], bool]) -> Report:
    """Take the core away from a member, by more processes each time, until a report fulfills a condition.

    In between the member may use every core, so that it can report although others use this one.
    """
    for processes, patience in ((3, STARVED), (6, STARVED), (12, STARVED), (24, PATIENCE)):
        _pin(member, {core})
        async with contextlib.AsyncExitStack() as load:
            for _ in range(processes):
                await load.enter_async_context(burning(core))
            await asyncio.sleep(STARVED)  # that is how long it is starved
        _pin(member, os.sched_getaffinity(0))
        with contextlib.suppress(TimeoutError):
            return await member.until(condition, patience=patience)
    raise AssertionError(member.reports)


def _pin(member: Member, cores: Collection[int]) -> None:
    """Let all threads of a member use only these cores."""
    for thread in Path(f"/proc/{member.process.pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def line_of(comment: str) -> str:
    """Return `file:line` of the line in the program that ends with *comment*."""
    file = Path(__file__).with_name("starved_member.py")
    lines = enumerate(file.read_text("utf-8").splitlines(), 1)
    return next(f"{file}:{number}" for number, line in lines if line.endswith(comment))


def a_core() -> int:
    """Return a core that this process may use."""
    return max(os.sched_getaffinity(0))
