"""Dead letters and parked records on the dashboard in a real browser, read from a real broker on request."""

import logging

import pytest
from playwright.async_api import Browser, expect

from aioshard import App, DeadLetter, Park, Record, Retry
from aioshard.web import dashboard
from tests.kafka.faults.support import until
from tests.support.brokers import SharedKafka
from tests.support.browsing import Watched, served

ONCE = Retry(attempts=1)


class Shop:
    """An app whose handlers divert every record while their ledger is down."""

    def __init__(self, bootstrap: str, group: str, topic: str, *, shows: bool = False) -> None:
        self.app = App(
            group,
            bootstrap_servers=bootstrap,
            auto_offset_reset="earliest",
            show_keys=shows,
            show_payloads=shows,
        )
        self.is_down = True
        self.app.consume(f"{topic}.orders", retry=ONCE, on_failure=DeadLetter(f"{topic}.dlt"))(self.on_record)
        self.app.consume(f"{topic}.bills", retry=ONCE, on_failure=Park(f"{topic}.park", delay=600))(self.on_record)

    async def on_record(self, _: Record) -> None:
        if self.is_down:
            raise ConnectionError("the ledger is down")


def diverted(app: App) -> int:
    return sum(handler.dead_lettered + handler.parked for handler in app.statistics().handlers)


async def read(browser: Browser, address: str) -> Watched:
    watched = Watched(await browser.new_page(viewport={"width": 1280, "height": 900}), f"{address}/")
    watched.page.set_default_timeout(15_000)
    await watched.page.goto(watched.address)
    await watched.page.get_by_role("button", name="Read the newest").click()
    return watched


@pytest.mark.chaos
async def test_the_dashboard_shows_messages(
    browser: Browser, kafka: SharedKafka, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aioshard")
    for name in ("orders", "bills", "dlt"):
        await kafka.create_topic(f"{topic}.{name}", 2)
    shop = Shop(kafka.bootstrap, group, topic)
    open_shop = Shop(kafka.bootstrap, group, topic, shows=True)
    async with served(dashboard(shop.app)) as address, served(dashboard(open_shop.app)) as open_address:
        async with shop.app:
            await kafka.produce(f"{topic}.orders", [(b"alice", b'{"total": 7}'), (b"alice", None)], 1)
            await kafka.produce(f"{topic}.bills", [(b"bob", b"<b>\xff</b>")], 0)
            await until(lambda: diverted(shop.app) == 3, shop.app.explain)

            hidden = await read(browser, address)
            await expect(hidden.row("messages", f"{topic}.orders/1/0")).to_contain_text("hidden: set show_payloads")
            await expect(hidden.page.locator("#messages")).to_contain_text("#")
            for secret in ("alice", "total", "bob"):
                await expect(hidden.page.locator("#messages")).not_to_contain_text(secret)

            watched = await read(browser, open_address)
            await expect(watched.page.locator("#messages-count")).to_have_text("3")
            order = watched.row("messages", f"{topic}.orders/1/0")
            await expect(order.locator("small")).to_have_text(f"b'alice' · in {topic}.dlt")
            await expect(order).to_contain_text("ConnectionError: the ledger is down")
            await expect(order.locator("pre")).not_to_be_visible()
            await order.locator("summary").click()
            await expect(order.locator("pre")).to_have_text('{\n  "total": 7\n}')
            await expect(watched.row("messages", f"{topic}.orders/1/1").locator("pre")).to_have_text("tombstone")
            await expect(watched.row("messages", f"{topic}.bills/0/0").locator("pre")).to_have_text(r"<b>\xff</b>")

            shop.is_down = False
            shop.app.release_parked(f"{topic}.bills", 0, 0)
            await until(lambda: shop.app.statistics().handlers[1].processed == 1, shop.app.explain)
        await watched.page.get_by_role("button", name="Read the newest").click()
        await expect(watched.page.locator("#messages-count")).to_have_text("2")

        await kafka.delete_topic(f"{topic}.dlt")
        await watched.page.get_by_role("button", name="Read the newest").click()
        await expect(watched.page.locator("#messages-error")).to_contain_text(f"{topic}.dlt")
        assert hidden.troubles == []
        assert watched.troubles == []
        assert watched.elsewhere == []
