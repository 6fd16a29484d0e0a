"""When the runs of limited handlers began, and whether they kept a limit."""

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence

from aioshard import Limit, Record
from aioshard.testing import TestClient


class Starts:
    """When runs began."""

    def __init__(self) -> None:
        self.all: list[float] = []
        self.offsets: dict[bytes | None, list[int]] = defaultdict(list)
        self.of_key: dict[bytes | None, list[float]] = defaultdict(list)

    def note(self, record: Record) -> None:
        now = asyncio.get_running_loop().time()
        self.all.append(now)
        self.offsets[record.key].append(record.offset)
        self.of_key[record.key].append(now)


def keeps(limit: Limit, times: Sequence[float], *, members: int = 1) -> bool:
    """Whether no window of time has more of *times*, which ascend, than the limit allows.

    The burst of a group cannot be divided below one run for each of its members.
    """
    most = limit.at_once + members - 1
    return all(
        last - first + 1 <= most + limit.per_second * (times[last] - times[first]) + 1e-6
        for first, last in itertools.combinations(range(len(times)), 2)
        if last - first < 300
    )


async def move_a_partition(client: TestClient, chance: random.Random) -> None:
    """Take a partition of the topic orders away and give it back, several times, at moments that chance decides."""
    for _ in range(4):
        await asyncio.sleep(chance.random() / 3)
        await client.revoke("orders", 0)
        await asyncio.sleep(chance.random() / 5)
        await client.assign("orders", 0)
