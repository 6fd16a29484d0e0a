"""The search of the built site in a real browser: the first hit for a common word is the expected page."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Page

from tests.support.browsing import open_browser, served
from tests.support.chromium import ChromiumUnavailableError
from tests.support.requirements import skip_or_fail
from tests.tools.site import application

WORDS = {
    "DLQ": ("glossary/", "dead-letters/"),
    "dead letter": ("dead-letters/",),
    "exactly-once": ("exactly-once/",),
    "lag": ("glossary/",),
    "backpressure": ("concepts/", "glossary/"),
    "troubleshooting": ("troubleshooting/",),
    "poison message": ("glossary/",),
    "idempotent": ("idempotence/",),
}
"""Search words, and the pages of which one must be the first hit."""
FIRST_HIT = """() => {
  const roots = [...document.querySelectorAll("*")].map((element) => element.shadowRoot).filter(Boolean);
  const links = roots.flatMap((root) => [...root.querySelectorAll("a[href*='?h=']")]);
  return links.length ? links[0].href : null;
}"""
HIT_WITHIN = 15_000
POLL = 50
STEADY = 10
"""All these looks in a row show one hit: results for the beginning of a word come and go while it is typed."""


@pytest.fixture
async def page(site: Path) -> AsyncIterator[Page]:
    try:
        async with open_browser() as browser, served(application(site)) as url:
            opened = await browser.new_page()
            await opened.goto(f"{url}/")
            yield opened
    except ChromiumUnavailableError as error:
        skip_or_fail("Chromium", str(error))


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_the_first_search_hit_is_the_expected_page(page: Page) -> None:
    await page.locator("[class*=md-search__button]").first.click()
    wrong = {}
    for word, fitting in WORDS.items():
        await page.keyboard.press("Control+a")
        await page.keyboard.type(word)
        found = await first_hit(page, word)
        if not found.startswith(fitting):
            wrong[word] = found

    assert wrong == {}


async def first_hit(page: Page, word: str) -> str:
    """The address of the first hit for this word, without the site."""
    asked, seen = "?h=" + word.replace(" ", "+"), [""]
    for _ in range(HIT_WITHIN // POLL):
        address = str(await page.evaluate(FIRST_HIT))
        seen = [*seen, address] if address == seen[-1] and asked in address else [address]
        if len(seen) == STEADY:
            return address.partition("//")[2].partition("/")[2]
        await page.wait_for_timeout(POLL)
    return "no hit"
