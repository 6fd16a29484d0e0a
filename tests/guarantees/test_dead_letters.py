"""After an outage, operators send dead letters back: one cause is fixed, one is left, and no record is sent twice."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aioshard import App, Context, DeadLetter, Record, Retry
from aioshard.dead_letters.audit import positions_as_text
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

GOOD, UNREACHABLE, OLD_FORMAT, NEGATIVE = 200, 900, 500, 600
PARTITIONS = 3
DEADLINE = 120.0
SENT = re.compile(r'(?:send|process) topic="[^"]*" records="([^"]*)" by user ')

MODULE = """
import os
import signal

from aioshard import App, Record
from aioshard.cli.main import main
from aioshard.dead_letters.sending import SendBack
from aioshard.kafka.transactions.messages import MessageWriter

SendBack.most_records = 50

if "KILLED_IN" in os.environ:
    write = MessageWriter.write
    transactions = iter(range(1, 100))

    async def write_and_be_killed(*arguments):
        await write(*arguments)
        if next(transactions) == int(os.environ["KILLED_IN"]):
            os.kill(os.getpid(), signal.SIGKILL)

    MessageWriter.write = write_and_be_killed

app = App("GROUP", auto_offset_reset="earliest")

@app.consume("TOPIC", publish_to="TOPIC.invoices")
async def on_order(record: Record) -> bytes:
    number, _, kind = record.value.partition(b" ")
    if kind in (b"old-format", b"negative"):
        raise ValueError(kind.decode())
    return number

def convert(record: Record) -> bytes | None:
    number, _, kind = record.value.partition(b" ")
    return number + b" converted" if kind == b"old-format" else None

if __name__ == "__main__":
    main()
"""


class Shop:
    """An app that fails for three reasons, and the operators' commands."""

    def __init__(self, kafka: SharedKafka, topic: str, directory: Path) -> None:
        self.kafka = kafka
        self.topic = topic
        self.letters = f"{topic}.dlt"
        self.outage = True
        self.processed: Counter[bytes] = Counter()
        self.errors: list[str] = []
        """The standard error of the commands, with the audit log."""
        self._directory = directory
        (directory / "operations.py").write_text(MODULE.replace("TOPIC", topic).replace("GROUP", topic))

    def app(self) -> App:
        made = App(self.topic, bootstrap_servers=self.kafka.bootstrap, auto_offset_reset="earliest")

        @made.consume(
            self.topic, retry=Retry(attempts=1), on_failure=DeadLetter(self.letters, breaker=None), publish_to=None
        )
        async def on_order(record: Record, _: Context) -> None:
            kind = (record.value or b"").partition(b" ")[2]
            if kind == b"unreachable" and self.outage:
                raise ConnectionError("no route to the back end")
            if kind == b"old-format":
                raise KeyError("currency")
            if kind == b"negative":
                raise ValueError("negative total")
            self.processed[record.value or b""] += 1

        return made

    async def command(self, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        """`aioshard dlt`, with transactions of 50 records."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "operations.py", "dlt", arguments[0], self.letters, *arguments[1:]),
            *("--bootstrap-servers", self.kafka.bootstrap),
            cwd=self._directory,
            env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def ended(self, process: asyncio.subprocess.Process, *codes: int) -> Any:
        """The output of a command, which has ended with one of these codes."""
        try:
            async with asyncio.timeout(DEADLINE):
                output, errors = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self.errors.append(errors.decode())
        assert process.returncode in codes, errors
        return json.loads(output) if output else None

    async def run(self, *arguments: str) -> Any:
        return await self.ended(await self.command(*arguments, "--json"), 0)

    async def consume_all(self) -> None:
        """Run the app until it has consumed everything that is in its topic now."""
        async with asyncio.timeout(DEADLINE):
            await self.app().serve(until_caught_up=True)

    async def sent_back(self) -> Counter[bytes]:
        """How often readers of committed records see each dead letter in the topic, by its position."""
        return Counter(
            content or b""
            for found in await self.kafka.read(self.topic)
            for name, content in found.headers
            if name == "aioshard.replayed"
        )


@pytest.fixture
async def shop(kafka: SharedKafka, topic: str, tmp_path: Path) -> Shop:
    made = Shop(kafka, topic, tmp_path)
    for name in (topic, made.letters):
        await kafka.create_topic(name, PARTITIONS, {"retention.ms": "-1"})
    kinds = {b"good": GOOD, b"unreachable": UNREACHABLE, b"old-format": OLD_FORMAT, b"negative": NEGATIVE}
    values = [b"%d %s" % (number, kind) for kind, count in kinds.items() for number in range(count)]
    await kafka.produce(topic, [(b"key-%d" % (number % 50), value) for number, value in enumerate(values)])
    await made.consume_all()
    made.outage = False
    return made


@pytest.mark.timeout(300)
async def test_operators_send_back_what_is_fixed_and_no_record_twice(shop: Shop) -> None:
    # 1. Find: three causes.
    summary = (await shop.run("show", "--limit", "0"))["summary"]
    assert summary["selected"] == 2000
    assert summary["errors"] == {"ConnectionError": UNREACHABLE, "KeyError": OLD_FORMAT, "ValueError": NEGATIVE}

    # 2. Try the fix of one cause: nothing is published or done.
    old_format = ("--error", "KeyError", "--transform", "operations:convert")
    tried = (await shop.run("try", "--app", "operations:app", *old_format, "--limit", "30", "--yes"))["tried"]
    assert [(one["succeeded"], len(one["messages"])) for one in tried] == [(True, 1)] * 30
    previewed = await shop.run("replay", *old_format, "--dry-run")
    assert (previewed["selected"], previewed["changed"], previewed["failed"]) == (OLD_FORMAT, OLD_FORMAT, [])
    assert await shop.sent_back() == {}
    assert (await shop.run("show", "--limit", "0"))["summary"]["replayed"] == 0

    # 3. Send it back: the command is killed in its fourth transaction, and started again.
    killed = await shop.command("replay", *old_format, "--yes", KILLED_IN="4")
    await shop.ended(killed, -signal.SIGKILL)
    assert (await shop.run("show", "--error", "KeyError", "--limit", "0"))["summary"]["replayed"] == 150
    continued = await shop.run("replay", *old_format, "--yes")
    assert continued["done"] == {shop.topic: OLD_FORMAT - 150}

    # 4. Two operators send the second cause at the same time: one of them takes over from the other.
    unreachable = ("replay", "--error", "ConnectionError", "--yes", "--json")
    senders = [await shop.command(*unreachable) for _ in range(2)]
    reports = [await shop.ended(sender, 0, 4) for sender in senders]
    assert sum(report["done"].get(shop.topic, 0) for report in reports) == UNREACHABLE

    # 5. Each of the 1,400 was sent once, the third cause is left, and the audit log has every change.
    places = await _places(shop)
    assert len(places) == UNREACHABLE + OLD_FORMAT
    sent_back = await shop.sent_back()
    assert sent_back == Counter(f"{shop.letters}/{partition}/{offset}".encode() for partition, offset in places)
    due = (await shop.run("show"))["dead_letters"]
    assert Counter((letter["error"], letter["replayed"]) for letter in due)["ValueError", False] == NEGATIVE
    assert _audited(shop) == places

    # 6. The app processes each of them once.
    shop.processed.clear()
    await shop.consume_all()
    numbers = [*(b"%d unreachable" % number for number in range(UNREACHABLE))]
    numbers += [b"%d converted" % number for number in range(OLD_FORMAT)]
    assert shop.processed == Counter(numbers)


async def _places(shop: Shop) -> set[tuple[int, int]]:
    """The dead letters that are done."""
    letters = (await shop.run("show"))["dead_letters"]
    return {(letter["partition"], letter["offset"]) for letter in letters if letter["replayed"]}


def _audited(shop: Shop) -> set[tuple[int, int]]:
    """The dead letters in the audit log of all commands."""
    found: set[tuple[int, int]] = set()
    for records in SENT.findall("\n".join(shop.errors)):
        for part in filter(None, records.split(",")):
            partition, _, offsets = part.partition("/")
            first, _, last = offsets.partition("-")
            found |= {(int(partition), offset) for offset in range(int(first), int(last or first) + 1)}
    assert positions_as_text(found)
    return found
