"""The dashboard on a phone, in a real browser: short enough to scroll, with the plots first."""

import asyncio
import contextlib
import logging

import pytest
from playwright.async_api import Browser, expect

from aioshard.errors import NotDrainedError
from aioshard.testing import InMemoryBroker, TestClient
from aioshard.web.page import dashboard
from tests.support.browsing import Watched, served
from tests.tools.screenshots import load, shop, trouble

HIGHEST = 4_000


@pytest.mark.chaos
async def test_the_dashboard_works_on_a_phone(browser: Browser, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "aioshard.engine")
    app = shop()
    with contextlib.suppress(NotDrainedError):  # one of its records never ends
        async with (
            TestClient(app, broker=InMemoryBroker(partitions=8)) as client,
            served(dashboard(app)) as address,
        ):
            loading = asyncio.create_task(load(client), name="load")
            await trouble(client, app)
            watched = Watched(await browser.new_page(viewport={"width": 390, "height": 844}), f"{address}/")
            page = watched.page
            await page.goto(watched.address)
            await expect(page.locator("#findings")).to_contain_text("in Gateway.charge", timeout=15_000)
            await expect(page.locator("#failed tbody tr")).to_have_count(1)
            assert await page.evaluate("document.documentElement.scrollHeight") < HIGHEST
            tops = [await page.locator(part).bounding_box() for part in (".plots", "#attention")]
            assert tops[0] is not None
            assert tops[1] is not None
            assert tops[0]["y"] < tops[1]["y"]
            assert await page.evaluate("document.documentElement.scrollWidth") == 390

            rows = page.locator("#partitions tbody tr")
            await expect(rows).to_have_count(3)
            await page.get_by_role("button", name="Show all 24").click()
            await expect(rows).to_have_count(24)
            assert watched.troubles == []
            loading.cancel()
