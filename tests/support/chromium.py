"""A headless browser that opens pages without a network."""

import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
PAGE_TIMEOUT = 90.0
OFFLINE = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--disable-component-update"]


class ChromiumUnavailableError(RuntimeError):
    """This machine has no Chromium; the message says how to get it."""


class ChromiumFailedError(RuntimeError):
    """It ended with an error, or did not end in time."""


def browser() -> str:
    """The program, where PATH has it.

    Raises:
        ChromiumUnavailableError: It is missing.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise ChromiumUnavailableError(
            f"PATH has none of {', '.join(NAMES)}: install it, on Debian with `apt-get install chromium`"
        )
    return found


def take_screenshot(page: Path, picture: Path, *, width: int, height: int, dark: bool = False) -> None:
    """Open a page from the disk and write what it looks like as PNG.

    Raises:
        ChromiumUnavailableError: The browser is missing.
        ChromiumFailedError: It wrote nothing.
    """
    night = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    _run([*night, f"--window-size={width},{height}", f"--screenshot={picture}", page.absolute().as_uri()])
    if not picture.exists():
        raise ChromiumFailedError(f"the browser ended and wrote no {picture}")


def dump_page(page: Path) -> str:
    """The document of a page as the browser understood it.

    Raises:
        ChromiumUnavailableError: The browser is missing.
        ChromiumFailedError: It ended with an error.
    """
    return _run(["--dump-dom", page.absolute().as_uri()])


def _run(options: list[str]) -> str:
    program = browser()
    with tempfile.TemporaryDirectory(prefix="aioshard-chromium-") as profile:
        # As root it refuses its own sandbox; the pages are our own.
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *OFFLINE]
        try:
            ran = subprocess.run(
                [*command, f"--user-data-dir={profile}", *options],
                capture_output=True,
                text=True,
                timeout=PAGE_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise ChromiumFailedError(f"the browser did not end within {PAGE_TIMEOUT:g} s") from late
    if ran.returncode != 0:
        raise ChromiumFailedError(f"the browser ended with {ran.returncode}:\n{ran.stderr[-2_000:]}")
    return ran.stdout
