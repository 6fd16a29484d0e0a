"""A member with exactly-once processing: `python -m aioshard run tests.guarantees.exactly_once_member:app`.

Each record produces as many messages as its number modulo 4, in `TOPIC.out` under the same key. Records whose number
has an ending listed in `POISON`, such as `13,63`, fail; they go to `TOPIC.dlt`. With `PARK` they fail seven times in
ten, and wait these seconds in `TOPIC.parked`. The record named by `STUCK` hangs in the processes whose environment
has it.
"""

import asyncio
import os
import random

from aioshard import App, Context, DeadLetter, Park, Record, Retry

TOPIC = os.environ.get("EXACTLY_ONCE_TOPIC", "orders")
POISON = os.environ.get("EXACTLY_ONCE_POISON", "none")
PARK = float(os.environ.get("EXACTLY_ONCE_PARK", "0"))
STUCK = os.environ.get("EXACTLY_ONCE_STUCK", "none")
LONGEST = float(os.environ.get("EXACTLY_ONCE_LONGEST", "0.01"))

app = App(TOPIC, processing_guarantee="exactly_once", auto_offset_reset="earliest")


def fails(number: str, poison: str = POISON) -> bool:
    """Whether a record can fail."""
    return number.endswith(tuple(poison.split(",")))


def copies(number: str) -> int:
    """How many messages a record produces unless it fails."""
    return int(number) % 4


@app.consume(
    TOPIC,
    concurrency=128,
    retry=Retry(attempts=2, initial=0.01),
    on_failure=Park(f"{TOPIC}.parked", delay=PARK) if PARK else DeadLetter(f"{TOPIC}.dlt", breaker=None),
)
async def on_order(record: Record, context: Context) -> None:
    """Publish the messages of a record, one after the other."""
    number = (record.value or b"").decode()
    if number == STUCK:
        await asyncio.sleep(3600)
    if fails(number) and not (PARK and random.random() < 0.3):
        await context.publish(f"{TOPIC}.out", f"{number}/failed", key=record.key)
        raise ValueError(number)
    for copy in range(copies(number)):
        await context.publish(f"{TOPIC}.out", f"{number}/{copy}", key=record.key)
        await asyncio.sleep(random.random() * LONGEST)
