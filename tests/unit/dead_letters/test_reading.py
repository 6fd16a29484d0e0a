"""Reading leaves the event loop to others, and tells dead letters from other records."""

import asyncio
import itertools

from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.plan import make_plan
from tests.support.dead_letters import dead_letters_in_memory, failure, record


def test_other_tasks_run_while_a_long_topic_is_read() -> None:
    topic, _ = dead_letters_in_memory(
        "orders.dlt", {0: [(offset, record(offset), failure(offset)) for offset in range(5000)]}
    )
    turns: list[int] = []

    async def other() -> None:
        while True:
            turns.append(topic.dead_letters_read)
            await asyncio.sleep(0)

    async def read() -> None:
        running = asyncio.create_task(other())
        await topic.survey(Filters(text="nothing"))
        await make_plan(topic, Filters(text="nothing"))
        running.cancel()

    asyncio.run(read())

    assert max(after - before for before, after in itertools.pairwise(turns)) <= 200
    assert topic.dead_letters_read == 10_000
