"""The journal of a year of flights, for `aioshard report`.

Each flight is looked up. That takes 5 ms, or 50 ms if the flight left more than two hours late. The broker is in
memory.

    python examples/flights_journal.py JOURNAL [RECORDS]
    aioshard report html JOURNAL
"""

import asyncio
import json
import sys

import uvloop

from aioshard import App, Record
from aioshard.cli.demo import FLIGHTS, read_flights
from aioshard.testing import InMemoryBroker, InMemoryTransport

VERY_LATE = 120
"""Minutes."""


async def main(journal: str, records: int) -> None:
    broker = InMemoryBroker(partitions=8)
    for flight in read_flights(records):
        broker.publish("flights", flight.value, key=flight.aircraft)
    app = App("flights", auto_offset_reset="earliest", journal=journal, show_keys=True)
    done = asyncio.Event()
    left = records

    @app.consume("flights", concurrency=64)
    async def look_up(record: Record) -> None:
        nonlocal left
        late = json.loads(record.value or b"{}")["departure_delay"] or 0
        await asyncio.sleep(0.05 if late > VERY_LATE else 0.005)
        left -= 1
        if not left:
            done.set()

    async with app.started(lambda: InMemoryTransport(broker, app.group_id)):
        await done.wait()


if __name__ == "__main__":
    directory, *rest = sys.argv[1:] or ["flights-journal"]
    uvloop.run(main(directory, int(rest[0]) if rest else FLIGHTS))
