"""The dashboard in a real browser with a real broker: it updates, names stuck records, acts only with the token."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from playwright.async_api import Browser, expect

from aioshard import App, Park, Record, Retry
from aioshard.web.page import dashboard
from tests.support.brokers import SharedKafka
from tests.support.browsing import Watched, pale_texts, served

TOKEN = "only-for-this-test"
SCRIPT = "<script>window.ran = true</script><img src=x onerror='window.ran = true'>"
LONG = "without-a-blank-" + "k" * 100
PARTITIONS = 4
HANGS, HALTS, SLOW, MENDED = 0, 1, 2, 3
"""Partitions in which the first record does that."""


class Shop:
    """Handlers of which one record hangs until the test is over, and some fail until the cause is fixed."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.fixed = False

    async def charged(self) -> None:
        await self.over.wait()

    async def on_order(self, record: Record) -> None:
        if record.value == b"hangs":
            await self.charged()
        if record.value == b"halts":
            raise LookupError(SCRIPT)
        if record.value == b"down" and not self.fixed:
            raise ConnectionError("the ledger is down")
        await asyncio.sleep(0.005)

    async def on_invoice(self, record: Record) -> None:
        await self.on_order(record)


@contextlib.asynccontextmanager
async def running(kafka: SharedKafka, topic: str, group: str) -> AsyncIterator[tuple[App, Shop, str]]:
    """An app with a stuck, a halted and a parked record and a steady load, and the address of its page."""
    await kafka.create_topic(topic, PARTITIONS)
    await kafka.create_topic(f"{topic}.invoices")
    app = App(
        group,
        bootstrap_servers=kafka.bootstrap,
        auto_offset_reset="earliest",
        stuck_after=1.0,
        shutdown_timeout=2.0,
        show_keys=True,
    )
    shop = Shop()
    app.consume(topic, concurrency=8, retry=Retry(attempts=1))(shop.on_order)
    park = Park(f"{topic}.parked", delay=1_000.0)
    app.consume(f"{topic}.invoices", retry=Retry(attempts=1), on_failure=park)(shop.on_invoice)
    api = FastAPI()
    api.mount("/aioshard", dashboard(app, token=TOKEN))

    async def load() -> None:
        while True:
            await app.publish(topic, b"{}", key="fine", partition=SLOW)
            await asyncio.sleep(0.02)

    async with app, served(api) as address, asyncio.TaskGroup() as group_of_tasks:
        for value in (b"hangs", b"{}", b"{}"):
            await app.publish(topic, value, key=SCRIPT, partition=HANGS)
        await app.publish(topic, b"halts", key=LONG, partition=HALTS)
        await app.publish(topic, b"down", key="retried", partition=MENDED)
        await app.publish(f"{topic}.invoices", b"down", key="locked", partition=0)
        loading = group_of_tasks.create_task(load(), name="load")
        try:
            yield app, shop, address
        finally:
            loading.cancel()
            shop.over.set()


async def read_what_it_says(watched: Watched, topic: str) -> None:
    """Plots move, and stuck and halted records are named, with the stack."""
    page = watched.page
    await expect(page.locator("#state")).to_have_text("running")
    await asyncio.gather(*(watched.moved(plot, 2) for plot in ("rate", "lag", "age", "time")))
    await expect(page.locator("#plot-time .now")).to_have_text(re.compile(r"^[\d.]+ ms$"))
    assert float((await page.locator("#plot-rate .now").inner_text()).replace(",", "")) > 0
    stuck = page.locator("#findings > li").filter(has_text="stuck").filter(has_text=f"{topic}/{HANGS}")
    await expect(stuck).to_contain_text("stuck", timeout=10_000)
    await expect(stuck).to_contain_text("in Shop.charged")
    await stuck.locator("summary").click()
    frames = stuck.locator(".stack li[data-own]")
    places = [re.compile(rf"^Shop\.{name}.*test_page_in_a_browser\.py:\d+$") for name in ("on_order", "charged")]
    await expect(frames).to_have_text(places)
    await expect(frames.first).to_be_visible()
    await expect(watched.row("failed", f"{topic}/{HALTS}/0")).to_contain_text("halted")
    await expect(watched.row("workers", f"{topic}/{HANGS}/0")).to_contain_text("Shop.charged")
    await expect(watched.row("partitions", f"{topic}/{SLOW}")).to_contain_text("advancing")
    await expect(watched.row("shards", "window.ran").locator("td[data-label=Waiting]")).to_have_text("2")
    await expect(watched.row("parked", f"{topic}.invoices/0/0")).to_contain_text("the ledger is down")
    await expect(page.locator("#rebalances > li").first).to_contain_text(f"0 revoked · {PARTITIONS + 1} assigned")


async def see_a_script_as_text(watched: Watched, topic: str) -> None:
    """In a key and in an exception's message it is shown as it is, and does not run."""
    page = watched.page
    await expect(watched.row("workers", f"{topic}/{HANGS}/0")).to_contain_text("<script>window.ran = true</script>")
    await expect(watched.row("failed", f"{topic}/{HALTS}/0")).to_contain_text("onerror='window.ran = true'")
    assert await page.evaluate("window.ran === undefined")
    assert await page.locator("main script, main img").count() == 0


async def act_with_the_token_alone(watched: Watched, app: App, shop: Shop, topic: str) -> None:
    """Nothing without it; with it, each kind of action does what its button says."""
    page = watched.page
    row = watched.row("partitions", f"{topic}/{SLOW}")
    await expect(row.get_by_role("button", name="Pause")).to_have_count(0)
    refused = await page.request.post(
        f"{watched.address}actions", data={"action": "pause", "topic": topic, "partition": SLOW}
    )
    assert refused.status == 401

    await page.get_by_role("button", name="Unlock actions").click()
    await page.get_by_label("Token").fill(TOKEN)
    await page.keyboard.press("Enter")
    await row.get_by_role("button", name=f"Pause {topic}/{SLOW}").click()
    await expect(page.locator("#toast")).to_have_text(f"{topic}/{SLOW} is paused.")
    await expect(row).to_contain_text("paused")
    assert app.statistics().partitions[SLOW].paused == "requested by an operator on the dashboard"
    await row.get_by_role("button", name="Resume").click()
    await expect(row).not_to_contain_text("paused")

    # The widest table, with its column of actions: a laptop shows all of it.
    assert (
        await page.evaluate("(({ scrollWidth: a, clientWidth: b }) => a - b)(document.querySelector('#handlers'))") <= 0
    )
    shop.fixed = True
    await watched.row("failed", f"{topic}/{MENDED}/0").get_by_role("button", name="Retry").click()
    await expect(watched.row("failed", f"{topic}/{MENDED}/0")).to_have_count(0)
    await watched.row("parked", f"{topic}.invoices/0/0").get_by_role("button", name="Release").click()
    await expect(watched.row("parked", f"{topic}.invoices/0/0")).to_have_count(0)
    assert app.statistics().handlers[1].processed == 1

    await watched.row("failed", f"{topic}/{HALTS}/0").get_by_role("button", name="Skip").click()
    await page.get_by_role("button", name="Skip the record").click()
    await expect(watched.row("failed", f"{topic}/{HALTS}/0")).to_have_count(0)
    assert app.statistics().handlers[0].skipped == 1


async def see_that_it_is_of_then(watched: Watched) -> None:
    """When the server does not answer, the page says so and since when, and resumes when it does."""
    page = watched.page
    await page.route("**/dashboard.json", lambda route: route.abort())
    await expect(page.locator("#stale")).to_contain_text("cannot be reached")
    await expect(page.locator("#stale")).to_contain_text(" ago.")
    await expect(page.locator("#connection")).to_have_text("no answer")
    await page.unroute("**/dashboard.json")
    await expect(page.locator("#stale")).to_be_hidden()
    await expect(page.locator("#connection")).to_have_text("live")


async def look_at_it_on_a_phone(watched: Watched) -> None:
    page = watched.page
    await page.set_viewport_size({"width": 390, "height": 844})
    widths = await page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1] == 390
    outside = """() => [...document.querySelectorAll("main *")].filter((one) => one.checkVisibility() &&
        !one.closest("thead") && one.getBoundingClientRect().right > 390.5).map((one) => one.outerHTML.slice(0, 80))"""
    assert await page.evaluate(outside) == []
    small = """() => [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility() &&
        [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) &&
        parseFloat(getComputedStyle(one).fontSize) < 12).map((one) => one.outerHTML.slice(0, 80))"""
    assert await page.evaluate(small) == []


async def look_at_its_colours(watched: Watched, scheme: Any) -> None:
    """All that is written stands out from what is behind it (4.5 : 1)."""
    page = watched.page
    await page.emulate_media(color_scheme=scheme)
    await page.evaluate("Promise.all(document.getAnimations().map((one) => one.finished))")
    dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(13, 17, 23)") is (scheme == "dark")
    assert await pale_texts(page) == []


async def test_the_dashboard_works_in_a_browser(
    kafka: SharedKafka, topic: str, group: str, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aioshard.engine")
    async with running(kafka, topic, group) as (app, shop, address):
        watched = Watched(await browser.new_page(viewport={"width": 1280, "height": 900}), f"{address}/aioshard/")
        watched.page.set_default_timeout(10_000)
        await watched.page.goto(watched.address)
        await read_what_it_says(watched, topic)
        await see_a_script_as_text(watched, topic)
        for scheme in ("light", "dark"):
            await look_at_its_colours(watched, scheme)
        await look_at_it_on_a_phone(watched)
        await watched.page.set_viewport_size({"width": 1280, "height": 900})
        await act_with_the_token_alone(watched, app, shop, topic)
        assert watched.elsewhere == []
        assert not any(TOKEN in request.url for request in watched.asked)
        assert watched.troubles == []
        await see_that_it_is_of_then(watched)
        await watched.page.close()
