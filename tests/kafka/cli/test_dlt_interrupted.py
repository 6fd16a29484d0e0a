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
    await _fill(kafka, topic)

    first = await _replay(kafka, topic)
    try:
        await _until_sending(kafka, topic)
        first.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(first.communicate(), DEADLINE)
    finally:
        await _end(first)
    sent = await _send_the_rest(kafka, topic)

    assert first.returncode == 130, errors
    summary = re.search(rb"([\d,]+) dead letters were sent back", errors)
    assert summary is not None
    assert int(summary[1].replace(b",", b"")) + sent == DEAD_LETTERS
    await _check(kafka, topic)


async def test_a_killed_replay_sends_nothing_twice(kafka: SharedKafka, topic: str) -> None:
    """It is killed while its first transaction is open, which the next run ends."""
    await _fill(kafka, topic)

    first = await _replay(kafka, topic)
    try:
        await _until_sending(kafka, topic)
    finally:
        first.kill()
        await first.communicate()
    stored = len(await kafka.read(topic))
    sent = await _send_the_rest(kafka, topic)

    assert first.returncode == -signal.SIGKILL
    assert stored + sent >= DEAD_LETTERS  # the last transaction may be committed a moment after the kill
    await _check(kafka, topic)


async def test_a_replay_that_another_one_has_replaced_sends_nothing_more(kafka: SharedKafka, topic: str) -> None:
    """It is suspended with an open transaction, and ends with a sentence that says so once it continues."""
    await _fill(kafka, topic)

    first = await _replay(kafka, topic)
    try:
        await _until_sending(kafka, topic)
        first.send_signal(signal.SIGSTOP)
        sent = await _send_the_rest(kafka, topic)
        first.send_signal(signal.SIGCONT)
        _, errors = await asyncio.wait_for(first.communicate(), DEADLINE)
    finally:
        await _end(first)

    assert first.returncode == 4, errors
    assert b"another run on" in errors
    summary = re.search(rb"([\d,]+) dead letters were sent back", errors)
    assert summary is not None
    assert int(summary[1].replace(b",", b"")) + sent == DEAD_LETTERS
    await _check(kafka, topic)


async def _until_sending(kafka: SharedKafka, topic: str) -> None:
    async with asyncio.timeout(DEADLINE):
        while not sum((await kafka.end_offsets(topic)).values()):
            pass


async def _send_the_rest(kafka: SharedKafka, topic: str) -> int:
    """Run another replay to its end; return how many it has sent."""
    second = await _replay(kafka, topic, "--json")
    try:
        output, errors = await asyncio.wait_for(second.communicate(), DEADLINE)
    finally:
        await _end(second)
    assert second.returncode == 0, errors
    sent: int = json.loads(output)["done"].get(topic, 0)
    return sent


async def _check(kafka: SharedKafka, topic: str) -> None:
    """Every record has arrived, and for readers of committed records only once."""
    arrived = Counter(record.value for record in await kafka.read(topic))
    assert arrived == Counter(b"%d" % number for number in range(DEAD_LETTERS))


async def _fill(kafka: SharedKafka, source: str) -> None:
    dead_letter_topic = f"{source}.dlt"
    await kafka.create_topic(source, 2, {"retention.ms": "-1"})
    await kafka.create_topic(dead_letter_topic, 2, {"retention.ms": "-1"})
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


async def _replay(kafka: SharedKafka, topic: str, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "aioshard", "dlt", "replay", f"{topic}.dlt", "--yes", *options),
        *("--bootstrap-servers", kafka.bootstrap),
        cwd=PROJECT,
        env={name: value for name, value in os.environ.items() if not name.startswith("AIOSHARD_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()
