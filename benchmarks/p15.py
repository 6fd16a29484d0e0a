"""P15: exactly once compared with at least once, with handlers that wait and publish."""

import asyncio
import statistics
import time
from dataclasses import replace

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from benchmarks.p1 import KEYS, PARTITIONS, numbered_messages
from benchmarks.peers import TRANSACTIONAL
from benchmarks.report import Report, Verdict, spread
from benchmarks.spec import Measurement, Spec
from benchmarks.stage import Contestant, Stage
from benchmarks.tables import cpu_ratio, rate_ratio, rate_rows

TITLE = "Exactly once: handler sleeps 5 ms and publishes one message, concurrency 128, 8 partitions, 1,000 keys"
OURS, LEAST = "aioshard, exactly once", "aioshard, at least once"
CONCURRENCY = 128
SECONDS = 0.005
INTERVAL = 0.1
"""Seconds between commits, the default with exactly-once processing; the peer has the same."""
MESSAGE_INTERVAL = 0.01
MOST_CPU = 30.0
"""Microseconds per record, with the message that it publishes."""
LONGEST_PAUSE = 20.0
"""Milliseconds for which a commit may keep handlers from starting."""


async def run(stage: Stage) -> Report:
    """Let both consume the same topic in turn; then measure when messages become visible under a small load."""
    topic = await stage.fill("p15", PARTITIONS, numbered_messages(stage.size(150_000, 1_000), KEYS))
    output = await stage.begin("p15-out", PARTITIONS, {})

    warm_up = await stage.fill("p15-warm-up", PARTITIONS, numbered_messages(stage.size(50_000, 200), KEYS))

    async def run_one(spec: Spec) -> Measurement:
        spec = replace(spec, output=output)
        if spec.contestant == TRANSACTIONAL:
            spec = replace(spec, warm_up=warm_up.name, warm_up_ends=warm_up.ends)
        return await stage.run(spec)

    runs = await stage.contest(
        stage.lineup([Contestant(LEAST), Contestant(OURS), Contestant(TRANSACTIONAL, peer=True)], []),
        topic,
        rounds=stage.size(5, 1),
        work="sleep",
        concurrency=CONCURRENCY,
        seconds=SECONDS,
        run=run_one,
    )
    report = Report("P15", TITLE, rate_rows(runs, ceiling=LEAST))
    seen = {name: await _delays(stage, name) for name in runs if name != LEAST}
    for row, (name, measured) in zip(report.rows, runs.items(), strict=True):
        row["longest pause, ms"] = spread([one.longest_pause * 1e3 for one in measured])
        row["visible after, ms"] = statistics.median(seen[name]) * 1e3 if name in seen else None
    delays = seen[OURS]
    pause, without = (spread([one.longest_pause * 1e3 for one in runs[name]]).median for name in (OURS, LEAST))
    report.verdicts += [
        Verdict(
            "records/s, times at least once",
            rate_ratio(runs, OURS, LEAST).median,
            must=1.0,
            aim=1.35,
            at_least=True,
            judged=not stage.quick,
        ),
        Verdict(
            "CPU per record",
            statistics.median(one.cpu_per_record for one in runs[OURS]),
            must=MOST_CPU,
            unit="µs",
            judged=not stage.quick,
        ),
        Verdict(
            f"longest time without a start, median ({without:.3g} ms without transactions)",
            pause,
            must=max(LONGEST_PAUSE, without),  # pauses that also occur without transactions do not count
            unit="ms",
            judged=not stage.quick,
        ),
        Verdict(
            "time from input to visible output, median",
            statistics.median(delays) * 1e3,
            must=(INTERVAL + 0.05) * 1e3,
            unit="ms",
            judged=not stage.quick,
        ),
    ]
    report.notes.append(
        f"CPU per record, times at least once: {cpu_ratio(runs, OURS, LEAST).median:.2f}. Of {len(delays)} messages "
        f"under a load of {1 / MESSAGE_INTERVAL:.0f} a second, the slowest was visible after {max(delays):.2f} s."
    )
    if TRANSACTIONAL in runs:
        report.notes.append(
            f"{TRANSACTIONAL}: threads, order by key, `pollAndProduce`, a transaction each 100 ms; measured after a "
            f"warm-up with another topic in the same process. The slowest was visible after "
            f"{max(seen[TRANSACTIONAL]):.2f} s."
        )
    for name, measured in runs.items():
        report.blame(name, measured)
    return report


async def _delays(stage: Stage, contestant: str) -> list[float]:
    """Return the seconds from sending each message until a reader sees what its handler published."""
    messages = stage.size(1_000, 50)
    source = await stage.begin("p15-in", PARTITIONS, {})
    output = await stage.begin("p15-seen", PARTITIONS, {})
    ends = (messages + 1,) * PARTITIONS
    spec = Spec(contestant, stage.cluster.bootstrap, source, source, ends, messages + 1, CONCURRENCY, "sleep", SECONDS)
    process = await stage.start(replace(spec, output=output))
    reader = AIOKafkaConsumer(
        output,
        bootstrap_servers=stage.cluster.bootstrap,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        fetch_max_wait_ms=10,
    )
    producer = AIOKafkaProducer(bootstrap_servers=stage.cluster.bootstrap)
    delays: list[float] = []
    try:
        async with reader, producer:
            await _send(producer, source, 1)
            await reader.getone()  # the process is up
            sending = asyncio.create_task(_send(producer, source, messages), name="load")
            while len(delays) < messages:
                record = await reader.getone()
                delays.append(time.time() - float(record.value))
            await sending
            await process.measurement()
    finally:
        await process.kill()
    return delays


async def _send(producer: AIOKafkaProducer, topic: str, messages: int) -> None:
    for number in range(messages):
        await producer.send_and_wait(topic, b"%.6f" % time.time(), key=b"key-%d" % (number % KEYS))
        await asyncio.sleep(MESSAGE_INTERVAL)
