"""`aioshard check`, and resolving `MODULE:APP`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from aioshard.cli.main import COMMANDS, cli, main
from tests.support.paths import PROJECT

APP = """
from aioshard import App, DeadLetter, Router, Record

app = App("billing", bootstrap_servers="broker:9092", auto_offset_reset="earliest", commit_interval=0.5)

@app.consume("orders", "refunds", concurrency=8, timeout=2.5, on_failure=DeadLetter("orders.dlt"))
async def on_order(record: Record) -> None: ...

@app.consume(pattern="audit[.].*", shards=4, shard_by=lambda record: record.key)
def on_audit(record: Record) -> None: ...

@app.consume("invoices", run_in="process", concurrency=2)
def on_invoice(record: Record) -> None: ...

handlers = Router()
settings = app.settings
"""

Write = Callable[[str, str], None]
Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules into the current directory of the test; forgets them afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for variable in [name for name in os.environ if name.startswith("AIOSHARD_") and "TEST" not in name]:
        monkeypatch.delenv(variable)
    known = set(sys.modules)

    def write_module(name: str, source: str) -> None:
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(source)

    yield write_module
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs `aioshard check` and returns exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check", *arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


# A good app


def test_a_good_app_is_shown_with_its_handlers_and_settings(write: Write, check: Check) -> None:
    write("shop", APP)
    code, output, errors = check("shop:app")
    assert (code, errors) == (0, "")
    lines = [line.split() for line in output.splitlines()]
    order = "on_order orders, refunds Record key on demand 8 2.5 s dead letter: orders.dlt event loop"
    assert order.split() in lines
    assert ["on_audit", "/audit[.].*/", "Record", "<lambda>", "4", "4", "-", "halt", "threads"] in lines
    assert ["on_invoice", "invoices", "Record", "key", "on", "demand", "2", "-", "halt", "processes"] in lines
    assert ["commit_interval", "0.5", "seconds"] in lines
    assert not any(line[:1] == ["drain_timeout"] for line in lines)
    everything = [line.split() for line in check("shop:app", "--all")[1].splitlines()]
    assert ["drain_timeout", "20", "seconds"] in everything
    assert "Warning" not in output


def test_an_unimportable_process_handler_ends_with_2(write: Write, check: Check) -> None:
    write("shop", f"{APP}\non_invoice = print\n")
    code, _, errors = check("shop:app")
    assert code == 2
    assert "handler 'on_invoice' was given run_in='process' and cannot be sent to a worker process" in errors


def test_json_shows_the_same_as_text(write: Write, check: Check) -> None:
    write("shop", APP)
    code, output, _ = check("shop:app", "--json")
    found = json.loads(output)
    assert (code, found["ok"], found["group_id"], found["warnings"]) == (0, True, "billing", [])
    assert [handler["name"] for handler in found["handlers"]] == ["on_order", "on_audit", "on_invoice"]
    assert found["handlers"][0]["topics"] == ["orders", "refunds"]
    assert (found["handlers"][0]["timeout"], found["handlers"][0]["retry"]) == (2.5, 5)
    assert found["settings"]["commit_interval"] == 0.5


TYPED = """
import functools
from typing import Annotated, Any
from pydantic import BaseModel, Field
from aioshard import App, Batch, Record

app = App("billing", bootstrap_servers="broker:9092", auto_offset_reset="earliest")

class Order(BaseModel):
    total: int

class Refund(BaseModel):
    total: int

def with_the_key(record: Record, codec: str) -> Any: ...

@app.consume("orders")
async def on_order(order: Annotated[Order | Refund, Field()] | None) -> None: ...

@app.consume("lines", batch=Batch())
async def on_lines(lines: list[dict[str, Order]]) -> None: ...

@app.consume("raw", batch=Batch())
async def on_raw(records) -> None: ...

@app.consume("avro", decode=functools.partial(with_the_key, codec="avro"))
async def on_avro(order: tuple[str, Any]) -> None: ...

@app.consume("long")
async def on_long(one: dict[str, tuple[Order, Refund, Order, Refund, Order, Refund, Order, Refund]]) -> None: ...
"""


def test_the_payload_of_every_handler_is_shown(write: Write, check: Check) -> None:
    write("typed", TYPED)

    output = check("typed:app")[1]
    rows = {row[0]: row[2] for row in (re.split(r"  +", line) for line in output.splitlines()) if row[0][:3] == "on_"}
    handlers = json.loads(check("typed:app", "--json")[1])["handlers"]

    long = "dict[str, tuple[Order, Refund, Order, Refund, Order, Refund, Order, Refund]]"
    assert rows == {
        "on_order": "Order | Refund | None",
        "on_lines": "list[dict[str, Order]]",
        "on_raw": "list[Record]",
        "on_avro": "decoded by with_the_key()",
        "on_long": long[:47] + "…",
    }
    assert {handler["name"]: (handler["payload"], handler["decode"]) for handler in handlers} == {
        "on_order": ("Order | Refund | None", None),
        "on_lines": ("list[dict[str, Order]]", None),
        "on_raw": ("list[Record]", None),
        "on_avro": (None, "with_the_key"),
        "on_long": (long, None),
    }


def test_secrets_are_masked(write: Write, check: Check) -> None:
    write(
        "shop",
        APP.replace(
            "commit_interval=0.5",
            "security_protocol='SASL_SSL', sasl_mechanism='PLAIN', sasl_username='u', sasl_password='hunter2', "
            "client_options={'sasl_oauth_token_provider': 'hunter2'}",
        ),
    )
    for arguments in (["shop:app"], ["shop:app", "--all"], ["shop:app", "--json"]):
        code, output, errors = check(*arguments)
        assert code == 0
        assert "hunter2" not in output + errors
        assert "***" in output


@pytest.mark.parametrize(
    ("before", "after", "warning"),
    [
        ('bootstrap_servers="broker:9092", ', "", "bootstrap_servers is not set"),
        ('auto_offset_reset="earliest", ', "", "auto_offset_reset is not set"),
        (
            "commit_interval=0.5",
            "security_protocol='SASL_PLAINTEXT', sasl_mechanism='PLAIN', sasl_username='u', sasl_password='p'",
            "unencrypted",
        ),
    ],
)
def test_surprising_settings_give_a_warning(write: Write, check: Check, before: str, after: str, warning: str) -> None:
    assert before in APP
    write("shop", APP.replace(before, after))
    code, output, _ = check("shop:app")
    assert code == 0
    assert warning in output
    _, output, _ = check("shop:app", "--json")
    assert [warning in sentence for sentence in json.loads(output)["warnings"]] == [True]


def test_a_misspelled_variable_gives_a_warning(write: Write, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    write("shop", APP)
    monkeypatch.setenv("AIOSHARD_COMIT_INTERVAL", "3")
    _, output, _ = check("shop:app")
    assert "did you mean AIOSHARD_COMMIT_INTERVAL?" in output


# Refusals


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("shop:ap", "module 'shop' has no attribute 'ap': its apps are shop:app"),
        ("shop:zzz", "its apps are shop:app"),
        ("shop:app.zzz", "has no attribute 'app.zzz'"),
        ("shop:handlers", "is a Router, not an aioshard.App"),
        ("shop:on_order", "is a function, not an aioshard.App"),
        ("shop:App", "is a type, not an aioshard.App"),
        ("shop:settings", "is a Settings, not an aioshard.App"),
        ("shop", "names a module but no app in it: its apps are shop:app"),
        ("shop:", "names a module but no app in it"),
        ("shop.py:app", "names a file; use its module: shop:app"),
        ("src/shop.py", "names a file; use its module: src.shop:app"),
        ("shp:app", "module 'shp' not found: searched"),
        ("missing_entirely:app", "--app-dir adds a directory"),
        ("shop.billing:app", "module 'shop.billing' not found: searched"),
        ("pack.billin:app", "module 'pack.billin' not found: searched"),
        ("a b:app", "is not MODULE:APP"),
        ("shop:app:more", "has no attribute 'app:more'"),
        (":app", "is not MODULE:APP"),
    ],
)
def test_a_target_without_an_app_is_refused(write: Write, check: Check, target: str, sentence: str) -> None:
    write("shop", APP)
    write("pack.__init__", "")
    write("pack.billing", APP)
    code, output, errors = check(target)
    assert (code, output) == (2, "")
    assert sentence in errors
    assert "Traceback" not in errors


def test_a_refused_setting_names_the_line_of_the_app(write: Write, check: Check, tmp_path: Path) -> None:
    write("shop", APP.replace("commit_interval=0.5", "session_timeout=5, heartbeat_interval=3"))
    code, _, errors = check("shop:app")
    assert code == 2
    assert errors.startswith(f"Error: {tmp_path / 'shop.py'}:4: session_timeout=5 s is less than 3 times")


def test_assigned_partitions_without_a_handler_are_refused(write: Write, check: Check) -> None:
    write("service", APP.replace("commit_interval=0.5", "assign='orders:0,refunds:0'"))
    code, _, errors = check("service:app")
    assert code == 2
    assert "handler 'on_audit' has a pattern, which needs a consumer group" in errors


def test_a_refused_handler_names_the_line_of_the_app(write: Write, check: Check, tmp_path: Path) -> None:
    write("shop", APP.replace("concurrency=8", "concurrency=0"))
    code, _, errors = check("shop:app")
    assert code == 2
    assert errors.startswith(f"Error: {tmp_path / 'shop.py'}:6: concurrency=0 was refused")


def test_an_app_without_handlers_is_refused(write: Write, check: Check) -> None:
    write("shop", "from aioshard import App\napp = App('billing')\n")
    code, _, errors = check("shop:app")
    assert code == 2
    assert "has no handlers" in errors


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import os\n\nos.environ['NO_SUCH_VARIABLE']\n", "KeyError: 'NO_SUCH_VARIABLE'"),
        ("app = App(\n", "SyntaxError: '(' was never closed"),
    ],
)
def test_a_module_that_fails_shows_its_own_traceback_only(
    write: Write, check: Check, source: str, sentence: str
) -> None:
    write("shop", source)
    code, _, errors = check("shop:app")
    assert code == 1
    assert f"Error: module 'shop' failed during its import: {sentence}" in errors
    assert "shop.py" in errors
    assert "loading.py" not in errors
    assert "importlib" not in errors


def test_modules_are_imported_from_the_app_directory(write: Write, check: Check, tmp_path: Path) -> None:
    write("services.shop", APP)
    assert check("shop:app")[0] == 2
    assert check("shop:app", "--app-dir", str(tmp_path / "services"))[0] == 0


# The command line as a whole


@pytest.mark.parametrize(
    "arguments", [["--no-such-option"], ["no-such-command"], ["check"], ["check", "a:b", "--zzz"], []]
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "Usage: " in capsys.readouterr().err


def test_help_lists_every_command_without_importing_any() -> None:
    script = """
import sys
from aioshard.cli.main import main
try:
    main(["--help"])
finally:
    print(sorted(name for name in sys.modules if f"{name}.".startswith("aioshard.cli.")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "['aioshard.cli', 'aioshard.cli.main', 'aioshard.cli.output']"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_summaries_match_the_commands(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.get_short_help_str(200) == COMMANDS[name]


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "aioshard", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("aioshard ")


@pytest.mark.parametrize("arguments", [["--help"], ["check", "shop:app"], ["check", "shop:app", "--json"]])
def test_a_closed_pipe_prints_no_traceback(write: Write, tmp_path: Path, arguments: list[str]) -> None:
    write("shop", APP)
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "aioshard", *arguments]
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, env=environment, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_interruption_ends_with_130(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("shop", "raise KeyboardInterrupt\n")
    with pytest.raises(SystemExit) as ended:
        main(["check", "shop:app"])
    assert ended.value.code == 130
    assert "Traceback" not in capsys.readouterr().err
