"""One Spark session for all tests of a process."""

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark", "spark_session"]


@cache
def spark_session() -> "SparkSession":
    """The session of this process: two cores, four partitions; it ends with the process."""
    from aioshard.spark.session import local_session

    return local_session("local[2]", "tests")


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """The session; import this name in a conftest.py to have it."""
    pytest.importorskip("pyspark", reason="no Spark: install the extra spark")
    yield spark_session()
    spark_session().stop()
    spark_session.cache_clear()
