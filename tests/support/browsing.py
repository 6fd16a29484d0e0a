"""Debian's Chromium, driven by playwright."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import uvicorn
from playwright.async_api import Browser, async_playwright
from starlette.types import ASGIApp

from tests.support.chromium import browser

__all__ = ["open_browser", "served"]


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
