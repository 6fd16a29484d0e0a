"""A member of a group that processes exactly once: `python -m aioshard run tests.guarantees.exactly_once_member:app`.

Each record produces as many messages as its number modulo 4, in `TOPIC.out` under the same key. Records whose number
has an ending listed in `POISON`, such as `13,63`, fail; they go to `TOPIC.dlt`. The record named by `STUCK` hangs in
the processes whose environment has it.
"""

import asyncio
import os
import random

from aioshard import App, Context, DeadLetter, Record, Retry

TOPIC = os.environ.get("EXACTLY_ONCE_TOPIC", "orders")
POISON = os.environ.get("EXACTLY_ONCE_POISON", "none")
STUCK = os.environ.get("EXACTLY_ONCE_STUCK", "none")
LONGEST = float(os.environ.get("EXACTLY_ONCE_LONGEST", "0.01"))

app = App(TOPIC, client="confluent", processing_guarantee="exactly_once", auto_offset_reset="earliest")


def fails(number: str, poison: str = POISON) -> bool:
    """Whether a record goes to the dead letters."""
    return number.endswith(tuple(poison.split(",")))


def copies(number: str, poison: str = POISON) -> int:
    """How many messages a record produces."""
    return 0 if fails(number, poison) else int(number) % 4


@app.consume(
    TOPIC, concurrency=128, retry=Retry(attempts=2, initial=0.01), on_failure=DeadLetter(f"{TOPIC}.dlt", breaker=None)
)
async def on_order(record: Record, context: Context) -> None:
    """Publish the messages of a record, one after the other."""
    number = (record.value or b"").decode()
    if number == STUCK:
        await asyncio.sleep(3600)
    for copy in range(copies(number)):
        await context.publish(f"{TOPIC}.out", f"{number}/{copy}", key=record.key)
        await asyncio.sleep(random.random() * LONGEST)
    if fails(number):
        await context.publish(f"{TOPIC}.out", f"{number}/failed", key=record.key)
        raise ValueError(number)
