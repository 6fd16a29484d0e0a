"""Dead letters on the dashboard in a real browser: found, seen in full, tried, edited and sent back."""

import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from aioshard import Settings
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.web import dashboard
from tests.kafka.faults.support import until
from tests.services.dead_letter_shop import REFERENCE, TOKEN, Shop, open_shop
from tests.support.brokers import SharedKafka
from tests.support.browsing import Watched, broken_words, pale_texts, served

MANY = 50_000
SOME = 60
SLOW = 30_000
"""Milliseconds for something that reads all dead letters."""
OUTSIDE = """(width) => [...document.querySelectorAll("#dead-letters *, #letter *")].filter((one) =>
    one.checkVisibility() && !one.closest("thead, pre") && one.getBoundingClientRect().right > width + 0.5
  ).map((one) => one.outerHTML.slice(0, 80))"""


class Section:
    """The section of dead letters on a page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.rows = page.locator("#letters tbody tr")
        self.count = page.locator("#letters-count")
        self.jobs = page.locator("#letters-jobs")
        self.dialog = page.locator("#letter")
        self.outcome = page.locator("#letter-outcome")

    async def read(self) -> None:
        await self.page.get_by_role("button", name="Read the newest").click()

    async def unlock(self) -> None:
        await self.page.get_by_role("button", name="Unlock actions").click()
        await self.page.get_by_label("Token").fill(TOKEN)
        await self.page.keyboard.press("Enter")
        await expect(self.page.locator("#ask")).to_be_hidden()

    async def unfold(self) -> None:
        if await self.page.locator("#letters-filters").get_attribute("open") is None:
            await self.page.locator("#letters-filters summary").click()

    async def filter(self, **values: str) -> None:
        """Set filters, by the names of their labels."""
        await self.unfold()
        for label, value in values.items():
            await self.page.locator("#letters-form").get_by_label(label).fill(value)
        await self.page.get_by_role("button", name="Apply").click()

    async def clear(self) -> None:
        await self.unfold()
        await self.page.get_by_role("button", name="Clear").click()

    def row(self, text: str) -> Locator:
        return self.rows.filter(has_text=text).first

    async def open(self, text: str) -> None:
        await self.row(text).get_by_role("button", name="Open").click()
        await expect(self.dialog).to_be_visible()

    async def close(self) -> None:
        await self.page.keyboard.press("Escape")
        await expect(self.dialog).to_be_hidden()

    def button(self, name: str | re.Pattern[str]) -> Locator:
        return self.page.locator("#dead-letters").get_by_role("button", name=name)

    async def names(self) -> list[str]:
        return await self.rows.locator(".name strong").all_inner_texts()


async def opened(browser: Browser, address: str, width: int = 1280) -> tuple[Watched, Section]:
    watched = Watched(await browser.new_page(viewport={"width": width, "height": 900}), address)
    watched.page.set_default_timeout(SLOW)
    await watched.page.goto(watched.address)
    return watched, Section(watched.page)


async def done(shop: Shop, kafka: SharedKafka) -> set[int]:
    """The offsets of the records whose dead letters are done, as another reader sees it."""
    async with DeadLetterTopic.opened(Settings(bootstrap_servers=kafka.bootstrap), f"{shop.topic}.dlt") as letters:
        await letters.fetch_progress()
        return {letter.original.offset async for letter in letters.dead_letters(Filters(done=True))}


async def sent(shop: Shop, kafka: SharedKafka) -> list[int]:
    """The orders that were sent back to their topic."""
    return [json.loads(record.value or b"")["id"] for record in await kafka.read(f"{shop.topic}.orders")]


# 50,000 dead letters ------------------------------------------------------------------


async def look_around_without_the_token(section: Section) -> None:
    await section.read()
    await expect(section.rows).to_have_count(25)
    await expect(section.rows.first).to_contain_text("DecodeError: lines.0.price: Field required")
    await expect(section.page.locator("#letters input[type=checkbox]")).to_have_count(0)
    await expect(section.page.locator("#letters-text")).to_be_disabled()
    await expect(section.page.locator("#dead-letters")).not_to_contain_text("article")


async def find(section: Section, topic: str) -> None:
    """Counts of all that match, filters and pages."""
    await expect(section.count).to_have_text("50,000 of 50,000, 0 done", timeout=SLOW)
    await section.button("error TimeoutError: 20,000").click()
    await expect(section.count).to_have_text("20,000 of 50,000, 0 done", timeout=SLOW)
    await expect(section.rows.filter(has_not_text="TimeoutError")).to_have_count(0)
    first = await section.names()
    await section.button("Older").click()
    await expect(section.page.locator("#letters-page")).to_have_text("Page 2")
    second = await section.names()
    assert len(set(first) | set(second)) == 50
    await section.button("Newer").click()
    await expect(section.page.locator("#letters-page")).to_have_text("Page 1")
    assert await section.names() == first

    await section.clear()
    await section.filter(Text="article 49979", Header="tenant=acme", Key="customer-379")
    await expect(section.count).to_have_text("1 of 50,000, 0 done", timeout=SLOW)
    await expect(section.rows.locator(".name strong")).to_have_text(f"{topic}.orders/3/49979")
    await section.clear()
    await expect(section.rows).to_have_count(25)


async def see_one_in_full(section: Section) -> None:
    await section.open("TimeoutError")
    await expect(section.page.locator("#letter-decoded")).to_contain_text(f'"reference": {REFERENCE}')
    await section.close()
    await section.open("DecodeError")
    await expect(section.page.locator("#letter-decoded")).to_contain_text(f'"reference": {REFERENCE}')
    fault = section.dialog.locator(".code-line", has=section.page.locator(".fault"))
    await expect(fault).to_have_text(re.compile(r"^\s+\{ ◂ price: Field required$"))
    await expect(section.page.locator("#letter-facts")).to_contain_text("customer-399")
    await expect(section.page.locator("#letter-headers")).to_contain_text("tenant")
    await section.dialog.get_by_role("button", name="Hex").click()
    await expect(section.page.locator("#letter-raw")).to_contain_text("0000  7b 22 69 64")
    await section.close()


async def try_and_edit(section: Section, shop: Shop, kafka: SharedKafka) -> None:
    """The handler runs, but nothing is published, and the dead letter stays due."""
    await section.open("LookupError")
    await section.dialog.get_by_role("button", name="Try").click()
    await expect(section.outcome).to_contain_text("LookupError: no rate for XBT")
    await section.page.get_by_text("Edit the value").click()
    value = section.page.get_by_label("New value")
    await value.fill((await value.input_value()).replace("XBT", "EUR"))
    await section.dialog.get_by_role("button", name="Try").click()
    await expect(section.outcome).to_contain_text("The handler has succeeded")
    await expect(section.outcome).to_contain_text(f"{shop.topic}.receipts")
    assert len(shop.runs) == 2
    assert await kafka.read(f"{shop.topic}.receipts") == []
    assert await done(shop, kafka) == set()

    await section.dialog.get_by_role("button", name="Send back").click()
    await section.page.get_by_role("button", name="Send 1 back").click()
    await expect(section.jobs).to_contain_text("1 of 1 dead letter", timeout=SLOW)
    assert await sent(shop, kafka) == [49_998]
    await expect(section.rows.filter(has_text="done")).to_have_count(1)


async def send_a_selection(section: Section, shop: Shop, kafka: SharedKafka) -> None:
    timeouts = section.rows.filter(has_text="TimeoutError")
    for number in range(3):
        await timeouts.nth(number).get_by_role("checkbox").check()
    await section.button("Send 3 back").click()
    await expect(section.page.locator("#ask-text")).to_contain_text(f"{shop.topic}.orders (3)", timeout=SLOW)
    await section.page.get_by_role("button", name="Cancel").click()
    assert len(await sent(shop, kafka)) == 1
    await section.jobs.get_by_role("button", name="Send back").click()
    await section.page.get_by_role("button", name="Send 3 back").last.click()
    await expect(section.jobs).to_contain_text("3 of 3 dead letters")
    await expect(section.rows.filter(has_text="done")).to_have_count(4)
    await expect(section.count).to_have_text("50,000 of 50,000, 4 done", timeout=SLOW)


async def stop_sending(section: Section, shop: Shop, kafka: SharedKafka) -> None:
    """The others stay unsent and due."""
    await section.filter(Error="TimeoutError")
    await expect(section.count).to_have_text("20,000 of 50,000, 3 done", timeout=SLOW)
    await section.button("Send all 19,997 that match back").click()
    await section.page.get_by_role("button", name="Send 19,997 back", exact=True).click(timeout=SLOW)
    await section.jobs.get_by_role("button", name="Stop").click()
    stopped = section.jobs.get_by_text(re.compile(r"^Stopped: "))
    await expect(stopped).to_be_visible(timeout=SLOW)
    figure = re.match(r"Stopped: ([\d,]+) of 19,997", await stopped.inner_text())
    assert figure is not None
    now = await sent(shop, kafka)
    assert int(figure[1].replace(",", "")) + 4 == len(now) == len(set(now)) < 20_000
    assert await done(shop, kafka) == set(now)


async def see_it_as_a_second_operator(browser: Browser, address: str) -> None:
    watched, section = await opened(browser, address)
    await section.read()
    await expect(section.rows.filter(has_text="done")).to_have_count(4)
    await section.unlock()
    await expect(section.jobs).to_contain_text("Stopped: ")
    assert watched.troubles == []


@pytest.mark.chaos
async def test_operators_work_on_many_dead_letters(
    kafka: SharedKafka, topic: str, group: str, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aioshard.engine")
    async with open_shop(kafka, topic, group, MANY) as (shop, address):
        watched, section = await opened(browser, address)
        await look_around_without_the_token(section)
        await section.unlock()
        await find(section, topic)
        await see_one_in_full(section)
        await try_and_edit(section, shop, kafka)
        await send_a_selection(section, shop, kafka)
        await stop_sending(section, shop, kafka)
        await see_it_as_a_second_operator(browser, address)
        assert watched.troubles == []
        assert watched.elsewhere == []
        assert not any("XBT" in request.url or TOKEN in request.url for request in watched.asked)


# Appearance ---------------------------------------------------------------------------


@pytest.fixture
async def shop_and_address(
    kafka: SharedKafka, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[Shop, str]]:
    caplog.set_level(logging.CRITICAL, "aioshard.engine")
    async with open_shop(kafka, topic, group, SOME) as opened_shop:
        yield opened_shop


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
async def test_dead_letters_fit_on_each_screen(
    browser: Browser, shop_and_address: tuple[Shop, str], width: int, scheme: Literal["light", "dark"]
) -> None:
    _, address = shop_and_address
    watched, section = await opened(browser, address, width)
    page = section.page
    await page.emulate_media(color_scheme=scheme)
    await section.read()
    await section.unlock()
    await expect(section.count).to_have_text("60 of 60, 0 done")
    await page.locator("#letters-filters summary").click()
    await section.rows.first.get_by_role("checkbox").check()
    await expect(page.locator("#toast")).to_be_hidden()

    assert await page.evaluate("document.documentElement.scrollWidth") == width
    assert await page.evaluate(OUTSIDE, width) == []
    assert await pale_texts(page) == []
    assert await broken_words(page, "#dead-letters *", longest=20) == []

    await section.open("DecodeError")
    await page.get_by_text("Edit the value").click()
    await section.dialog.get_by_role("button", name="Try").click()
    await expect(section.outcome).to_contain_text("DecodeError")
    assert await page.evaluate(OUTSIDE, width) == []
    assert await page.evaluate("(one => one.scrollWidth - one.clientWidth)(document.querySelector('#letter'))") <= 0
    assert await pale_texts(page) == []
    assert watched.troubles == []


async def test_dead_letters_are_reached_with_the_keyboard(browser: Browser, shop_and_address: tuple[Shop, str]) -> None:
    shop, address = shop_and_address
    watched, section = await opened(browser, address)
    page = section.page
    await section.unlock()
    await page.locator("#letters-read").focus()
    await page.keyboard.press("Enter")
    await expect(section.rows).to_have_count(25)
    await expect(section.count).to_have_text("60 of 60, 0 done")
    await page.locator("#letters-all").focus()
    await page.keyboard.press("Space")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")
    await expect(section.button("Send 25 back")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("#ask-cancel")).to_be_focused()
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(section.jobs).to_contain_text("25 of 25 dead letters")
    await expect(section.count).to_contain_text("25 done", timeout=SLOW)

    await section.rows.last.get_by_role("button", name="Open").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#letter-close")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(section.rows.last.get_by_role("button", name="Open")).to_be_focused()
    assert watched.troubles == []
    assert shop.runs != []


async def test_a_transform_is_chosen_and_its_effect_is_shown_first(
    browser: Browser, shop_and_address: tuple[Shop, str], kafka: SharedKafka
) -> None:
    shop, address = shop_and_address
    _, section = await opened(browser, address)
    await section.unlock()
    await section.read()
    await section.page.locator("#letters-transform").select_option("tests.services.dead_letter_shop:in_euro")
    await section.button(re.compile("^Send all")).click()
    await expect(section.page.locator("#ask-text")).to_contain_text("36 are changed, 24 left alone, and 0 fail")
    await section.page.get_by_role("button", name="Send 60 back", exact=True).click()
    await expect(section.jobs).to_contain_text("36 of 60 dead letters")
    await expect(section.jobs).to_contain_text("24 left alone")
    orders = [json.loads(record.value or b"") for record in await kafka.read(f"{shop.topic}.orders")]
    assert {order["currency"] for order in orders} == {"EUR"}
    assert len(orders) == 36


async def test_a_value_that_was_not_edited_is_sent_as_it_is(
    browser: Browser, shop_and_address: tuple[Shop, str], kafka: SharedKafka
) -> None:
    """Its line ends too, which browsers replace in a value that is edited."""
    shop, address = shop_and_address
    _, section = await opened(browser, address)
    await section.unlock()
    await section.read()
    await section.open("TimeoutError")
    await section.page.get_by_text("Edit the value").click()
    await section.dialog.get_by_role("button", name="Send back").click()
    await section.page.get_by_role("button", name="Send 1 back").click()
    await expect(section.jobs).to_contain_text("1 of 1 dead letter")
    (record,) = await kafka.read(f"{shop.topic}.orders")
    assert (record.value or b"").endswith(b"\r\n")


async def test_payloads_stay_hidden_and_parked_keys_are_released(
    browser: Browser, shop_and_address: tuple[Shop, str], kafka: SharedKafka
) -> None:
    shop, address = shop_and_address
    hiding = Shop(kafka.bootstrap, shop.app.group_id, shop.topic, shows=False)
    async with served(dashboard(hiding.app, token=TOKEN)) as hidden_address:
        watched, section = await opened(browser, f"{hidden_address}/")
        await section.unlock()
        await section.read()
        await section.open("DecodeError")
        await expect(section.dialog).to_contain_text("set show_keys and show_payloads to see them")
        await expect(section.dialog).to_contain_text("lines.0.price")
        for secret in ("customer-", "article", "acme"):
            await expect(section.dialog).not_to_contain_text(secret)
            await expect(section.page.locator("#dead-letters")).not_to_contain_text(secret)
        assert watched.troubles == []

    watched, section = await opened(browser, address)
    page = section.page
    await section.unlock()
    await shop.park_bills(kafka)
    await page.locator("#letters-topic").select_option(f"{shop.topic}.park")
    await section.read()
    await expect(section.count).to_have_text("1 key with 2 records")
    parked = watched.row("letters-parked", "account-7")
    await parked.get_by_role("button", name="Drop the first").click()
    await page.get_by_role("button", name="Drop the record").click()
    await expect(section.count).to_have_text("1 key with 1 record")
    shop.is_down = False
    await parked.get_by_role("button", name=re.compile("^Release ")).click()
    await expect(page.locator("#toast")).to_contain_text("will run the key again")
    await until(lambda: shop.app.statistics().handlers[1].processed == 1, shop.app.explain)
    await section.read()
    await expect(section.count).to_have_text("0 keys with 0 records")
    assert watched.troubles == []
