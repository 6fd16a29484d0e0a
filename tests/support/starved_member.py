"""Program: an app whose process a test starves of CPU or stops, and that reports what it says about its event loop.

Standard output has one JSON object per line: `ready`; `log` for each line about the event loop; `explained` for
explanations that blame code for the event loop, or say that it is blocked; and `ended`. It ends when its standard
input is closed.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator

from aioshard import App, Record
from aioshard.testing import TestClient

handlers_that = sys.argv[1]
"""`await`, `sleep` or `compute`."""
core = int(sys.argv[2])
"""The only core that the process uses; -1 for all."""
niceness = int(sys.argv[3])
"""How little of it the process gets if another one uses it, from 0 for half to 19 for a hundredth."""
bootstrap, topic, group = sys.argv[4:7] if len(sys.argv) > 4 else (None, "orders", "starved")
"""The broker; None for the in-memory broker."""
BLOCKS_AT = 20
"""Offset of the record whose handler sleeps or computes."""


def say(kind: str, **fields: object) -> None:
    """Report to the test."""
    os.write(1, json.dumps({"kind": kind, **fields}).encode() + b"\n")  # whole, from any thread


class Reporter(logging.Handler):
    """Reports the lines about the event loop."""

    def emit(self, record: logging.LogRecord) -> None:
        """Report one."""
        fields = vars(record)
        say("log", event=fields.get("event"), cause=fields.get("cause"), text=record.getMessage())


app = App(group, bootstrap_servers=bootstrap or "localhost:9092", auto_offset_reset="earliest")


@app.consume(topic, concurrency=8)
async def handle(record: Record) -> None:
    """Do as the test says."""
    if record.offset != BLOCKS_AT or handlers_that == "await":
        await asyncio.sleep(0.05)
    elif handlers_that == "sleep":
        time.sleep(3.0)  # noqa: ASYNC251 - sleeps here
    else:
        end = time.thread_time() + 3.0
        while time.thread_time() < end:
            pass  # computes here


def explain(over: threading.Event) -> None:
    """Report explanations that name a culprit, each once."""
    said = set()
    while not over.wait(0.02):
        diagnosis = app.diagnose()
        heads = [partition.head for partition in diagnosis.partitions if partition.head is not None]
        sentences = [finding.sentence for finding in diagnosis.findings if finding.kind == "event loop"]
        sentences += [head.reason for head in heads if "without an await" in head.reason]
        for sentence in sentences:
            block = app.statistics().blocked
            key = sentence.partition(":")[2][:20]
            if key not in said:
                said.add(key)
                say("explained", cause=None if block is None else block.cause, text=sentence)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[None]:
    """Run the app on its broker, with records all the time."""
    if bootstrap is not None:
        async with app:
            yield
        return
    async with TestClient(app) as client, asyncio.TaskGroup() as group:

        async def publish() -> None:
            for number in range(1_000_000):
                await client.publish(topic, "x", key=str(number), partition=0)
                await asyncio.sleep(0.01)

        publishing = group.create_task(publish(), name="publish")
        yield
        publishing.cancel()


async def main() -> None:
    """Run until standard input is closed."""
    over = threading.Event()
    async with running():
        if core >= 0:
            os.sched_setaffinity(0, {core})
            os.nice(niceness)
        explaining = threading.Thread(target=explain, args=(over,), daemon=True)
        explaining.start()
        say("ready")
        await asyncio.to_thread(sys.stdin.read)
        over.set()
    say("ended")


logger = logging.getLogger("aioshard.engine.loop_watch")
logger.addHandler(Reporter())
asyncio.run(main())
