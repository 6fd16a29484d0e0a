"""An interrupted `aioshard dlt replay` loses nothing and resends nothing acknowledged."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter

from aioshard import Settings
from aioshard.kafka.producer import KafkaProducer
from aioshard.records import Record
from aioshard.serde.side_records import Failure, dead_letter
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

DEADLINE = 60.0
DEAD_LETTERS = 8000
AT_ONCE = 1000


async def test_the_next_replay_finishes_an_interrupted_one(kafka: SharedKafka, topic: str) -> None:
    dead_letter_topic = f"{topic}.dlt"
    await kafka.create_topic(topic, 2, {"retention.ms": "-1"})
    await kafka.create_topic(dead_letter_topic, 2, {"retention.ms": "-1"})
    await _fill(kafka, dead_letter_topic, topic)

    first = await _replay(kafka, dead_letter_topic)
    try:
        async with asyncio.timeout(DEADLINE):
            while not sum((await kafka.end_offsets(topic)).values()):
                pass
        first.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(first.communicate(), DEADLINE)
    finally:
        await _end(first)
    second = await _replay(kafka, dead_letter_topic, "--json")
    try:
        output, _ = await asyncio.wait_for(second.communicate(), DEADLINE)
    finally:
        await _end(second)

    assert first.returncode == 130, errors
    summary = re.search(rb"([\d,]+) dead letters were sent back", errors)
    assert summary is not None
    assert second.returncode == 0
    assert int(summary[1].replace(b",", b"")) + json.loads(output)["done"][topic] == DEAD_LETTERS
    arrived = Counter(record.value for record in await kafka.read(topic))
    assert len(arrived) == DEAD_LETTERS
    # A record in flight may have been stored without an acknowledgement.
    assert arrived.total() - DEAD_LETTERS <= AT_ONCE


async def _fill(kafka: SharedKafka, dead_letter_topic: str, source: str) -> None:
    producer = KafkaProducer(Settings(bootstrap_servers=kafka.bootstrap))
    failure = Failure("billing", "on_order", 5, "ValueError", "no", 1.7e9)
    records = [Record(source, n % 2, n, b"%d" % (n % 100), b"%d" % n, (), 1.6e9) for n in range(DEAD_LETTERS)]
    try:
        async with asyncio.timeout(DEADLINE):
            for begin in range(0, DEAD_LETTERS, AT_ONCE):
                some = records[begin : begin + AT_ONCE]
                await asyncio.gather(
                    *(producer.publish(dead_letter(dead_letter_topic, record, failure)) for record in some)
                )
    finally:
        await producer.close()


async def _replay(kafka: SharedKafka, dead_letter_topic: str, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *(
            "-m",
            "aioshard",
            "dlt",
            "replay",
            dead_letter_topic,
            "--yes",
            *options,
            "--bootstrap-servers",
            kafka.bootstrap,
        ),
        cwd=PROJECT,
        env={name: value for name, value in os.environ.items() if not name.startswith("AIOSHARD_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()
