"""A terminal for the sessions on a page: a real shell whose output is compared with the page.

In a page, numbers stand for any numbers, `…` within a line for anything, and a separate line for any lines.
`^C` is Ctrl-C. Runs of blanks count as one, because columns are as wide as their numbers.
"""

import asyncio
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

POLL = 0.02
_END = "\x02"


class Step:
    """A command or a Ctrl-C (or neither, for output without a command), and the output after it."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.lines: list[str] = []

    @property
    def continues(self) -> bool:
        """Whether the command runs until it is stopped."""
        return re.match(r"aioshard (?:broker|run)\b(?!.*--until-caught-up)", self.command) is not None

    @property
    def looks(self) -> bool:
        """Whether the command only looks, and may be asked again."""
        return self.command.startswith(("aioshard explain", "aioshard health"))

    def __repr__(self) -> str:
        return self.command or "(printed by itself)"


def steps(text: str) -> list[Step]:
    """Return the steps that a block shows, in order."""
    found: list[Step] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(Step(line[2:]))
        elif line.startswith("^C"):
            found.append(Step("^C"))
            if rest := line.removeprefix("^C"):
                found[-1].lines.append(rest)
        else:
            if not found:
                found.append(Step(""))
            found[-1].lines.append(line)
    return found


def pattern(lines: list[str]) -> re.Pattern[str]:
    """Return a pattern for the lines of the page."""
    parts = [r"\n*"]
    for line in lines:
        if line.strip() == "…":
            parts.append(r"(?:.*\n)*?")
            continue
        text = re.escape(" ".join(line.split())).replace("…", ".*")
        parts.append(re.sub(r"\d(?:[\d,:]|\\\.(?=\d))*", r"\\d(?:[\\d,:]|\\.(?=\\d))*", text) + r"\n")
    return re.compile("".join(parts))


class Terminal:
    """A separate shell; its output is read once, step by step."""

    def __init__(self, directory: Path, environment: Mapping[str, str], *, replaced: Mapping[str, str]) -> None:
        """Args: where it begins, all its variables, and texts of commands that are others here, such as ports."""
        self._directory, self._environment, self._replaced = directory, dict(environment), dict(replaced)
        self._printed = ""
        self._shell: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._shell = await asyncio.create_subprocess_exec(
            "/bin/bash",
            "--norc",
            cwd=self._directory,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reading = asyncio.create_task(self._read(), name="terminal")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._shell is not None
        assert self._reading is not None
        for child in psutil.Process(self._shell.pid).children(recursive=True):
            child.kill()
        self._shell.kill()
        await self._shell.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._shell is not None
        assert self._shell.stdout is not None
        while line := await self._shell.stdout.readline():
            self._printed += re.sub(r"[ \t]+", " ", line.decode()).strip() + "\n"

    async def follow(self, step: Step, within: float) -> None:
        """Do what the step says and wait until what it prints has been printed.

        Raises:
            AssertionError: Something else was printed, or the command failed.
        """
        try:
            async with asyncio.timeout(within):
                await self._follow(step)
        except TimeoutError:
            shown = "\n".join(step.lines)
            raise AssertionError(f"{step}: the page shows\n{shown}\nand this was printed:\n{self._printed}") from None

    async def _follow(self, step: Step) -> None:
        ends = not step.continues and bool(step.command)
        if step.command == "^C":
            self._interrupt()
        elif step.command:
            self._type(step.command)
        code = r"\d+" if step.command == "^C" else "0"  # a page may show how an app ends that was not drained in time
        expected = re.compile(pattern(step.lines).pattern + (f"\n*{_END}{code}\n" if ends else ""))
        while (found := expected.match(self._printed)) is None:
            if ends and _END in self._printed:
                if not step.looks:
                    raise TimeoutError
                # The expected state appears within a moment: a human is slower and would not ask again.
                self._printed = ""
                self._type(step.command)
            await asyncio.sleep(POLL)
        self._printed = self._printed[found.end() :]

    def _interrupt(self) -> None:
        assert self._shell is not None
        (running,) = psutil.Process(self._shell.pid).children()
        running.send_signal(signal.SIGINT)

    def _type(self, command: str) -> None:
        assert self._shell is not None
        assert self._shell.stdin is not None
        for text, other in self._replaced.items():
            command = command.replace(text, other)
        self._shell.stdin.write(f"{command}\necho $'\\x02'$?\n".encode())
