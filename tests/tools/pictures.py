"""Pictures of the terminal for the documentation: `python -m tests.tools.pictures` writes them.

They show the reports of the engine: two apps of one group on the broker in memory, in virtual time.
"""

import asyncio
import contextlib
import io
import random
import re
from pathlib import Path

from rich.console import Console

from aioshard import App, Record, Retry
from aioshard.cli.top import Frame, Frames, Snapshot, view
from aioshard.testing import InMemoryBroker, TestClient, run
from aioshard.web.health import findings
from tests.project.docs.tables import DOCS

IMAGES = DOCS / "images"
_WIDTH, _HEIGHT = 118, 36
_FRAMES_APART = 2.0
_SEED = 5


def _app(released: asyncio.Event) -> App:
    app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest", stuck_after=20)
    chance = random.Random(_SEED)

    @app.consume("orders", concurrency=64, retry=Retry(attempts=2, initial=1.0))
    async def on_order(record: Record) -> None:
        if record.value == b"no such customer":
            raise LookupError("no such customer")
        if record.value == b"slow":
            await released.wait()
        await asyncio.sleep(chance.uniform(0.02, 0.2))

    @app.consume("clicks", concurrency=16)
    async def on_click(_: Record) -> None:
        await asyncio.sleep(chance.uniform(0.01, 0.05))

    return app


async def scene() -> Frame:
    """Two processes of one group; one handler hangs, one record is halted, and the rest continues."""
    broker = InMemoryBroker()
    broker.create_topic("orders", 6)
    broker.create_topic("clicks", 2)
    frames = Frames()
    released = asyncio.Event()
    apps = [_app(released), _app(released)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(TestClient(app, broker=broker)) for app in apps]
        publish = clients[0].publish
        for number in range(6000):
            await publish("orders", b"v", key=f"customer {number % 200}", partition=number % 6)
            await publish("clicks", b"v", key=f"page {number % 50}", partition=number % 2)
        await publish("orders", b"slow", key="customer 7", partition=2)
        await publish("orders", b"no such customer", key="customer 8", partition=4)
        await asyncio.sleep(40.0)
        for number in range(20_000):
            await publish("orders", b"v", key=f"customer {number % 200}", partition=number % 6)
            await publish("clicks", b"v", key=f"page {number % 50}", partition=number % 2)
        await asyncio.sleep(3.0)
        frames.add(_snapshots_of(apps), 0.0)
        await asyncio.sleep(_FRAMES_APART)
        frame = frames.add(_snapshots_of(apps), 1_800_000_000.0)
        released.set()
    return frame


def _snapshots_of(apps: list[App]) -> list[Snapshot]:
    now = asyncio.get_running_loop().time()
    snapshots = []
    for number, app in enumerate(apps):
        statistics = app.statistics()
        sentences = (sentence.replace(__file__, "/app/shop.py") for sentence in findings(statistics, app.diagnose()))
        snapshots.append(Snapshot(f"10.0.0.7:808{number}", now, statistics.asdict(), list(sentences)))
    return snapshots


def picture_of_top(frame: Frame) -> str:
    """`aioshard top`, as SVG."""
    console = Console(record=True, width=_WIDTH, height=_HEIGHT, file=io.StringIO(), force_terminal=True)
    console.print(view(frame, _HEIGHT))
    drawn = console.export_svg(title="aioshard top http://10.0.0.7:8080 http://10.0.0.7:8081", unique_id="top")
    return re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)  # nothing is fetched from elsewhere


def write() -> list[Path]:
    """Write the pictures; those that were written."""
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / "top.svg"
    path.write_text(picture_of_top(run(scene(), seed=_SEED)))
    return [path]


if __name__ == "__main__":
    for picture in write():
        print("written:", picture)
