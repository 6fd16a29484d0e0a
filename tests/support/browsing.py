"""Debian's Chromium, driven by playwright."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright
from starlette.types import ASGIApp

from tests.support.chromium import browser


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """A browser without a window, and without a network beyond this machine.

    Raises:
        ChromiumUnavailableError: There is none.
    """
    program = browser()
    options = [
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--disable-background-networking",
    ]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # as root it refuses its own sandbox; the pages are our own
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield opened
        finally:
            await opened.close()


@contextlib.asynccontextmanager
async def served(application: ASGIApp) -> AsyncIterator[str]:
    """The address of an application that is served in this event loop, without a slash at its end."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="web server")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


MOVED = """([plot, wanted, drawn]) => {
  const svg = document.querySelector(`#plot-${plot} svg`);
  const now = svg.querySelector("path.line").getAttribute("d");
  return Number(svg.dataset.points) >= wanted && now !== drawn && now.includes("L");
}"""


BROKEN = """([selector, longest]) => [...document.querySelectorAll(selector)].flatMap((one) => {
  if (!one.checkVisibility()) return [];
  const range = document.createRange();
  const texts = [...one.childNodes].filter((node) => node.nodeType === 3);
  return texts.flatMap((text) => [...text.data.matchAll(/[\\w.]+/g)].filter((word) => {
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return word[0].length <= longest && new Set([...range.getClientRects()].map((box) => box.top)).size > 1;
  }).map((word) => word[0]));
})"""


async def broken_words(page: Page, selector: str, longest: int = 40) -> list[str]:
    """The names of visible elements, at most *longest* characters each, that do not stand on one line."""
    words: list[str] = await page.evaluate(BROKEN, [selector, longest])
    return words


TOO_PALE = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((n) => n / 255)
    .map((n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4))
    .reduce((sum, n, at) => sum + n * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (parts(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility() &&
      [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())).map((one) => {
    const style = getComputedStyle(one);
    const written = one instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(written), light(behind(one))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), one.outerHTML.slice(0, 80)];
  }).filter(([ratio]) => ratio < 4.5);
}"""


async def pale_texts(page: Page) -> list[list[object]]:
    """Texts that do not stand out from what is behind them (4.5 : 1), each with its contrast."""
    texts: list[list[object]] = await page.evaluate(TOO_PALE)
    return texts


class Watched:
    """A page, with all that it said and asked for.

    Attributes:
        address: Of the page, with the slash at its end; what is below it is the page's own.
        troubles: Warnings and errors of the console, and exceptions that nobody caught.
        asked: Every request.
    """

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.troubles: list[str] = []
        self.asked: list[Request] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("request", self._asks)

    def _asks(self, request: Request) -> None:
        self.asked.append(request)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.troubles.append(f"{message.type}: {message.text}")

    @property
    def elsewhere(self) -> list[str]:
        """Return the requests to other origins."""
        return [request.url for request in self.asked if not request.url.startswith(self.address)]

    async def points(self, plot: str) -> int:
        return int(await self.page.locator(f"#plot-{plot} svg").get_attribute("data-points") or "0")

    async def moved(self, plot: str, by: int) -> None:
        """Wait until a plot has *by* more points, and its line is redrawn through several."""
        line = self.page.locator(f"#plot-{plot} svg path.line").first
        given = [plot, await self.points(plot) + by, await line.get_attribute("d")]
        await self.page.wait_for_function(MOVED, arg=given)

    def row(self, table: str, text: str) -> Any:
        return self.page.locator(f"#{table} tbody tr").filter(has_text=text)
