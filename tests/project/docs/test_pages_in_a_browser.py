"""The pages of the built site in a real browser: nothing is cut off, fails, or is loaded from elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from playwright.async_api import Page, ViewportSize

from tests.support.browsing import Watched, broken_words, open_browser, served
from tests.support.chromium import ChromiumUnavailableError
from tests.support.requirements import skip_or_fail
from tests.tools.site import addresses, application


class Way(NamedTuple):
    """A window, and the scheme that its system prefers."""

    width: int
    scheme: Literal["light", "dark"]


WAYS = (Way(1280, "light"), Way(1280, "dark"), Way(390, "light"), Way(390, "dark"))
PICTURES_ARE_LOADED = """() => {
  for (const picture of document.images) picture.loading = "eager";
  return [...document.images].every((picture) => picture.complete);
}"""
SEEN = """() => ({
  scheme: document.body.dataset.mdColorScheme,
  width: Math.max(document.documentElement.scrollWidth, document.body.scrollWidth),
  missing: [...document.images].filter((picture) => !picture.naturalWidth).map((picture) => picture.src),
})"""


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_every_page_renders_without_errors_in_every_layout(site: Path) -> None:
    pages = addresses(site)

    assert len(pages) > 20
    assert await faults_of(site, pages, WAYS) == {}


@pytest.mark.timeout(300)
async def test_no_name_is_broken_in_a_table(site: Path) -> None:
    assert await faults_of(site, ["failures/", "settings/"], [Way(390, "light"), Way(1280, "light")]) == {}


async def faults_of(site: Path, pages: Sequence[str], ways: Sequence[Way]) -> dict[str, list[str]]:
    """All that is wrong, by the page and the way in which it is seen."""
    found: dict[str, list[str]] = {}
    try:
        async with open_browser() as browser, served(application(site)) as url:
            for way in ways:
                size: ViewportSize = {"width": way.width, "height": 900}
                async with await browser.new_context(viewport=size, color_scheme=way.scheme) as context:
                    for page in pages:
                        if faults := await _faults(await context.new_page(), f"{url}/", page, way):
                            found[f"/{page} {way.width} {way.scheme}"] = faults
    except ChromiumUnavailableError as error:
        skip_or_fail("Chromium", str(error))
    return found


async def _faults(opened: Page, address: str, page: str, way: Way) -> list[str]:
    watched = Watched(opened, address)
    await opened.goto(address + page)
    await opened.wait_for_function(PICTURES_ARE_LOADED)
    seen = await opened.evaluate(SEEN)
    broken = await broken_words(opened, ".md-typeset table code")
    await opened.close()
    faults = watched.troubles + [f"asked of elsewhere: {url}" for url in watched.elsewhere]
    faults += [f"not shown: {picture}" for picture in seen["missing"]]
    faults += [f"broken: {word}" for word in broken]
    if seen["width"] > way.width:
        faults.append(f"{seen['width']} pixels wide")
    if seen["scheme"] != {"light": "default", "dark": "slate"}[way.scheme]:
        faults.append(f"shown in the scheme {seen['scheme']}")
    return faults
