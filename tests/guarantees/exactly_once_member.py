"""A member with exactly-once processing: `python -m aioshard run tests.guarantees.exactly_once_member:app`.

Each record produces as many messages as its number modulo 4, in `TOPIC.out` under the same key. Records whose number
has an ending listed in `POISON`, such as `13,63`, fail; they go to `TOPIC.dlt`. With `PARK` they fail seven times in
ten, and wait these seconds in `TOPIC.parked`. With a topic `PARKING` besides, only its records do so. The record named
by `STUCK` hangs in the processes whose environment has it.
"""

import asyncio
import os
import random

from aioshard import App, Context, DeadLetter, Park, Record, Retry

TOPIC = os.environ.get("EXACTLY_ONCE_TOPIC", "orders")
POISON = os.environ.get("EXACTLY_ONCE_POISON", "none")
PARK = float(os.environ.get("EXACTLY_ONCE_PARK", "0"))
PARKING = os.environ.get("EXACTLY_ONCE_PARKING", "")
STUCK = os.environ.get("EXACTLY_ONCE_STUCK", "none")
LONGEST = float(os.environ.get("EXACTLY_ONCE_LONGEST", "0.01"))

app = App(TOPIC, processing_guarantee="exactly_once", auto_offset_reset="earliest")


def fails(number: str, poison: str = POISON) -> bool:
    """Whether a record can fail."""
    return number.endswith(tuple(poison.split(",")))


def copies(number: str) -> int:
    """How many messages a record produces unless it fails."""
    return int(number) % 4


async def publish_outputs(record: Record, context: Context, *, parks: bool) -> None:
    """Publish the messages of a record, one after the other."""
    number = (record.value or b"").decode()
    if number == STUCK:
        await asyncio.sleep(3600)
    if fails(number) and not (parks and random.random() < 0.3):
        await context.publish(f"{TOPIC}.out", f"{number}/failed", key=record.key)
        raise ValueError(number)
    for copy in range(copies(number)):
        await context.publish(f"{TOPIC}.out", f"{number}/{copy}", key=record.key)
        await asyncio.sleep(random.random() * LONGEST)


IS_PARKED = bool(PARK and not PARKING)
"""Whether failed records of the first topic are parked."""
ONCE_MORE = Retry(attempts=2, initial=0.01)


@app.consume(
    TOPIC,
    concurrency=128,
    retry=ONCE_MORE,
    on_failure=Park(f"{TOPIC}.parked", delay=PARK) if IS_PARKED else DeadLetter(f"{TOPIC}.dlt", breaker=None),
)
async def on_order(record: Record, context: Context) -> None:
    """Publish the messages of a record."""
    await publish_outputs(record, context, parks=IS_PARKED)


if PARKING:

    @app.consume(PARKING, concurrency=128, retry=ONCE_MORE, on_failure=Park(f"{TOPIC}.parked", delay=PARK))
    async def on_parked_order(record: Record, context: Context) -> None:
        """Publish the messages of a record of the topic whose failed records are parked."""
        await publish_outputs(record, context, parks=True)
