"""`aioshard dlt replay --app`: handlers run in process and in order, and failures stay dead letters."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aioshard.records import Record
from aioshard.serde.side_records import Failure, dead_letter
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

Aioshard = Callable[..., Awaitable[Any]]
Publish = Callable[..., Awaitable[list[tuple[int, int]]]]

DEADLINE = 60.0

APP = """
import asyncio
import contextlib
import os
import signal
import sys

from aioshard import App, Batch, BatchError, Context, DeadLetter, Record, Retry

BAD = set(os.environ["BAD"].split())

@contextlib.asynccontextmanager
async def resources(app):
    print("open", flush=True)
    yield "the state"
    print("closed", flush=True)

app = App("billing", auto_offset_reset="error", resources=resources)

@app.consume("SOURCE", retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter("elsewhere"), timeout=0.5,
             max_age=60.0, keep="latest")
async def on_order(record: Record, context: Context) -> None:
    name = record.value.decode()
    print("run", record.partition, record.offset, name, context.attempt, flush=True)
    if name == "hang":
        await asyncio.sleep(60)
    if name == "slow":
        await asyncio.sleep(0.3)
    if name == "swallow":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
    if name in BAD:
        raise ValueError(f"bad {name}")
    assert context.state == "the state"
    await app.publish("SOURCE-done", record.value, key=record.key)

@app.consume("SOURCE-batches", retry=Retry(attempts=2, initial=0.01), on_failure="skip", batch=Batch(10, linger=0.1))
async def on_batch(records: list[Record]) -> None:
    print("batch", [record.value.decode() for record in records], flush=True)
    errors = {record: ValueError("bad") for record in records if record.value.decode() in BAD}
    if errors:
        raise BatchError(errors)

@app.consume("SOURCE-plain", retry=Retry(attempts=1), on_failure="skip")
def on_plain(record: Record) -> None:
    sys.stdout.write(f"plain {record.value.decode()}\\n")  # one write: two threads may be here
    if record.value.decode() in BAD:
        raise ValueError("bad")
"""


class Ended(NamedTuple):
    code: int
    lines: list[str]
    errors: str


class InPlace:
    """Dead letters of the topic "source", and the command that runs the app on them."""

    def __init__(self, kafka: SharedKafka, aioshard: Aioshard, publish: Publish, source: str, directory: Path) -> None:
        self.kafka = kafka
        self.source = source
        self.topic = f"{source}.dlt"
        self._aioshard = aioshard
        self._publish = publish
        self._directory = directory

    async def write(self, *names: str, key: bytes | None = b"k", group: str = "billing", **place: Any) -> None:
        """Writes a dead letter for each name, which is the value of its record, "offset:name" where it says so."""
        for number, name in enumerate(names):
            offset, _, value = name.rpartition(":")
            record = Record(
                place.get("topic", self.source),
                place.get("partition", 0),
                int(offset or number),
                key,
                value.encode(),
                (),
                1.6e9,
            )
            why = Failure(group, "on_order", 5, "ValueError", "bad", 1.7e9)
            await self._publish(dead_letter(self.topic, record, why)._replace(partition=0))

    async def start(self, *options: str, bad: str = "") -> asyncio.subprocess.Process:
        """Start `aioshard dlt replay --app`, in a subprocess, because it sets up logging."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "aioshard", "dlt", "replay", self.topic, "--yes", "--app", "module:app", *options),
            *("--bootstrap-servers", self.kafka.bootstrap),
            cwd=self._directory,
            env={**os.environ, "BAD": bad, "PYTHONPATH": str(PROJECT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *options: str, bad: str = "", code: int = 0) -> Ended:
        """`aioshard dlt replay --app`."""
        return await self.ended(await self.start(*options, bad=bad), code)

    async def ended(self, process: asyncio.subprocess.Process, code: int) -> Ended:
        try:
            async with asyncio.timeout(DEADLINE):
                output, errors = await process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
            raise
        assert process.returncode == code, (output, errors)
        return Ended(code, output.decode().splitlines(), errors.decode())

    async def due(self) -> set[str]:
        """The values of the dead letters that are not done."""
        ended = await self._aioshard("dlt", "show", self.topic, "--json", "--bootstrap-servers", self.kafka.bootstrap)
        return {entry["record"]["value"] for entry in json.loads(ended.output)["dead_letters"] if not entry["replayed"]}


@pytest.fixture
async def in_place(kafka: SharedKafka, aioshard: Aioshard, publish: Publish, topic: str, tmp_path: Path) -> InPlace:
    (tmp_path / "module.py").write_text(APP.replace("SOURCE", topic))
    await kafka.create_topic(f"{topic}-done", 1)
    await kafka.create_topic(f"{topic}.dlt", 1, {"retention.ms": "-1"})
    return InPlace(kafka, aioshard, publish, topic, tmp_path)


async def test_replay_in_process_runs_handlers_in_order_and_publishes_their_messages(
    in_place: InPlace, kafka: SharedKafka
) -> None:
    """With the resources of the app, once for all; nothing is sent to the topic that the records came from."""
    await in_place.write("8:c", "2:a", "5:b", partition=3)

    ended = await in_place.run()

    assert ended.lines == [
        "open",
        "run 3 2 a 1",
        "run 3 5 b 1",
        "run 3 8 c 1",
        "closed",
        f"3 dead letters were processed: {in_place.source} 3",
    ]
    (audited,) = ended.errors.splitlines()
    assert f'process topic="{in_place.topic}" records="0/0-2" by user ' in audited
    assert [record.value for record in await kafka.read(f"{in_place.source}-done")] == [b"a", b"b", b"c"]
    assert await in_place.due() == set()


async def test_processed_dead_letters_are_not_processed_again(in_place: InPlace) -> None:
    await in_place.write("0:a", "1:b")
    await in_place.run("--record", f"{in_place.source}/0/0")

    ended = await in_place.run()

    assert [line for line in ended.lines if line.startswith("run")] == ["run 0 1 b 1"]


async def test_a_dead_letter_that_fails_again_stays_due_with_its_followers(
    in_place: InPlace, kafka: SharedKafka
) -> None:
    """Nothing is sent to the dead-letter topic of the handler: it is a dead letter already."""
    await in_place.write("0:a", "1:b", "2:c", key=b"first")
    await in_place.write("3:d", "4:e", key=b"second")

    ended = await in_place.run(bad="b", code=3)

    ran = [line for line in ended.lines if line.startswith("run")]
    assert sorted(ran) == ["run 0 0 a 1", "run 0 1 b 1", "run 0 1 b 2", "run 0 3 d 1", "run 0 4 e 1"]
    assert ended.lines[-1] == f"3 dead letters were processed: {in_place.source} 3"
    assert ended.errors.splitlines()[2:] == [
        f"Failed: {in_place.source}/0/1 (dead letter {in_place.topic}/0/1): ValueError: bad b (2 attempts)",
        (f"Failed: {in_place.source}/0/2 (dead letter {in_place.topic}/0/2): an older dead letter of its key failed"),
    ]
    assert await in_place.due() == {"b", "c"}
    assert len(await kafka.read(in_place.topic)) == 5

    ended = await in_place.run()

    assert [line for line in ended.lines if line.startswith("run")] == ["run 0 1 b 1", "run 0 2 c 1"]
    assert await in_place.due() == set()


async def test_a_hanging_handler_times_out(in_place: InPlace) -> None:
    """Also one that swallows the cancellation: its effects are unknown."""
    await in_place.write("0:hang", key=b"one")
    await in_place.write("1:swallow", key=b"two")
    await in_place.write("2:a", key=b"three")

    ended = await in_place.run("--json", code=3)

    report = json.loads(ended.lines[-1])
    assert report["done"] == {in_place.source: 1}
    assert [failure["record"] for failure in report["failed"]] == [f"{in_place.source}/0/0", f"{in_place.source}/0/1"]
    assert "TimeoutError" in report["failed"][0]["error"]
    assert await in_place.due() == {"hang", "swallow"}


@pytest.mark.chaos
async def test_batch_handlers_and_plain_functions_run_too(in_place: InPlace) -> None:
    await in_place.write("0:a", "1:b", "2:c", key=None, topic=f"{in_place.source}-batches")
    await in_place.write("3:d", "4:e", key=None, topic=f"{in_place.source}-plain")

    ended = await in_place.run(bad="b e", code=3)

    assert sum(line.startswith("plain") for line in ended.lines) == 2
    assert any(line.startswith("batch") for line in ended.lines)
    assert await in_place.due() == {"b", "e"}


@pytest.mark.chaos
async def test_dead_letters_of_other_groups_are_skipped(in_place: InPlace) -> None:
    await in_place.write("0:a")
    await in_place.write("1:b", group="accounts")

    ended = await in_place.run()

    assert [line for line in ended.lines if line.startswith("run")] == ["run 0 0 a 1"]
    assert await in_place.due() == {"b"}
    refused = await in_place.run("--group", "accounts", code=2)
    assert "--group accounts was given, but the handlers of --app module:app belong to 'billing'" in " ".join(
        refused.errors.split()
    )


async def test_a_topic_without_a_handler_is_refused_before_anything_runs(in_place: InPlace) -> None:
    await in_place.write("0:a")
    await in_place.write("1:b", topic="unknown")

    ended = await in_place.run(code=2)

    assert ended.lines == []
    assert "the app has no handler for topic 'unknown'" in " ".join(ended.errors.split())
    done = await in_place.run("--topic", in_place.source)
    assert done.lines[-1] == f"1 dead letter was processed: {in_place.source} 1"


async def test_an_interrupted_run_finishes_the_handlers_that_run_and_keeps_the_rest_due(in_place: InPlace) -> None:
    await in_place.write(*(f"{number}:slow" for number in range(5)))
    process = await in_place.start()
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE):
        while not (await process.stdout.readline()).startswith(b"run"):
            pass

    process.send_signal(signal.SIGINT)
    ended = await in_place.ended(process, 130)

    assert f"1 dead letter was processed: {in_place.source} 1" in ended.errors
    assert "Stopped: 4 dead letters of this run stay due" in ended.errors
    done = await in_place.run("--json")
    assert json.loads(done.lines[-1])["done"] == {in_place.source: 4}


async def test_an_app_with_exactly_once_processing_publishes_its_messages(
    in_place: InPlace, kafka: SharedKafka, tmp_path: Path
) -> None:
    """Its transactions would write to the input, which is in memory."""
    await in_place.write("0:a")
    module = tmp_path / "module.py"
    options = 'auto_offset_reset="error", processing_guarantee="exactly_once"'
    module.write_text(
        module.read_text()
        .replace('auto_offset_reset="error"', options)
        .replace("await app.publish(", "await context.publish(")
    )

    await in_place.run()

    assert [record.value for record in await kafka.read(f"{in_place.source}-done")] == [b"a"]
    assert await in_place.due() == set()


async def test_an_app_that_cannot_start_is_a_clear_error(in_place: InPlace, tmp_path: Path) -> None:
    await in_place.write("0:a")
    module = tmp_path / "module.py"
    module.write_text(module.read_text().replace('yield "the state"', 'raise RuntimeError("no database"); yield'))

    ended = await in_place.run(code=1)

    assert "no database" in ended.errors
    assert await in_place.due() == {"a"}
