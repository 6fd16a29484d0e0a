"""Typical mistakes of a new user: each ends with an exit code and an error that names the fix."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import PROJECT
from tests.support.subprocesses import DEADLINE, environment

APP = """
from aioshard import App, Context, Record

app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")

@app.consume("orders")
async def on_order(record: Record, context: Context) -> None: ...
"""
NO_VARIABLES: Mapping[str, str] = {}


class Mistake(NamedTuple):
    """A replacement in the app, and the facts that the sentence about it names."""

    before: str
    after: str
    facts: tuple[str, ...]


MISTAKES = {
    "no_group": Mistake('"billing", bootstrap_servers=', "bootstrap_servers=", (":4:", "group id", "App('billing')")),
    "misspelt_setting": Mistake(
        "bootstrap_servers=", "bootstrap_server=", (":4:", "'bootstrap_server'", "'bootstrap_servers'")
    ),
    "misspelt_option": Mistake(
        '("orders")',
        '("orders", concurency=3)',
        (":6:", "'concurency'", "'concurrency'", "shard_by", "timeout", "retry", "on_failure", "publish_to"),
    ),
    "no_parentheses": Mistake('("orders")', "", (":6:", "topic", "@app.consume('orders')")),
    "no_topic": Mistake('("orders")', "()", (":6:", "topic", "pattern", "@app.consume('orders')")),
    "list_of_topics": Mistake('"orders"', '["orders"]', (":6:", "['orders']", "@app.consume('orders', 'refunds')")),
    "no_context": Mistake(
        "context: Context", "context: int", (":6:", "'on_order'", "context: int", "annotate it with Context", "default")
    ),
    "generator": Mistake("None: ...", "None: yield", (":6:", "'on_order'", "'async def'", "without yield")),
    "no_parameter": Mistake(
        "record: Record, context: Context", "", (":6:", "'on_order'", "no parameter", "the record", "Context")
    ),
    "topic_twice": Mistake(
        "None: ...",
        "None: ...\n\n@app.consume('clicks', 'orders')\ndef on_click(record): ...",
        (":9:", "'orders'", "'on_order'", "'on_click'", "one handler", "another group id"),
    ),
    "scheme": Mistake(
        "localhost:9092",
        "http://localhost:9092",
        (":4:", "bootstrap_servers='http://localhost:9092'", "host:port", "scheme", "security_protocol"),
    ),
}
TARGETS = {
    "good.py": ("'good.py'", "module", "good:app"),
    "god:app": ("'god'", "not found", "--app-dir"),
    "good": ("'good'", "good:app"),
}
"""Wrong targets, and the facts that the sentences about them name."""

COMMANDS = """
import json, sys
from aioshard.cli.main import main
for arguments in json.load(sys.stdin):
    try:
        main(arguments)
    except SystemExit as ended:
        print("exit code", ended.code, file=sys.stderr)
"""
"""Runs one command after the other."""


class Ended(NamedTuple):
    code: int
    errors: str

    @property
    def sentence(self) -> str:
        """The one line that says what went wrong, which is the last one."""
        (sentence,) = re.findall(r"^Error: .+$", self.errors, re.MULTILINE)
        assert self.errors.endswith(f"{sentence}\n")
        return str(sentence)

    def lacks(self, *facts: str) -> list[str]:
        """The facts that the sentence does not name."""
        return [fact for fact in facts if fact not in self.sentence]


def run(
    directory: Path, *arguments: str, given: str | None = None, variables: Mapping[str, str] = NO_VARIABLES
) -> Ended:
    """Run Python with these arguments, and *given* on its standard input."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**environment(), "PYTHONPATH": str(PROJECT), **variables},
        input=given,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return Ended(done.returncode, done.stderr)


def run_app(directory: Path, source: str, *options: str, variables: Mapping[str, str] = NO_VARIABLES) -> Ended:
    (directory / "shop.py").write_text(source)
    return run(directory, "-m", "aioshard", "run", "shop:app", *options, variables=variables)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    """How the command on each mistake and each target ended; all share one process, because it starts slowly."""
    directory = tmp_path_factory.mktemp("mistakes")
    (directory / "good.py").write_text(APP)
    commands = {target: ["run", target] for target in TARGETS}
    for name, mistake in MISTAKES.items():
        assert mistake.before in APP
        (directory / f"{name}.py").write_text(APP.replace(mistake.before, mistake.after))
        commands[name] = ["check", f"{name}:app"]

    done = run(directory, "-c", COMMANDS, given=json.dumps(list(commands.values())))

    found = re.findall(r"((?:.*\n)*?)exit code (\d+)\n", done.errors)
    return {name: Ended(int(code), errors) for name, (errors, code) in zip(commands, found, strict=True)}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_definition_is_refused_with_its_line_and_the_fix(ended: Mapping[str, Ended], name: str) -> None:
    assert ended[name].code == 2
    assert ended[name].errors == f"{ended[name].sentence}\n"
    assert ended[name].lacks(f"{name}.py", *MISTAKES[name].facts) == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_is_not_an_app_is_refused_with_the_fix(ended: Mapping[str, Ended], target: str) -> None:
    assert ended[target].code == 2
    assert "Traceback" not in ended[target].errors
    assert ended[target].lacks(*TARGETS[target]) == []


def test_a_missing_broker_address_names_every_way_to_set_it(tmp_path: Path) -> None:
    without = run_app(tmp_path, APP.replace('bootstrap_servers="localhost:9092", ', ""))

    assert without.code == 2
    assert without.errors == f"{without.sentence}\n"
    places = "bootstrap_servers='localhost:9092'", "AIOSHARD_BOOTSTRAP_SERVERS=", "--bootstrap-servers "
    assert without.lacks(*places) == []


def test_an_unresponsive_broker_ends_with_1_and_its_address(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        unanswered = run_app(tmp_path, APP, "-b", address, variables={"AIOSHARD_START_TIMEOUT": "1"})

    assert unanswered.code == 1
    assert "Traceback" not in unanswered.errors
    facts = "start_timeout=1 s", f"bootstrap_servers={address}", "refused", "check the addresses"
    assert unanswered.lacks(*facts) == []


def test_a_module_that_raises_ends_with_1_and_its_own_traceback(tmp_path: Path) -> None:
    raised = run_app(tmp_path, "def connect():\n    raise OSError('no database')\n\nconnect()\n")

    assert raised.code == 1
    module = str(tmp_path / "shop.py")
    assert re.findall(r'^  File "(.+)", line (\d+)', raised.errors, re.MULTILINE) == [(module, "4"), (module, "2")]
    assert raised.lacks("'shop'", "import", "OSError", "no database") == []
