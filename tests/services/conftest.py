"""A browser, if one is installed."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.support.browsing import open_browser
from tests.support.chromium import ChromiumUnavailableError
from tests.support.requirements import skip_or_fail


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    try:
        async with open_browser() as opened:
            yield opened
    except ChromiumUnavailableError as missing:
        skip_or_fail("Chromium", missing)
