"""The page of the AsyncAPI document in a real browser."""

import pytest
from fastapi import FastAPI
from playwright.async_api import Browser, expect
from pydantic import BaseModel

from aioshard import App, Record
from aioshard.web import asyncapi_route
from tests.support.browsing import Watched, served


class Invoice(BaseModel):
    """An invoice with its total."""

    total_in_cents: int


def make_app() -> App:
    app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")

    @app.consume("orders", publish_to="invoices")
    async def on_order(record: Record) -> Invoice:
        return Invoice(total_in_cents=len(record.value or b""))

    return app


@pytest.mark.parametrize("width", [1280, 390])
async def test_the_page_shows_inputs_and_outputs(browser: Browser, width: int) -> None:
    api = FastAPI(routes=[asyncapi_route(make_app(), title="Billing & co")])
    async with served(api) as address:
        page = await browser.new_page(viewport={"width": width, "height": 900})
        watched = Watched(page, f"{address}/asyncapi/")
        await page.goto(f"{address}/asyncapi")

        await expect(page).to_have_title("Billing & co")
        for text in ("orders", "invoices", "total_in_cents", "on_order"):
            await expect(page.get_by_text(text).first).to_be_attached()
        assert watched.troubles == []
        assert watched.elsewhere == [f"{address}/asyncapi"]  # which redirects
        await page.close()
