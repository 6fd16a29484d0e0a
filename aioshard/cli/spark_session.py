"""A Spark session for one command."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """The signals that came meanwhile; at the second one, the process ends.

    Left half-way, Spark's Java would not notice that nobody needs it: it would stay, and hold what it prints to.
    """
    from pyspark import java_gateway  # noqa: PLC0415 - imported on use

    asked: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def started(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(*arguments, **options)  # noqa: S603 - what PySpark starts
        processes.append(process)
        return process

    def on_signal(number: int, _: object) -> None:
        if asked:
            for process in processes:
                process.kill()
            os._exit(INTERRUPTED)
        asked.append(number)
        click.echo("Spark is starting: it ends when Spark stands; a second signal ends it at once.", err=True)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    starts = vars(java_gateway)["Popen"]
    vars(java_gateway)["Popen"] = started  # PySpark keeps the process to itself until it answers
    try:
        yield asked
    finally:
        vars(java_gateway)["Popen"] = starts
        for number, handler in before.items():
            signal.signal(number, handler)
