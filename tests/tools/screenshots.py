"""`make screenshots`: the pictures of the dashboard, and some of the documentation.

The dashboard is that of an app with some of all that can go wrong. The app runs on the in-memory broker; what it shows
is what happens there. `python -m tests.tools.screenshots pages` takes those of the documentation only.
"""

import asyncio
import contextlib
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, cast

from PIL import Image
from playwright.async_api import Browser

from aioshard import App, DeadLetter, Record, Retry
from aioshard.errors import NotDrainedError
from aioshard.kafka.embedded import EmbeddedBroker
from aioshard.testing import InMemoryBroker, TestClient
from aioshard.web import dashboard, serve_health
from tests.kafka.faults.support import until
from tests.services.dead_letter_shop import Order
from tests.support.browsing import open_browser, served
from tests.support.paths import PROJECT
from tests.tools.site import application, build

PICTURES = PROJECT / "docs" / "images"

_SECONDS = 75.0
"""For which the app runs before its picture is taken: enough for plots that show something."""
_GROUP_SECONDS = 8.0
"""The same for the picture of a group, in which nothing is plotted."""
_MOVING_SECONDS = 5.0
"""The same for a page of the documentation, whose picture may be moving: this is in its midst."""
_TOKEN = "only-for-these-pictures"
_BUSY = 0.004
"""Seconds between two records of a steady load."""


def shop() -> App:
    """The app, as if it were installed where the pictures say."""
    source = Path(__file__).with_name("pictured_shop.py").read_text()
    module: dict[str, Any] = {"__name__": "shop"}
    exec(compile(source, "/app/shop.py", "exec"), module)
    return cast("App", module["app"])


async def load(client: TestClient) -> None:
    """Publish until cancelled."""
    chance = random.Random(7)
    while True:
        for _ in range(3 + int(3 * chance.random())):
            key = f"customer-{int(400 * chance.random() ** 2)}"
            await client.publish("orders", b"{}", key=key)
            await client.publish("clicks", b"{}", key=f"visitor-{chance.randrange(900)}")
            if chance.random() < 0.1:
                await client.publish("invoices", b"{}", key=f"account-{chance.randrange(60)}")
        if chance.random() < 0.002:
            await client.publish("clicks", b"broken", key="visitor-1")
        await asyncio.sleep(_BUSY * (4 + 3 * chance.random()))


async def trouble(client: TestClient, app: App) -> None:
    """Some of all that can go wrong."""
    await client.publish("orders", b"never answered", key="customer-477", partition=3)
    await client.publish("orders", b"no customer", key="customer-4711", partition=5)
    for number in range(3):
        await client.publish("invoices", b"locked", key=f"account-{number + 900}")
        await client.publish("invoices", b"{}", key=f"account-{number + 900}")
    for _ in range(40):
        await client.publish("orders", b"{}", key="customer-477", partition=3)
    app.pause("invoices", 2, why="the ledger is being migrated")


async def shoot(browser: Browser, address: str, seconds: float, *, full: bool) -> None:
    """Open the page in each way, let it draw for a while, and take the pictures."""
    ways: dict[str, tuple[int, int, Literal["light", "dark"]]] = {
        "dashboard-light": (1280, 1500, "light"),
        "dashboard-dark": (1280, 1500, "dark"),
        "dashboard-phone": (390, 1500, "light"),
    }
    pages = {}
    for name, (width, height, scheme) in ways.items():
        page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        await page.goto(address)
        pages[name] = page
    await asyncio.sleep(seconds)
    PICTURES.mkdir(exist_ok=True)
    for name, page in pages.items():
        await page.locator("summary:visible").first.click()
        await page.evaluate("scrollTo(0, 0)")
        picture = PICTURES / f"{name}.png"
        await page.screenshot(path=picture, full_page=full)
        make_small(picture)


def make_small(picture: Path, method: Image.Quantize = Image.Quantize.FASTOCTREE) -> None:
    Image.open(picture).convert("RGB").quantize(256, method).save(picture, optimize=True)


async def take_group() -> None:
    """Run three processes' worth of apps, and take the picture of them and of one that does not answer."""
    broker = InMemoryBroker(partitions=8)
    async with contextlib.AsyncExitStack() as stack:
        browser = await stack.enter_async_context(open_browser())
        urls = ["http://127.0.0.1:8083"]
        apps = [App("billing") for _ in range(3)]
        for port, app in enumerate(apps, 8080):
            app.consume("orders", concurrency=16)(_slowly)
            await stack.enter_async_context(TestClient(app, broker=broker))
            await stack.enter_async_context(serve_health(app, host="127.0.0.1", port=port))
            urls.append(f"http://127.0.0.1:{port}")
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        for number in range(9_000):
            broker.publish("orders", b"{}", key=b"customer-%d" % (number % 900))
        await page.goto(await stack.enter_async_context(served(dashboard(apps[0], members=urls))))
        await asyncio.sleep(_GROUP_SECONDS)
        picture = PICTURES / "dashboard-group.png"
        await page.locator("#group-card").screenshot(path=picture)
        make_small(picture)


async def take_dead_letters() -> None:
    """Fail some orders, and take pictures of their dead letters, which are read over TCP, and of a dry run."""
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(EmbeddedBroker())
        for topic in ("orders", "orders.dlt"):
            await broker.create_topic(topic)
        app = App("billing", **broker.settings, auto_offset_reset="earliest", show_keys=True, show_payloads=True)
        app.consume("orders", retry=Retry(attempts=2), on_failure=DeadLetter("orders.dlt", breaker=None))(on_order)
        await stack.enter_async_context(app)
        for number in range(240):
            line = {"article": "tea", "price": 2.5} if number % 12 else {"article": "tea"}
            currency = ["EUR", "XBT", "EUR", "XTS"][number % 4]
            order = {"id": 7_000 + number, "currency": currency, "lines": [line]}
            await app.publish("orders", order, key=f"customer-{number}")
        browser = await stack.enter_async_context(open_browser())
        page = await browser.new_page(viewport={"width": 1280, "height": 1000})
        add_price.__module__ = "shop.fixes"  # as if it were installed where the pictures say
        routes = dashboard(app, token=_TOKEN, transforms=[add_price])
        await page.goto(await stack.enter_async_context(served(routes)))
        await until(lambda: app.statistics().handlers[0].dead_lettered == 140, app.explain)
        await page.get_by_role("button", name="Unlock actions").click()
        await page.get_by_label("Token").fill(_TOKEN)
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Read the newest").click()
        await page.locator("#letters-count").get_by_text("140 of 140").wait_for()
        for number in range(3):
            await page.locator("#letters input").nth(number).check()
        await page.locator("#toast").wait_for(state="hidden")
        await page.evaluate("document.querySelector('#dead-letters').scrollIntoView()")
        picture = PICTURES / "dashboard-dead-letters.png"
        await page.screenshot(path=picture, clip={"x": 0, "y": 55, "width": 1280, "height": 640})
        make_small(picture)
        await page.get_by_role("button", name="error DecodeError").click()
        broken = page.locator("#letters tbody tr").filter(has_text="DecodeError").first
        await broken.get_by_role("button", name="Open").click()
        await page.locator("#letter-transform").select_option(index=1)
        await page.locator("#letter-try").click()
        await page.locator("#letter-outcome .badge").wait_for()
        await page.set_viewport_size({"width": 1280, "height": 1400})
        picture = PICTURES / "dashboard-dead-letter.png"
        await page.locator("#letter").screenshot(path=picture)
        make_small(picture)


def add_price(record: Record) -> dict[str, Any] | None:
    """A transform: every line without a price gets one."""
    order: dict[str, Any] = json.loads(record.value or b"{}")
    return order | {"lines": [{"price": 1.0} | line for line in order["lines"]]}


async def take_pages() -> None:
    """Build the documentation, and take pictures of some of its pages."""
    ways: dict[str, tuple[str, int, Literal["light", "dark"]]] = {
        "landing-light": ("", 1280, "light"),
        "landing-phone": ("", 390, "dark"),
        "concepts-dark": ("concepts/", 1280, "dark"),
        "tutorial-phone": ("tutorial/", 390, "light"),
        "reference-light": ("reference/handlers/", 1280, "light"),
    }
    pictures = PICTURES / "pages"
    pictures.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        site = build(Path(directory))
        async with open_browser() as browser, served(application(site)) as address:
            for name, (path, width, scheme) in ways.items():
                page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                await page.goto(f"{address}/{path}")
                await asyncio.sleep(_MOVING_SECONDS)
                picture = pictures / f"{name}.png"
                await page.screenshot(path=picture)
                await page.close()
                make_small(picture, Image.Quantize.MEDIANCUT)


async def on_order(order: Order) -> dict[str, Any]:
    if order.currency != "EUR":
        raise LookupError(f"no rate for {order.currency}")
    return {"order": order.id, "total": sum(line.price for line in order.lines)}


async def _slowly(_: Record) -> None:
    await asyncio.sleep(0.1)


async def take(seconds: float, *, full: bool) -> None:
    """Run the app and take the pictures."""
    app = shop()
    broker = InMemoryBroker(partitions=8)
    async with (
        TestClient(app, broker=broker) as client,
        served(dashboard(app, token=_TOKEN)) as address,
        open_browser() as browser,
    ):
        loading = asyncio.create_task(load(client), name="load")
        await trouble(client, app)
        await client.revoke("orders", 1)
        await client.assign("orders", 1)
        await shoot(browser, address, seconds, full=full)
        loading.cancel()


def main() -> int:
    """Writes the pictures into docs/images."""
    logging.disable(logging.ERROR)
    if sys.argv[1:] != ["pages"]:
        with contextlib.suppress(NotDrainedError):  # one of its records never ends
            asyncio.run(take(float(sys.argv[1]) if len(sys.argv) > 1 else _SECONDS, full="full" in sys.argv))
        asyncio.run(take_group())
        asyncio.run(take_dead_letters())
    asyncio.run(take_pages())
    return 0


if __name__ == "__main__":
    sys.exit(main())
