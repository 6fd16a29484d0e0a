"""The attention section in a real browser: one card per cause, with buttons for the named records."""

import logging
import re

import pytest
from playwright.async_api import Browser, Locator, expect

from aioshard import App, Park, Record, Retry
from aioshard.testing import InMemoryBroker, TestClient
from aioshard.web.page import dashboard
from tests.support.browsing import Watched, served

TOKEN = "only-for-this-test"
PARTITIONS = 12
PER_PARTITION = 4
ONCE = Retry(attempts=1)


class Shop:
    """Handlers that fail until the ledger is up; each error names another customer."""

    def __init__(self) -> None:
        self.app = App("billing", stuck_after=1.0, shutdown_timeout=1.0, show_keys=True)
        self.is_up = False
        self.app.consume("orders", concurrency=8, retry=ONCE)(self.on_order)
        self.app.consume("transfers", retry=ONCE, shard_by=lambda _: "one shard")(self.on_transfer)
        park = Park("invoices.parked", delay=1_000.0)
        self.app.consume("invoices", retry=ONCE, on_failure=park)(self.on_invoice)

    async def on_order(self, record: Record) -> None:
        if not self.is_up:
            raise LookupError(f"customer {record.offset}-{record.partition} is unknown")

    async def on_transfer(self, record: Record) -> None:
        if record.value == b"broken":
            raise ValueError("not a transfer")

    async def on_invoice(self, _: Record) -> None:
        if not self.is_up:
            raise ConnectionError("the ledger is down")

    async def fill(self, client: TestClient) -> None:
        for number in range(PARTITIONS * PER_PARTITION):
            await client.publish("orders", b"{}", key=f"customer-{number}", partition=number % PARTITIONS)
        await client.publish("transfers", b"broken", partition=1)
        for number in range(2):
            await client.publish("invoices", b"{}", key=f"account-{number}", partition=0)


def card(watched: Watched, text: str) -> Locator:
    return watched.page.locator("#findings > li").filter(has_text=text)


async def see_one_card_for_equal_causes(watched: Watched) -> None:
    orders = card(watched, "LookupError")
    await expect(orders).to_have_count(1)
    await expect(orders.locator(".finding-head strong")).to_have_text("48 records in 12 partitions")
    sentence = re.compile(r"^The first, orders/\d+/0, halted .+ ago: LookupError: customer 0-\d+ is unknown\.$")
    await expect(orders.locator("> .said")).to_have_text(sentence)
    await expect(orders.locator("details > *:visible")).to_have_count(1)
    await orders.locator("summary").click()
    await expect(orders.locator(".further li")).to_have_count(47)
    await expect(orders.locator("details > .todo")).to_contain_text("app.retry_now('orders', ")


async def see_why_by_its_root(watched: Watched) -> None:
    """A partition with a halted record, and one whose record waits for that, both name the record and its error."""
    await expect(watched.row("partitions", "orders/3").locator(".why")).to_have_text(
        re.compile(r"^orders/3/0 halted .+ ago: LookupError: customer 0-3 is unknown\.$")
    )
    await expect(watched.row("partitions", "transfers/2").locator(".why")).to_have_text(
        "transfers/1/0 failed: ValueError: not a transfer."
    )
    transfers = card(watched, "not a transfer")
    await expect(transfers.locator(".finding-head strong")).to_have_text("1 record in 2 partitions", timeout=15_000)


async def act_on_the_card(watched: Watched, shop: Shop) -> None:
    """Retry, skip and release, with the token alone."""
    page = watched.page
    orders, transfers = card(watched, "LookupError"), card(watched, "not a transfer")
    invoices = card(watched, "the ledger is down")
    await expect(invoices.locator(".finding-head strong")).to_have_text("2 keys in 1 partition")
    await expect(page.locator("#findings button")).to_have_count(0)
    await page.get_by_role("button", name="Unlock actions").click()
    await page.get_by_label("Token").fill(TOKEN)
    await page.keyboard.press("Enter")

    shop.is_up = True
    await orders.get_by_role("button", name="Retry the first orders/").click()
    await expect(orders.locator(".finding-head strong")).to_have_text("47 records in 12 partitions")
    await invoices.get_by_role("button", name="Release the first invoices/0/").click()
    await expect(invoices.locator(".finding-head strong")).to_have_text("invoices/0")

    await transfers.get_by_role("button", name="Skip transfers/1/0").click()
    await page.get_by_role("button", name="Cancel").click()
    await expect(transfers).to_have_count(1)
    await transfers.get_by_role("button", name="Skip transfers/1/0").click()
    await page.get_by_role("button", name="Skip the record").click()
    await expect(transfers).to_have_count(0)
    assert shop.app.statistics().handlers[1].skipped == 1


async def lose_nothing_by_a_reload(watched: Watched, shop: Shop) -> None:
    first = shop.app.history()[0].at
    await watched.page.reload()
    for plot in ("rate", "lag", "age"):
        await expect(watched.page.locator(f"#plot-{plot} svg")).to_have_attribute("data-first", str(first))
    await expect(watched.page.locator("#plot-lag path.line")).to_have_attribute("d", re.compile("L"))


@pytest.mark.chaos
async def test_the_dashboard_shows_what_needs_attention(browser: Browser, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "aioshard.engine")
    shop = Shop()
    async with (
        TestClient(shop.app, broker=InMemoryBroker(partitions=PARTITIONS)) as client,
        served(dashboard(shop.app, token=TOKEN)) as address,
    ):
        await shop.fill(client)
        watched = Watched(await browser.new_page(viewport={"width": 1280, "height": 900}), f"{address}/")
        watched.page.set_default_timeout(10_000)
        await watched.page.goto(watched.address)
        await client.publish("transfers", b"{}", partition=2)
        await see_one_card_for_equal_causes(watched)
        await see_why_by_its_root(watched)
        await act_on_the_card(watched, shop)
        await lose_nothing_by_a_reload(watched, shop)
        assert watched.troubles == []
