"""`aioshard top`: running processes in a terminal, several as one."""

import concurrent.futures
import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.asking import HealthServer
from aioshard.cli.exit_codes import UNHEALTHY
from aioshard.cli.top_state import Frame, History, ask

__all__ = ["command"]

_LOOKS_EVERY = 0.05
"""Seconds between two looks at the keys while an answer is waited for."""

Pause = Callable[[float, Callable[[], bool]], bool]
"""Waits for so many seconds, or until something is the case; whether the user wants to end."""


@click.command()
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print one frame, of two looks, and end.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)
@options.as_json("each frame")
def command(urls: Sequence[str], *, interval: float, once: bool, timeout: float, as_json: bool) -> int:
    """Show running processes in the terminal, several as one.

    URL is the base of a health server, such as http://127.0.0.1:8080; that of a supervisor stands for all of its
    workers. Rates are those between two looks. A process that does not answer is shown as such, and comes back. q or
    Ctrl-C ends. Where standard output is no terminal, one frame is printed. Ends with 3 when nobody has ever answered.
    """
    servers = [HealthServer(url, timeout=timeout) for url in dict.fromkeys(urls)]
    watch = _Watch(servers, interval)
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            watch.print_json(most=1 if once else None)
        elif once or not sys.stdout.isatty():
            watch.print_once()
        else:
            watch.live()
    if watch.history.answered:
        return 0
    for finding in watch.latest.findings if watch.latest is not None else ():
        click.echo(f"Error: {finding['sentence']}", err=True)
    return UNHEALTHY


class _Watch:
    """Frame after frame."""

    def __init__(self, servers: Sequence[HealthServer], interval: float) -> None:
        self.history = History()
        self.latest: Frame | None = None
        self._servers = servers
        self._interval = interval

    def _look(self) -> Frame:
        self.latest = self.history.frame(ask(self._servers), time.time())
        return self.latest

    def _compared(self) -> Frame:
        """A frame with rates: of a second look, where the first was answered."""
        self._look()
        if self.history.answered:
            time.sleep(self._interval)
        return self._look()

    def print_json(self, most: int | None) -> None:
        """Print frames, one on each line."""
        if most is not None:
            click.echo(json.dumps(self._compared().asdict()))
            return
        while True:
            click.echo(json.dumps(self._look().asdict()))
            time.sleep(self._interval)

    def print_once(self) -> None:
        """Print one frame, with all that there is."""
        from rich.console import Console  # noqa: PLC0415 - imported on use

        from aioshard.cli.top_view import View  # noqa: PLC0415

        Console().print(View(self._compared()))

    def live(self) -> None:
        """Show frames until the user wants to end."""
        from rich.console import Console  # noqa: PLC0415 - imported on use
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        from aioshard.cli.top_view import View  # noqa: PLC0415

        console = Console()
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            Live(Text("asking …"), console=console, screen=True, auto_refresh=False) as live,
            _keys() as pause,
        ):
            while True:
                looked = pool.submit(self._look)
                began = time.monotonic()
                if pause(3600.0, looked.done):
                    return
                live.update(View(looked.result(), console.size.height), refresh=True)
                if pause(max(self._interval - (time.monotonic() - began), 0.0), lambda: False):
                    return


@contextlib.contextmanager
def _keys() -> Iterator[Pause]:
    """A pause that `q` ends, where standard input is a terminal."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield _sleep
        return
    import termios  # noqa: PLC0415 - not there on Windows
    import tty  # noqa: PLC0415

    before: Any = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)  # a key counts without Enter; Ctrl-C stays a signal
    try:
        yield _listen
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(seconds: float, until: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not until():
        time.sleep(min(left, _LOOKS_EVERY))
    return False


def _listen(seconds: float, until: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not until():
        ready, _, _ = select.select([sys.stdin], [], [], min(left, _LOOKS_EVERY))
        if ready and ((typed := os.read(sys.stdin.fileno(), 1024)) == b"" or b"q" in typed.lower()):
            return True
    return False
