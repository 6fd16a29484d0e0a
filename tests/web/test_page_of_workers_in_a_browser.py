"""The page of `aioshard run --workers 2 --web` in a real browser: one page, all of both, and who is who."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, expect

from tests.support.browsing import Watched
from tests.support.running import DEADLINE, Running, settled
from tests.support.shared_kafka import SharedKafka

TOKEN = "only-for-this-test"
PARTITIONS = 4
SOURCE = """
import pathlib
import time

from aioshard import App, Record

while pathlib.Path({held!r}).exists():  # who starts meanwhile waits
    time.sleep(0.05)

app = App({group!r}, bootstrap_servers={bootstrap!r}, auto_offset_reset="earliest")

@app.consume({topic!r})
async def on_order(record: Record) -> None:
    pass
"""


@contextlib.asynccontextmanager
async def load(kafka: SharedKafka, topic: str) -> AsyncIterator[None]:
    """Records into each partition while the context is open."""

    enough = asyncio.Event()

    async def produce() -> None:
        while not enough.is_set():
            await kafka.produce(topic, [(b"%d" % key, b"v") for key in range(10 * PARTITIONS)])
            await asyncio.sleep(0.2)

    producing = asyncio.create_task(produce(), name="load")
    try:
        yield
    finally:
        enough.set()  # a producer that is cancelled while it starts is not closed
        await producing


async def owners(client: httpx.AsyncClient) -> dict[int, str]:
    """Which worker has each partition, as soon as both have some, and each is one's."""

    def shared(answer: httpx.Response) -> bool:
        owned = [
            [one["partition"] for one in (worker["statistics"] or {"partitions": []})["partitions"]]
            for worker in answer.json()["workers"]
        ]
        return all(owned) and sorted(one for each in owned for one in each) == list(range(PARTITIONS))

    answer = await settled(client, "/statistics.json", shared)
    return {
        one["partition"]: worker["worker"]
        for worker in answer.json()["workers"]
        for one in worker["statistics"]["partitions"]
    }


async def see_both(watched: Watched, topic: str, owned: dict[int, str]) -> None:
    """Every partition is there once, with the worker that has it; what is plotted is of both."""
    page = watched.page
    await expect(page.locator("#state")).to_have_text("running")
    await expect(page.locator("#members")).to_have_text("2 processes")
    await expect(page.locator("#partitions tbody tr")).to_have_count(PARTITIONS)
    for partition, worker in owned.items():
        row = watched.row("partitions", f"{topic}/{partition}")
        await expect(row.locator("td[data-label=Worker]")).to_have_text(worker)
        await expect(row.locator("td[data-label=Committed]")).to_have_text(re.compile(r"^[\d,]+$"))
    for table in ("handlers", "partitions"):
        named = await page.locator(f"#{table} td[data-label=Worker]").all_inner_texts()
        assert set(named) == {"0", "1"}, table
    await asyncio.gather(*(watched.moved(plot, 2) for plot in ("rate", "lag", "time")))
    assert float((await page.locator("#plot-rate .now").inner_text()).replace(",", "")) > 0


async def pause_one(watched: Watched, client: httpx.AsyncClient, topic: str, owned: dict[int, str]) -> None:
    """It is told to the worker that has it, and to no other."""
    page = watched.page
    partition = next(number for number, worker in owned.items() if worker == "1")
    await page.get_by_role("button", name="Unlock actions").click()
    await page.get_by_label("Token").fill(TOKEN)
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name=f"Pause {topic}/{partition}").click()
    await expect(page.locator("#toast")).to_have_text(f"Worker 1: {topic}/{partition} is paused.")
    await expect(watched.row("partitions", f"{topic}/{partition}")).to_contain_text("paused")
    found = (await client.get("/statistics.json")).json()["workers"]
    paused = [one["partition"] for worker in found for one in worker["statistics"]["partitions"] if one["paused"]]
    assert paused == [partition]


def hold_up(held: Path) -> None:
    """Whoever starts from now on waits."""
    held.touch()


def let_go(held: Path) -> None:
    """Who waits goes on."""
    held.unlink()


async def kill_one(watched: Watched, client: httpx.AsyncClient, held: Path) -> None:
    """The page says so, and goes on with the other one, until the next one answers."""
    hold_up(held)
    page = watched.page
    number = (await client.get("/statistics.json")).json()["workers"][1]["pid"]
    os.kill(number, signal.SIGKILL)
    silent = page.locator("#findings > li").filter(has_text="worker 1").filter(has_text="killed by SIGKILL")
    await expect(silent).to_contain_text("no answer", timeout=10_000)
    shown = page.locator("#partitions td[data-label=Worker]")
    await expect(shown.filter(has_text="1")).to_have_count(0)
    await expect(shown.filter(has_text="0")).not_to_have_count(0)
    let_go(held)
    await expect(silent).to_have_count(0, timeout=DEADLINE * 1_000)
    await expect(page.locator("#connection")).to_have_text("live")


@pytest.mark.slow
async def test_one_page_shows_both_workers(
    kafka: SharedKafka, topic: str, group: str, browser: Browser, tmp_path: Path
) -> None:
    await kafka.create_topic(topic, PARTITIONS)
    held = tmp_path / "held"
    source = SOURCE.format(group=group, bootstrap=kafka.bootstrap, topic=topic, held=str(held))
    (tmp_path / "shop.py").write_text(source)
    command = ("run", "shop:app", "--workers", "2", "--web")
    running = await Running.start(tmp_path, *command, variables={"AIOSHARD_WEB_TOKEN": TOKEN})
    try:
        async with await running.health() as client, load(kafka, topic):
            owned = await owners(client)
            watched = Watched(await browser.new_page(viewport={"width": 1280, "height": 900}), f"{client.base_url}/")
            watched.page.set_default_timeout(DEADLINE * 1_000)
            await watched.page.goto(watched.address)
            await see_both(watched, topic, owned)
            await pause_one(watched, client, topic, owned)
            await kill_one(watched, client, held)
            assert watched.elsewhere == []
            assert watched.troubles == []
            await watched.page.close()
    finally:
        await running.kill()
