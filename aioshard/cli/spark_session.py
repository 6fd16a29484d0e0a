"""A Spark session for one command."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from aioshard.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["session"]


@contextlib.contextmanager
def session(master: str, app_dir: str) -> "Iterator[SparkSession]":
    """A session in which the app's module is found; it is stopped at the end."""
    sys.path.insert(0, str(Path(app_dir).resolve()))
    spark = local_session(master)
    try:
        yield spark
    finally:
        spark.stop()
