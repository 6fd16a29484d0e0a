"""Every code block in README and documentation works.

How a block is tested is in its info string: `python` is executed; with `data-check="memory"` its app then consumes
records on the broker in memory; `"continued"` reuses the names of the block before; `"pytest"` has its tests run;
`"recipe"` is executed in `test_integrations.py`; `"names"` is for what must not be executed here: its imports are, and
every name in it has to exist. `"theirs"` is for code of another library. `test_unchecked_blocks_are_listed` says which
blocks are not run, and why.
"""

import ast
import asyncio
import builtins
import doctest
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import click
import pytest

from aioshard import App
from aioshard.cli.run import TOKEN_VARIABLE
from aioshard.cli.supervisor import WORKER_VARIABLE
from aioshard.settings import PREFIX, Settings
from aioshard.testing import TestClient, run
from tests.project.docs.pages import PAGES, Block, blocks, name_of
from tests.project.docs.recipes import RECIPE
from tests.project.docs.tables import context_of
from tests.support.paths import PROJECT

EXECUTED = [block for block in blocks("python") if block.check != RECIPE]
SHELL = [block for block in blocks("console", "yaml") if block.check != RECIPE]
TERMINALS = {"first", "second", "third"}
"""Sessions of a page, typed and compared in `test_newcomer.py`."""
OTHERS = {
    *(".", "cd", "docker", "echo", "export", "kill", "mkdir", "pip", "python", "python3", "rm", "sleep"),
    "spark-pipelines",
}
"""Programs of others, whose options are not looked at."""


def test_no_block_is_left_out() -> None:
    written = sum(
        len(re.findall(r"^ *```(?:python|pycon|console|yaml)", page.read_text(), re.MULTILINE)) for page in PAGES
    )

    assert written == len(blocks("python", "pycon", "console", "yaml"))


@pytest.mark.parametrize("block", [each for each in EXECUTED if each.check != "continued"], ids=str)
def test_a_python_block_runs(block: Block) -> None:
    if block.check == "theirs":
        check_theirs(block)
        return
    if block.check == "names":
        check_names(block)
        return
    names = execute(block, {"__name__": "block"})
    for continued in _continuing(block):
        execute(continued, names)
    if block.check == "memory":
        check_in_memory(names["app"])
    elif block.check == "pytest":
        check_tests(names)
    else:
        assert block.check == "", f"{block} has the unknown check {block.check!r}"


def _continuing(block: Block) -> Iterator[Block]:
    for following in EXECUTED[EXECUTED.index(block) + 1 :]:
        if following.check != "continued":
            return
        assert following.page == block.page, f"{following} continues nothing"
        yield following


def execute(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    code = compile("\n" * block.line + block.text, str(block.page), "exec")
    exec(code, names)
    return names


_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_names(block: Block) -> None:
    tree = ast.parse(block.text)
    names: dict[str, Any] = {}
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), str(block.page), "exec"), names)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, _DEFINED)}
    defined |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert loaded <= {*names, *stored, *defined, *vars(builtins)}


def check_theirs(block: Block) -> None:
    """Code of another library is not run: it compiles, and where the library is installed what it names exists."""
    compile(block.text, str(block.page), "exec")
    found = re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE)
    if all(importlib.util.find_spec(name) for name in found):
        check_names(block)


def check_in_memory(app: App) -> None:
    """Each handler of the app gets records, with a key and without, and finishes them."""

    async def consume() -> None:
        async with TestClient(app) as client:
            topics = [topic for handler in app.handlers for topic in handler.topics]
            for topic in topics:
                for key in ("alice", "ben", None):
                    await client.publish(topic, "{}", key=key)
            await client.settle()
            statistics = app.statistics()
        assert sum(handler.processed for handler in statistics.handlers) == 3 * len(topics) > 0

    run(consume())


def check_tests(names: dict[str, Any]) -> None:
    tests = {name: test for name, test in names.items() if name.startswith("test_")}
    assert tests
    for test in tests.values():
        fixtures = {"aioshard_client": TestClient}  # the only one of the plugin
        given = {name: fixtures[name] for name in inspect.signature(test).parameters}
        marks = {mark.name for mark in getattr(test, "pytestmark", ())}
        if not inspect.iscoroutinefunction(test):
            test(**given)
        elif "aioshard_virtual_time" in marks:
            run(test(**given))
        else:
            asyncio.run(test(**given))


@pytest.mark.parametrize("page", sorted({block.page for block in blocks("pycon")}), ids=name_of)
def test_a_session_prints_what_it_shows(page: Any) -> None:
    names: dict[str, Any] = {}
    parser, output = doctest.DocTestParser(), list[str]()
    runner = doctest.DocTestRunner(verbose=False)
    for block in blocks("pycon"):
        if block.page == page:
            session = parser.get_doctest(block.text, names, str(block), str(page), block.line)
            runner.run(session, out=output.append, clear_globs=False)
            names = session.globs
    assert runner.summarize(verbose=False).failed == 0, "".join(output)
    assert runner.tries > 0


NOT_RUN = {
    "names": {
        "reports.md": "Spark",
        "spark.md": "Spark; tests/spark runs what the pages show",
        "spark-dataframes.md": "Spark",
        "spark-handover.md": "Spark",
        "spark-sinks.md": "Spark",
        "tls-and-sasl.md": "files of secrets that are not here",
    },
    "theirs": {
        "coming-from-aiokafka.md": "code of another library",
        "coming-from-celery.md": "code of another library, which is not installed: it compiles",
        "coming-from-confluent-kafka.md": "code of another library",
        "coming-from-faststream.md": "code of another library",
        "coming-from-faust.md": "code of another library, which is not installed: it compiles",
        "managed-kafka.md": "signs with a package that is not installed: it compiles",
    },
}
"""Pages with blocks that are not run, and why; all other blocks are."""


@pytest.mark.parametrize("check", NOT_RUN)
def test_unchecked_blocks_are_listed(check: str) -> None:
    assert {block.page.name for block in EXECUTED if block.check == check} == NOT_RUN[check].keys()


# Commands --------------------------------------------------------------------------------


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command in a block."""
    if block.language == "yaml":
        yield from (json.loads(found) for found in re.findall(r"command: (\[.*\])", block.text))
        return
    for line in block.text.splitlines():
        if line.startswith("$ "):
            words = shlex.split(re.sub(r"^([A-Z_]+=\S+ )+", "", line[2:]), comments=True)
            while words:
                end = next((at for at, word in enumerate(words) if word in {"|", "&&"}), len(words))
                yield words[:end]
                words = words[end + 1 :]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_command_knows_its_documented_options(block: Block) -> None:
    found = list(commands(block))
    assert found or block.check in TERMINALS  # what is printed later has a block without a command
    for words in found:
        if words[0] == "aioshard":
            is_option = words[1].startswith("-")
            named = 1 if is_option else 2 + isinstance(context_of(words[1]).command, click.Group)
            context = context_of(" ".join(words[1:named]))
            context.command.make_parser(context).parse_args(words[named:])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (PROJECT / "Makefile").read_text(), re.MULTILINE), words
        else:
            assert words[0] in OTHERS, f"nothing checks {words[0]!r}"


NO_SETTINGS = {TOKEN_VARIABLE, WORKER_VARIABLE, "AIOSHARD_CLIENT", "AIOSHARD_COMPILE"}
"""Variables that are described and not set, that were removed, or that are options of a command or of the build."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_documented_variable_is_a_setting(page: Any) -> None:
    variables = {PREFIX + name.upper() for name in Settings.model_fields}

    named = set(re.findall(r"\bAIOSHARD_[A-Z_]*[A-Z]\b", page.read_text()))

    assert named - variables <= NO_SETTINGS


def test_a_documented_make_target_exists() -> None:
    named = {verb for page in PAGES for verb in re.findall(r"`make (\w+)", page.read_text())}

    assert {"demo", "test"} <= named <= set(re.findall(r"^(\w+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
