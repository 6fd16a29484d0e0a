"""The engine's side of a group member, as a test drives it; as a program, a member in another process.

Run as a program, it prints the number of owned partitions whenever its event loop runs.
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable
from typing import Any

from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_driver import ConsumerDriver, ConsumerProtocol
from aioshard.kafka.group.member import Event, Revoked
from aioshard.kafka.wire.start import new_cluster
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, settings_for

LOOK = 0.02
"""Seconds between two looks at what has no event, such as the end of an ownership."""


class Engine:
    """Releases revoked partitions, unless it holds them.

    Attributes:
        events: All that arrived.
        holds: Whether it keeps revoked partitions.
    """

    def __init__(self, bootstrap: str, group: str, *, rebalance_timeout: float = 30.0, **options: Any) -> None:
        settings = settings_for(bootstrap)
        member = ConsumerMember(random.SystemRandom(), rebalance_timeout=rebalance_timeout, **options)
        self.events: list[Event] = []
        self.holds = False
        self.driver = ConsumerDriver(
            ConsumerProtocol(group, member),
            lambda: new_cluster(settings),
            self._handle,
            rebalance_timeout=rebalance_timeout,
        )
        self.driver.start()

    def _handle(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Revoked) and not self.holds:
            self.driver.released(event.life, event.partitions)

    async def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Waits until something is true."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - see LOOK
                await asyncio.sleep(LOOK)

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """The partitions of which records may start and commits may leave now."""
        own = self.driver.ownership
        return own.partitions if self.driver.clock() < own.alive_until else frozenset()

    def saw(self, kind: type[Event]) -> list[Any]:
        """Returns the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


async def _print_owned(arguments: dict[str, Any]) -> None:
    engine = Engine(**arguments)
    while True:
        print(len(engine.owned), flush=True)
        await asyncio.sleep(LOOK)


if __name__ == "__main__":
    asyncio.run(_print_owned(json.loads(sys.argv[1])))
