"""The starts of a simulated world whose handlers have a rate limit, checked against that limit."""

import asyncio
import math
from collections import defaultdict

from aioshard import Limit, Record
from tests.simulation.world import GROUP, Process, World


class StartLedger:
    """When runs began, for each process, key or group that has the limit for itself."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.starts: dict[object, list[float]] = defaultdict(list)

    def note(self, world: World, process: Process, record: Record) -> None:
        """Note that a run begins now."""
        now = asyncio.get_running_loop().time()
        match self.limit.per:
            case "process":
                self.starts[process.number].append(now)
            case "key" if record.key is not None:
                self.starts[process.number, record.key].append(now)
            # A member that the group has dropped by force learns of it later.
            case "group" if world.broker.group(GROUP).owner(record.topic_partition) == process.member_id:
                self.starts[GROUP].append(now)

    def check(self, members: int) -> None:
        """Check that no window of time has more starts than the limit allows; *members* is how many there ever were.

        The burst of a group cannot be divided below one run for each member.
        """
        rate = self.limit.per_second
        burst = self.limit.at_once
        if self.limit.per == "group":
            burst += members - 1
        for who, times in self.starts.items():
            # Of all windows that end with a start, the worst one begins where the fewest starts lag behind the rate.
            worst = -math.inf
            for number, time in enumerate(times):
                worst = max(worst, time * rate - number)
                excess = number + 1 - time * rate + worst - burst
                assert excess <= 1e-6, f"{who} started {excess:.3g} runs too many by {time:.3f} s"
