"""An app and its resources run once at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from aioshard import App, Context, Record
from aioshard.errors import StateError
from aioshard.testing import InMemoryBroker, InMemoryTransport, run


class Life:
    """An app whose resources take a second to open and two to close."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
        self.open = 0
        self.states: list[object] = []
        self.app = App("once", resources=self.resources, auto_offset_reset="earliest")

        @self.app.consume("orders")
        async def handle(record: Record, context: Context) -> None:  # noqa: ARG001
            self.states.append(context.state)

    @contextlib.asynccontextmanager
    async def resources(self, _: App) -> AsyncIterator[str]:
        await asyncio.sleep(1.0)
        self.open += 1
        yield "open"
        await asyncio.sleep(2.0)
        self.open -= 1

    async def live(self) -> None:
        async with self.app.started(lambda: InMemoryTransport(self.broker, "once")):
            assert self.open == 1
            self.broker.publish("orders", b"")
            await asyncio.sleep(5.0)


@pytest.mark.parametrize("after", [0.5, 3.0, 7.0], ids=["opening resources", "running", "closing resources"])
def test_a_second_start_is_refused(after: float) -> None:
    life = Life()

    async def test() -> None:
        first = asyncio.create_task(life.live(), name="first")
        await asyncio.sleep(after)
        with pytest.raises(StateError, match="already running"):
            await life.live()
        await first
        assert life.broker.group("once").members == ()

    run(test())

    assert (life.open, life.states) == (0, ["open"])


def test_an_app_starts_again_after_its_end() -> None:
    life = Life()

    async def test() -> None:
        await life.live()
        await life.live()

    run(test())

    assert (life.open, life.states) == (0, ["open", "open"])
