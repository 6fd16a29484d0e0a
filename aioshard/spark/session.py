"""The Spark session that the commands use, with checks that run before it starts.

PySpark is not imported until a session is requested.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aioshard.errors import MissingExtraError, SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER = "local[*,4]"
"""All cores of this machine and up to four attempts per task; plain `local` fails on the first lost worker."""

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.log.level": "ERROR",
}
"""Defaults, which the caller may override. Speculation is always refused: see `check_speculation`."""

_LOCAL_SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
    # Keep start-up output, such as the warnings of Spark's libraries, off the terminal.
    "spark.driver.extraJavaOptions": (
        f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
    ),
}


def local_session(
    master: str = DEFAULT_MASTER, app_name: str = "aioshard", *, settings: Mapping[str, str] | None = None
) -> "SparkSession":
    """Start a Spark session, or return the one this process already has.

    With a local master and no `PYSPARK_PYTHON`, workers run this interpreter. Spark's own default is the `python3` on
    the PATH, which may lack the packages.

    Args:
        master: The master in Spark's notation; `sc://…` connects to a Spark Connect server.
        app_name: The name in Spark's logs.
        settings: Spark settings (`spark.…`); they override the defaults of this function.

    Raises:
        MissingExtraError: PySpark, pyarrow or pandas is not installed.
        SettingsError: Java is missing, the master is unusable, or speculation is on.

    Example:
        ```python
        spark = local_session("local[2]")
        try:
            spark.range(3).count()
        finally:
            spark.stop()
        ```
    """
    check_packages()
    overrides = dict(settings or {})
    check_speculation(overrides)
    remote = master.startswith("sc://")
    local = master.startswith("local")
    if local:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

    from pyspark.sql import SparkSession  # noqa: PLC0415 - imported on use

    builder = SparkSession.builder.appName(app_name)
    builder = builder.remote(master) if remote else builder.master(master)
    # The operator of a remote server chooses its defaults.
    configuration: dict[str, bool | float | int | str | None] = {**overrides}
    if local:
        configuration = {**_LOCAL_SETTINGS, **configuration}
    if not remote:
        configuration = {**_SETTINGS, **configuration}
    try:
        spark = builder.config(map=configuration).getOrCreate()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SettingsError(
            f"Spark did not start with master {master!r} ({reason}): check the master, and that `java -version` is 17 "
            "or later; on Debian  apt-get install openjdk-17-jre-headless"
        ) from error
    if not remote:
        check_speculation({"spark.speculation": spark.sparkContext.getConf().get("spark.speculation", "false")})
    return spark


def register(spark: "SparkSession") -> None:
    """Register `format("aioshard")` with a session, including Spark Connect sessions.

    A session that starts in an environment with aioshard finds the format by itself. Call this for other sessions:
    a Spark Connect server whose environment differs from its workers', or a session started before the install.

    Args:
        spark: The session to register with.

    Example:
        ```python
        register(spark)
        spark.read.format("aioshard").options(bootstrap_servers="localhost:9092", topics="orders").load().show()
        ```
    """
    from aioshard.spark.source import AioshardSource  # noqa: PLC0415 - imported on use

    spark.dataSource.register(AioshardSource)


def slots_of(spark: "SparkSession", otherwise: int) -> int:
    """Return the number of tasks that run in parallel, or *otherwise* if a remote session does not expose it."""
    try:
        return max(int(spark.sparkContext.defaultParallelism), 1)
    except Exception:  # noqa: BLE001 - a remote session has no context and fails in several ways
        return max(otherwise, 1)


def check_packages() -> None:
    """Check that the Python packages of Spark are installed; the extra `spark` decides their versions.

    Raises:
        MissingExtraError: A package is missing.
    """
    if any(importlib.util.find_spec(name) is None for name in ("pyspark", "pyarrow", "pandas")):
        raise MissingExtraError("Spark", "spark")


def check_speculation(settings: Mapping[str, str]) -> None:
    """Refuse speculative execution: it would run a handler twice in parallel for the same record.

    Raises:
        SettingsError: `spark.speculation` is on.
    """
    if settings.get("spark.speculation", "false").lower() == "true":
        raise SettingsError(
            "spark.speculation=true would run the same records twice at the same time, out of order: leave it off"
        )
