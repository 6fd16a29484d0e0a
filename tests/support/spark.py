"""One Spark session per test process, and a directory from which its workers import test apps."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.paths import PROJECT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start_java_quickly() -> None:
    """Make Spark's Java of this process and of those that it starts compile little: it halves their CPU time.

    Unlike `JDK_JAVA_OPTIONS`, Spark's own variables print nothing.
    """
    for variable in ("SPARK_LAUNCHER_OPTS", "SPARK_SUBMIT_OPTS"):
        os.environ.setdefault(variable, "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")


@contextmanager
def spark_session(modules: Path) -> "Iterator[SparkSession]":
    """A session with two cores and four partitions of shuffles; it is stopped at the end.

    Args:
        modules: Its workers import from here, and from this project. They know it when the session starts, and never
            again: what a test writes later has to be in this directory.
    """
    from aioshard.spark.session import local_session  # noqa: PLC0415 - pyspark only where a test needs it

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), str(modules), before]))
    try:
        session = local_session("local[2,4]", "tests")
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    try:
        yield session
    finally:
        session.stop()
