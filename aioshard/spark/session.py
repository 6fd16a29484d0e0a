"""The Spark session that the commands use, with checks that run before it starts.

PySpark is not imported until a session is requested.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from aioshard.errors import MissingExtraError, SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "DEFAULT_MASTER",
    "check_java",
    "check_packages",
    "check_speculation",
    "local_session",
    "register",
    "shuffle_partitions",
    "slots_of",
]

DEFAULT_MASTER = "local[*,4]"
"""All cores of this machine and up to four attempts per task; plain `local` fails on the first lost worker."""

_OLDEST_SPARK = (4, 2)
_FIRST_UNKNOWN_SPARK = (4, 3)
_OLDEST_JAVA = 17
_FIRST_UNKNOWN_PANDAS = 3
_JAVA_TIMEOUT = 60.0

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
        SettingsError: A version is not supported, Java is missing, the master is unusable, or speculation is on.

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
    wanted = dict(settings or {})
    check_speculation(wanted)
    remote = master.startswith("sc://")
    if not remote:
        check_java()
    local = master.startswith("local")
    if local:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

    from pyspark.sql import SparkSession  # noqa: PLC0415 - imported on use

    builder = SparkSession.builder.appName(app_name)
    builder = builder.remote(master) if remote else builder.master(master)
    chosen = {**_SETTINGS, **(_quiet() if local else {}), **(_LOCAL_SETTINGS if local else {}), **wanted}
    if remote:
        chosen = wanted  # the server's operator decides the rest
    for name, value in chosen.items():
        builder = builder.config(name, value)
    spark = _started(builder, master)
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
    from aioshard.spark.source.data_source import AioshardSource  # noqa: PLC0415 - imported on use

    spark.dataSource.register(AioshardSource)


def _started(builder: "SparkSession.Builder", master: str) -> "SparkSession":
    try:
        return builder.getOrCreate()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SettingsError(
            f"Spark did not start with master {master!r}: {reason}; expected is a master that this machine reaches, "
            f"such as {DEFAULT_MASTER!r}"
        ) from error


def _quiet() -> dict[str, str]:
    """Return settings that keep Spark's start-up output, such as its libraries' warnings, off the terminal."""
    configuration = Path(__file__).with_name("log4j2.properties")
    return {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={configuration.as_uri()}"}


# Compatibility checks -----------------------------------------------------------------


def slots_of(spark: "SparkSession", otherwise: int) -> int:
    """Return the number of tasks that run in parallel, or *otherwise* if a remote session does not expose it."""
    try:
        return max(int(spark.sparkContext.defaultParallelism), 1)
    except Exception:  # noqa: BLE001 - a remote session has no context and fails in several ways
        return max(otherwise, 1)


def shuffle_partitions(spark: "SparkSession") -> int:
    """Return the number of partitions that a shuffle of this session produces."""
    return int(spark.conf.get("spark.sql.shuffle.partitions", "4") or 4)


def check_packages() -> None:
    """Check that the Python packages Spark needs are installed in supported versions.

    Raises:
        MissingExtraError: A package is missing.
        SettingsError: A package has an unsupported version.
    """
    if any(importlib.util.find_spec(name) is None for name in ("pyspark", "pyarrow", "pandas")):
        raise MissingExtraError("Spark", "spark")
    found = version("pyspark")
    if not _OLDEST_SPARK <= _numbers(found) < _FIRST_UNKNOWN_SPARK:
        raise SettingsError(
            f"pyspark {found} is installed; expected is {_dotted(_OLDEST_SPARK)} or later, before "
            f"{_dotted(_FIRST_UNKNOWN_SPARK)}: install it with  pip install 'aioshard[spark]'"
        )
    found = version("pandas")
    if _numbers(found) >= (_FIRST_UNKNOWN_PANDAS,):
        raise SettingsError(
            f"pandas {found} is installed, with which Spark {version('pyspark')} does not work; expected is a version "
            f"before {_FIRST_UNKNOWN_PANDAS}: install it with  pip install 'pandas<{_FIRST_UNKNOWN_PANDAS}'"
        )


def check_java() -> None:
    """Check that Spark's Java is installed and recent enough.

    Raises:
        SettingsError: Java is missing, too old, or does not report its version.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    where = f"JAVA_HOME={home}" if home else "PATH"
    if java is None or not Path(java).exists():
        raise SettingsError(
            f"Spark needs Java {_OLDEST_JAVA} or later and {where} has none: install a Java runtime, on Debian with  "
            f"apt-get install openjdk-{_OLDEST_JAVA}-jre-headless"
        )
    try:
        asked = subprocess.run(  # noqa: S603 - the user's own Java
            [java, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"the Java of {where} cannot be run ({error}): Spark needs Java {_OLDEST_JAVA}") from error
    said = asked.stderr + asked.stdout
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None or int(found[1]) < _OLDEST_JAVA:
        what = said.strip().partition("\n")[0] if found is None else f"Java {found[1]}"
        raise SettingsError(
            f"the Java of {where} is {what!r}; Spark needs {_OLDEST_JAVA} or later: install it, or point "
            "JAVA_HOME at it"
        )


def check_speculation(settings: Mapping[str, str]) -> None:
    """Refuse speculative execution: it would run a handler twice in parallel for the same record.

    Raises:
        SettingsError: `spark.speculation` is on.
    """
    if settings.get("spark.speculation", "false").lower() == "true":
        raise SettingsError(
            "spark.speculation=true would run the same records twice at the same time, out of order: leave it off"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
