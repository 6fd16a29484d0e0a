"""`aioshard dlt`: find, try, transform and send dead letters, with a preview and a confirmation."""

import asyncio
import contextlib
import json
import os
import pty
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aioshard.records import Record
from aioshard.serde.side_records import dead_letter
from tests.support.brokers import SharedKafka
from tests.support.dead_letters import failure, record, write
from tests.support.paths import PROJECT

Aioshard = Callable[..., Awaitable[Any]]

DEADLINE = 60.0

APP = """
import contextlib

from pydantic import BaseModel

from aioshard import App, Record, message

class Order(BaseModel):
    total: int

@contextlib.asynccontextmanager
async def resources(app):
    yield "the state"

app = App("billing", auto_offset_reset="error", resources=resources)

@app.consume("SOURCE", publish_to="SOURCE-invoices")
async def on_order(order: Order) -> dict[str, int]:
    assert app.state == "the state"
    if order.total < 0:
        raise ValueError("negative")
    await app.publish("SOURCE-mails", "mail", key="alice", headers={"kind": "invoice"})
    return {"total": order.total}

def move(record: Record) -> object:
    return message("SOURCE-mails", record.value, key="elsewhere")

def fix(record: Record) -> object:
    if record.value == b"unfixable":
        raise KeyError("total")
    if record.value == b"leave":
        return None
    return Order(total=int(record.value))
"""


class Ended(NamedTuple):
    code: int
    output: str
    errors: str

    @property
    def report(self) -> Any:
        return json.loads(self.output)


class Workbench:
    """Dead letters of a topic, and the command in a subprocess, because it imports a module and sets up logging."""

    def __init__(self, kafka: SharedKafka, source: str, directory: Path) -> None:
        self.kafka = kafka
        self.source = source
        self.topic = f"{source}.dlt"
        self._directory = directory

    async def write(self, *values: bytes, **fields: Any) -> None:
        """Write a dead letter for each value; its offset is the number of its record."""
        originals = [record(number, topic=self.source, value=value, **fields) for number, value in enumerate(values)]
        letters = [dead_letter(self.topic, original, failure(original.offset)) for original in originals]
        await write(self.kafka.bootstrap, [letter._replace(partition=0) for letter in letters])

    async def run(self, *arguments: str, code: int = 0, stdin: int = asyncio.subprocess.DEVNULL) -> Ended:
        """`aioshard dlt` with a topic after its first argument."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "aioshard", "dlt", arguments[0], self.topic, *arguments[1:]),
            *("--bootstrap-servers", self.kafka.bootstrap),
            cwd=self._directory,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(DEADLINE):
                output, errors = await process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
            raise
        assert process.returncode == code, (output, errors)
        return Ended(code, output.decode(), errors.decode())

    async def arrived(self) -> list[Record]:
        return await self.kafka.read(self.source)

    async def due(self) -> list[int]:
        report = (await self.run("show", "--json")).report
        return [letter["offset"] for letter in report["dead_letters"] if not letter["replayed"]]


@pytest.fixture
async def workbench(kafka: SharedKafka, topic: str, tmp_path: Path) -> Workbench:
    (tmp_path / "shop.py").write_text(APP.replace("SOURCE", topic))
    for name in (topic, f"{topic}.dlt", f"{topic}-invoices", f"{topic}-mails"):
        await kafka.create_topic(name, 1, {"retention.ms": "-1"})
    return Workbench(kafka, topic, tmp_path)


# Trying


async def test_try_shows_what_handlers_would_publish_and_changes_nothing(workbench: Workbench) -> None:
    await workbench.write(b'{"total": 7}', b'{"total": -1}', b"x")

    ended = await workbench.run("try", "--app", "shop:app", "--yes", "--json", code=3)

    good, negative, undecodable = ended.report["tried"]
    assert (good["succeeded"], good["result"]) == (True, {"total": 7})
    assert sorted(good["messages"], key=lambda sent: sent["topic"]) == [
        {
            "topic": f"{workbench.source}-invoices",
            "partition": None,
            "key": "alice",
            "value": '{"total":7}',
            "headers": [],
        },
        {
            "topic": f"{workbench.source}-mails",
            "partition": None,
            "key": "alice",
            "value": "mail",
            "headers": [["kind", "invoice"]],
        },
    ]
    assert (negative["succeeded"], negative["error"], negative["messages"]) == (False, "ValueError: negative", [])
    assert undecodable["error"].startswith("DecodeError: ")
    assert await workbench.due() == [0, 1, 2]
    for topic in ("", "-invoices", "-mails"):
        assert await workbench.kafka.read(f"{workbench.source}{topic}") == []


async def test_try_with_a_transform_shows_whether_it_helps(workbench: Workbench) -> None:
    await workbench.write(b"7", b"leave", b"unfixable")

    ended = await workbench.run("try", "--app", "shop:app", "--transform", "shop:fix", "--yes", "--json", code=3)

    changed, left, failed = ended.report["tried"]
    assert (changed["succeeded"], changed["value"]) == (True, '{"total":7}')
    assert (left["left"], left["succeeded"], left["error"]) == (True, False, None)
    assert failed["error"] == "the transform failed: KeyError: 'total'"
    text = (await workbench.run("try", "--app", "shop:app", "--transform", "shop:fix", "--yes", code=3)).output
    assert text.count('{"total":7}') == 1 + 1  # the changed value, and the message that its handler would publish


async def test_try_runs_a_limited_number(workbench: Workbench) -> None:
    await workbench.write(*[b'{"total": 1}'] * 30)

    default = await workbench.run("try", "--app", "shop:app", "--yes", "--json")
    limited = await workbench.run("try", "--app", "shop:app", "--yes", "--limit", "3")

    assert len(default.report["tried"]) == 20
    assert default.report["beyond_limit"] == 10
    assert "27 more are due" in limited.output
    assert limited.output.splitlines()[0].startswith("3 dead letters would succeed")
    assert sum("(dead letter " in line for line in limited.output.splitlines()) == 3


# Sending


async def test_a_transform_changes_what_is_sent(workbench: Workbench) -> None:
    await workbench.write(b"7", b"leave", b"unfixable", b"8")

    ended = await workbench.run("replay", "--transform", "shop:fix", "--yes", "--json", code=3)

    assert ended.report["done"] == {workbench.source: 2}
    assert (ended.report["edited"], ended.report["left"]) == (2, 1)
    (failed,) = ended.report["failed"]
    assert failed == {
        "record": f"{workbench.source}/0/2",
        "dead_letter": f"{workbench.topic}/0/2",
        "error": "the transform failed: KeyError: 'total'",
    }
    assert [(found.value, found.key) for found in await workbench.arrived()] == [
        (b'{"total":7}', b"alice"),
        (b'{"total":8}', b"alice"),
    ]
    assert await workbench.due() == [1, 2]
    assert f'send topic="{workbench.topic}" records="0/0,0/3" by user ' in ended.errors
    assert "2 of them edited" in ended.errors


async def test_handlers_run_on_changed_records(workbench: Workbench) -> None:
    await workbench.write(b"7", b"leave", b"unfixable")

    ended = await workbench.run("replay", "--app", "shop:app", "--transform", "shop:fix", "--yes", "--json", code=3)

    assert ended.report["done"] == {workbench.source: 1}
    assert [found.value for found in await workbench.kafka.read(f"{workbench.source}-invoices")] == [b'{"total":7}']
    assert await workbench.arrived() == []
    assert await workbench.due() == [1, 2]


async def test_handlers_do_not_run_on_messages_for_other_topics(workbench: Workbench) -> None:
    await workbench.write(b"7")

    refused = await workbench.run("replay", "--app", "shop:app", "--transform", "shop:move", "--yes", code=2)
    sent = await workbench.run("replay", "--transform", "shop:move", "--yes", "--json")

    assert "send it back instead" in " ".join(refused.errors.split())
    assert sent.report["done"] == {workbench.source: 1}
    (moved,) = await workbench.kafka.read(f"{workbench.source}-mails")
    assert (moved.key, moved.value) == (b"elsewhere", b"7")
    assert await workbench.due() == []


async def test_dead_letters_are_selected_by_their_positions(workbench: Workbench) -> None:
    await workbench.write(b"0", b"1", b"2", b"3")

    await workbench.run("replay", "--at", f"{workbench.topic}/0/3", "--at", f"{workbench.topic}/0/1", "--yes")

    assert [found.value for found in await workbench.arrived()] == [b"1", b"3"]
    assert await workbench.due() == [0, 2]
    refused = await workbench.run("replay", "--at", f"{workbench.source}/0/1", "--yes", code=2)
    assert f"--at {workbench.source}/0/1 is not in {workbench.topic}" in " ".join(refused.errors.split())


async def test_one_dead_letter_gets_a_new_value(workbench: Workbench, tmp_path: Path) -> None:
    await workbench.write(b"0", b"1", b"2")
    (tmp_path / "value").write_bytes(b"\xff\x00")

    await workbench.run("replay", "--at", f"{workbench.topic}/0/1", "--value", '{"total": 1}', "--yes")
    await workbench.run("replay", "--at", f"{workbench.topic}/0/2", "--value-file", "value", "--yes")
    refused = await workbench.run("replay", "--again", "--value", "x", "--yes", code=2)

    assert "3 match" in " ".join(refused.errors.split())
    assert [found.value for found in await workbench.arrived()] == [b'{"total": 1}', b"\xff\x00"]
    assert await workbench.due() == [0]


async def test_a_dry_run_sends_nothing(workbench: Workbench) -> None:
    await workbench.write(b"7", b"leave", b"unfixable")

    plain = await workbench.run("replay", "--dry-run", "--json")
    changed = await workbench.run("replay", "--dry-run", "--transform", "shop:fix", "--json")

    assert plain.report == {
        "topic": workbench.topic,
        "dry_run": True,
        "selected": 3,
        "replayed": 0,
        "beyond_limit": 0,
        "topics": {workbench.source: 3},
        "errors": {"ValueError": 3},
    }
    assert (changed.report["changed"], changed.report["left"], len(changed.report["failed"])) == (1, 1, 1)
    assert await workbench.arrived() == []
    assert await workbench.due() == [0, 1, 2]


async def test_dead_letters_that_are_given_up_are_done_and_send_nothing(workbench: Workbench) -> None:
    await workbench.write(b"0", b"1", b"2", b"3")
    some = [option for offset in (1, 3) for option in ("--at", f"{workbench.topic}/0/{offset}")]

    planned = await workbench.run("finish", *some, "--dry-run", "--json")
    due_before = await workbench.due()
    finished = await workbench.run("finish", *some, "--yes", "--json")
    again = await workbench.run("finish", *some, "--yes")

    assert (planned.report["selected"], due_before) == (2, [0, 1, 2, 3])
    assert finished.report["done"] == {workbench.source: 2}
    assert finished.errors.count("finish topic=") == 1
    assert "2 dead letters are done already" in again.output
    assert "--again" not in again.output
    assert await workbench.due() == [0, 2]
    assert await workbench.arrived() == []
    sent = await workbench.run("replay", "--again", "--yes", "--json")
    assert sent.report["done"] == {workbench.source: 4}


@pytest.mark.parametrize(
    "arguments", [("replay",), ("finish",), ("replay", "--app", "shop:app"), ("try", "--app", "shop:app")]
)
async def test_nothing_is_done_without_a_confirmation(workbench: Workbench, arguments: tuple[str, ...]) -> None:
    await workbench.write(b'{"total": 1}')

    refused = await workbench.run(*arguments, code=2)

    assert "give --yes" in " ".join(refused.errors.split())
    assert "1 dead letter" in refused.errors
    assert await workbench.arrived() == []
    assert await workbench.due() == [0]


@pytest.mark.parametrize(("answer", "arrived"), [(b"y\n", [b"7"]), (b"n\n", []), (b"\n", [])])
async def test_an_operator_confirms_the_number(workbench: Workbench, answer: bytes, arrived: list[bytes]) -> None:
    await workbench.write(b"7")
    terminal, stdin = pty.openpty()
    try:
        os.write(terminal, answer)

        ended = await workbench.run("replay", stdin=stdin)
    finally:
        os.close(terminal)
        os.close(stdin)

    assert "Send 1 dead letter" in ended.errors
    assert [found.value for found in await workbench.arrived()] == arrived


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("shop", "'shop' is not MODULE:FUNCTION"),
        ("shop:missing", "has no attribute 'missing'"),
        ("shop:app", "'shop:app' is of type App, not a function"),
        ("missing:fix", "module 'missing' not found"),
    ],
)
async def test_a_transform_that_does_not_exist_is_refused(workbench: Workbench, target: str, sentence: str) -> None:
    refused = await workbench.run("replay", "--transform", target, "--yes", code=2)

    assert sentence in " ".join(refused.errors.replace("│", "").split())


# Showing


async def test_values_are_decoded_as_the_handlers_do(workbench: Workbench) -> None:
    await workbench.write(b'{"total": "7"}', b'{"total": []}')

    report = (await workbench.run("show", "--app", "shop:app", "--json")).report
    table = (await workbench.run("show", "--app", "shop:app")).output

    good, bad = (letter["decoded"] for letter in report["dead_letters"])
    assert good == {"handler": "on_order", "type": "Order", "value": {"total": 7}, "faults": []}
    assert [fault["location"] for fault in bad["faults"]] == ["total"]
    assert '{"total": 7}' in table
    assert "total: Input should be a valid integer" in table


async def test_a_single_dead_letter_is_shown_in_full(workbench: Workbench) -> None:
    """The table cuts its cells."""
    value = b'{"total": "' + b"x" * 200 + b'"}'
    await workbench.write(value, b'{"total": 1}', headers=(("tenant", b"acme"),))

    lines = (await workbench.run("show", "--at", f"{workbench.topic}/0/0", "--app", "shop:app")).output.splitlines()
    table = (await workbench.run("show", "--limit", "1")).output

    details = dict(line.strip().split(": ", 1) for line in lines if line.startswith("  "))
    assert details["value"] == value.decode()
    assert details["header tenant"] == "acme"
    assert details["not decoded"].startswith("total: ")
    assert "header tenant" not in table


async def test_headers_and_text_select_dead_letters(workbench: Workbench) -> None:
    await workbench.write(b"apple pie", b"cherry pie", headers=(("tenant", b"acme"),))

    async def shown(*filters: str) -> list[int]:
        report = (await workbench.run("show", *filters, "--json")).report
        return [letter["offset"] for letter in report["dead_letters"]]

    assert await shown("--header", "tenant=acme", "--text", "cherry") == [1]
    assert await shown("--header", "tenant") == [0, 1]
    assert await shown("--header", "tenant=other") == []
    assert await shown("--text", "such customer") == [0, 1]
    assert await shown("--at", f"{workbench.topic}/0/1") == [1]


async def test_a_long_topic_is_shown_page_by_page(workbench: Workbench) -> None:
    await workbench.write(*(b"%d" % number for number in range(5)))
    shown: list[int] = []
    cursor = "newest"

    while cursor is not None:
        report = (await workbench.run("show", "--page", cursor, "--limit", "2", "--json")).report
        shown += [letter["offset"] for letter in report["dead_letters"]]
        cursor = report["cursor"]

    assert shown == [4, 3, 2, 1, 0]
    table = (await workbench.run("show", "--page", "0:3", "--limit", "2")).output
    assert table.splitlines()[-1] == "Older ones: --page 0:1"
    refused = await workbench.run("show", "--page", "older", code=2)
    assert "'older' is not a cursor" in " ".join(refused.errors.split())
