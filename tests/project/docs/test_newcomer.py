"""Getting started and the tutorial, typed into shells on a machine with only Python."""

import os
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.project.docs.pages import Block, blocks
from tests.project.docs.tables import DOCS
from tests.project.docs.terminal import Step, Terminal, pattern, steps
from tests.support.paths import PROJECT
from tests.support.ports import free_ports
from tests.support.requirements import skip_or_fail

GETTING_STARTED, TUTORIAL = DOCS / "getting-started.md", DOCS / "tutorial.md"
INSTALLING = 180.0
STEP = 60.0
TERMINALS = ("first", "second", "third")


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [GETTING_STARTED, TUTORIAL], ids=lambda page: page.stem)
async def test_each_command_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    (tmp_path / "aioshard").symlink_to(PROJECT)
    shown = [block for block in blocks("console", "python") if block.page == page]
    directory = tmp_path / next(name for block in shown for name in re.findall(r"^\$ mkdir (\w+)", block.text))
    ports = dict(zip(("9092", "8080"), map(str, free_ports(2)), strict=True))
    followed = 0
    async with AsyncExitStack() as stack:
        opened: dict[str, Terminal] = {}
        for block in shown:
            if block.language == "python":
                if file := saved_as(block):
                    (directory / file).write_text(block.text.replace("9092", ports["9092"]))
                continue
            if block.check not in TERMINALS:
                continue
            if block.check not in opened:
                # Each further terminal is opened in the new directory, and takes the same environment.
                terminal = Terminal(tmp_path if not opened else directory, variables(directory, opened), replaced=ports)
                opened[block.check] = await stack.enter_async_context(terminal)
            for step in steps(block.text):
                await follow(opened[block.check], step)
                followed += 1

    assert set(opened) == set(TERMINALS)
    assert followed >= 12


def saved_as(block: Block) -> str | None:
    """The file that the page says to save this block as, in the sentence before it."""
    before = block.page.read_text().splitlines()[: block.line - 1]
    sentence = next((line for line in reversed(before) if line.strip()), "")
    found = re.match(r"Save this as `([\w.]+)`", sentence)
    return found[1] if found else None


def test_the_files_to_save_are_found() -> None:
    saved = [saved_as(block) for block in blocks("python") if block.page in {GETTING_STARTED, TUTORIAL}]

    assert [name for name in saved if name] == ["quickstart.py", "orders.py", "totals.py", "orders.py"]


async def follow(terminal: Terminal, step: Step) -> None:
    try:
        await terminal.follow(step, INSTALLING if "pip" in step.command else STEP)
    except AssertionError as error:
        if re.search(r"No matching distribution|Connection(?:Error| broken)|Max retries", str(error)):
            skip_or_fail("package index", str(error)[-300:])
        raise


def variables(directory: Path, opened: dict[str, Terminal]) -> dict[str, str]:
    """Return the initial environment of a shell: only the variables by which pip finds packages."""
    kept = {name: value for name, value in os.environ.items() if re.match(r"PIP_|LANG|SSL_|HTTPS?_PROXY", name)}
    path = [str(directory / ".venv" / "bin")] if opened else []
    path += [str(Path(sys.base_prefix) / "bin"), "/usr/bin", "/bin"]
    return {**kept, "HOME": str(directory.parent), "PATH": ":".join(path), "COLUMNS": "120", "PIP_NO_COMPILE": "1"}


def test_output_may_differ_from_the_page_only_in_numbers_and_blanks() -> None:
    expected = pattern(["took 1.25 s at 127.0.0.1:9092", "…", "  done   3"])

    assert expected.fullmatch("took 12 s at 10.0.0.1:80\ndone 41\n")
    assert expected.fullmatch("took 0.5 s at 127.0.0.1:9092\nmore\nand more\ndone 3\n")
    assert not expected.fullmatch("took long at 127.0.0.1:9092\ndone 3\n")
    assert not expected.fullmatch("took 1 s at 127.0.0.1:9092\ndone x\n")
    assert [repr(step) for step in steps("a line\n$ ls\nout\n^Cbye\n")] == ["(printed by itself)", "ls", "^C"]
