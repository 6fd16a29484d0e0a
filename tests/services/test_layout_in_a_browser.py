"""The layout of the dashboard in a real browser: what it counts, how wide its parts are, and where lines break."""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, Route, expect

from aioshard.errors import NotDrainedError
from aioshard.testing import InMemoryBroker, TestClient
from aioshard.web.page import dashboard
from tests.support.browsing import broken_words, served
from tests.tools.screenshots import load, shop, trouble

NARROW = """() => {
  const width = document.querySelector("main").clientWidth;
  const cards = [...document.querySelectorAll("main .card:not(.plot)")].filter((card) => card.checkVisibility());
  return cards.filter((card) => card.offsetWidth < 0.9 * width).map((card) => card.querySelector("h2").textContent);
}"""
LETTERS = {
    "cursor": None,
    "letters": [
        {
            "partition": 3,
            "offset": 0,
            "replayed": None,
            "record": {"topic": "clicks", "partition": 3, "offset": 0, "timestamp": 0.0, "key": "#61a0f67b"},
            "size": 2,
            "group": "billing",
            "handler": "on_invoice_created",
            "attempts": 2,
            "error": "DeadLetterRefusedError",
            "message": "the account is locked",
            "failed_at": 0.0,
        }
    ],
}


@pytest.fixture
async def page(browser: Browser, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Page]:
    """The dashboard of an app of which one record is halted, one hangs, and three keys are parked."""
    caplog.set_level(logging.CRITICAL, "aioshard.engine")
    app = shop()
    with contextlib.suppress(NotDrainedError):  # one of its records never ends
        async with (
            TestClient(app, broker=InMemoryBroker(partitions=8)) as client,
            served(dashboard(app)) as address,
        ):
            loading = asyncio.create_task(load(client), name="load")
            await trouble(client, app)
            opened = await browser.new_page(viewport={"width": 1280, "height": 900})
            await opened.goto(f"{address}/")
            await expect(opened.locator("#parked tbody tr")).to_have_count(3, timeout=15_000)
            await expect(opened.locator("#findings")).to_contain_text("in Gateway.charge", timeout=15_000)
            yield opened
            loading.cancel()


async def test_the_number_of_findings_is_that_of_the_cards(page: Page) -> None:
    counted = """() => [document.querySelector("#attention-count").textContent,
        String(document.querySelectorAll("#findings > li").length)]"""
    count, shown = await page.evaluate(counted)
    assert count == shown


async def test_a_parked_key_says_when_it_runs_again(page: Page) -> None:
    parked = page.locator("#findings > li").filter(has_text="the account is locked")
    await expect(parked.locator("> .said")).to_have_text(re.compile(r"runs again in (\d+ min )?\d+ s"))


async def test_no_part_leaves_half_the_page_empty(page: Page) -> None:
    assert await page.evaluate(NARROW) == []


async def test_no_word_is_broken_on_a_phone(page: Page) -> None:
    async def answer(route: Route) -> None:
        await route.fulfill(body=json.dumps(LETTERS), content_type="application/json")

    await page.route("**/dead-letters/page", answer)
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.get_by_role("button", name="Read the newest").click()
    await expect(page.locator("#letters tbody tr")).to_have_count(1)
    assert await broken_words(page, "main *", longest=24) == []
    assert await page.evaluate("document.documentElement.scrollWidth") == 390
