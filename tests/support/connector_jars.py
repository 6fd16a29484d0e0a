"""The jars of Spark's own Kafka connector: fetched once by Maven, or set in `AIOSHARD_CONNECTOR_JARS`."""

import fcntl
import os
from pathlib import Path

from tests.support.maven import copy_artifact
from tests.support.paths import PROJECT

ARTIFACTS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
DEFAULT_JARS = PROJECT / "build" / "connector"


class ConnectorUnavailableError(RuntimeError):
    """This machine does not have the connector; the message says what is missing and how to get it."""


def connector_jars() -> list[Path]:
    """The connector's jars; fetches them with Maven when they are not there.

    Raises:
        ConnectorUnavailableError: They are not there, and Maven is missing or cannot fetch them.
    """
    named = os.environ.get("AIOSHARD_CONNECTOR_JARS")
    directory = Path(named) if named else DEFAULT_JARS
    wanted = [
        directory / f"{name}-{version}.jar" for _, name, version in (artifact.split(":") for artifact in ARTIFACTS)
    ]
    missing = [path.name for path in wanted if not path.exists()]
    if missing and named:
        raise ConnectorUnavailableError(
            f"AIOSHARD_CONNECTOR_JARS={named} holds no {missing[0]}: unset it, or run `make connector`"
        )
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "fetch.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here concurrently
            for artifact, path in zip(ARTIFACTS, wanted, strict=True):
                if not path.exists():
                    _fetch(artifact, path)
    return wanted


def _fetch(artifact: str, path: Path) -> None:
    partial = path.parent / "partial"
    copy_artifact(artifact, partial, ConnectorUnavailableError)
    (partial / path.name).rename(path)
    partial.rmdir()
