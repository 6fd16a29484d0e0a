"""A Spark session for one command."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aioshard.cli.exit_codes import INTERRUPTED
from aioshard.errors import SettingsError
from aioshard.spark.session import check_packages, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["session"]


@contextlib.contextmanager
def session(master: str, app_dir: str) -> "Iterator[SparkSession]":
    """A session in which the app's module is found; it is stopped at the end.

    A signal that comes before it stands ends the command as soon as it does.
    """
    sys.path.insert(0, str(Path(app_dir).resolve()))
    check_packages()
    with _interrupted_when_it_stands() as asked:
        try:
            spark = local_session(master)
        except SettingsError:
            if asked:  # a terminal sends it to every process that is part of the start
                raise KeyboardInterrupt from None
            raise
    try:
        if asked:
            raise KeyboardInterrupt
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _interrupted_when_it_stands() -> "Iterator[list[int]]":
    """Collect the signals that come meanwhile; the second one ends the process.

    An exception here would remove the file that Spark's Java writes when it is ready: it would stay, and keep the
    command's output open. When the process ends instead, Java reads the end of its input and ends too.
    """
    asked: list[int] = []

    def on_signal(number: int, _: object) -> None:
        if asked:
            os._exit(INTERRUPTED)
        asked.append(number)
        click.echo("Spark is starting: it ends when Spark stands; a second signal ends it at once.", err=True)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
