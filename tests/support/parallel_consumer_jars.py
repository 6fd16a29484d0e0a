"""The jars of Confluent's Parallel Consumer: fetched once by Maven."""

import fcntl
import shutil
import subprocess
from pathlib import Path

from tests.support.kafka_libs import FETCH_TIMEOUT
from tests.support.paths import PROJECT

POM = PROJECT / "tests" / "support" / "parallel_consumer" / "pom.xml"
JARS = PROJECT / "build" / "parallel-consumer"


class ParallelConsumerUnavailableError(RuntimeError):
    """This machine does not have it; the message says what is missing and how to get it."""


def parallel_consumer_jars() -> Path:
    """The folder of the jars; fetches them with Maven when they are not there.

    Raises:
        ParallelConsumerUnavailableError: Java is missing, or the jars are and Maven cannot fetch them.
    """
    if shutil.which("java") is None:
        raise ParallelConsumerUnavailableError("no `java` on PATH: install a JDK of version 17 or newer")
    fetched_for = JARS / POM.name
    JARS.mkdir(parents=True, exist_ok=True)
    with (JARS / "fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here concurrently
        if not fetched_for.exists() or fetched_for.read_bytes() != POM.read_bytes():
            _fetch(POM)
            shutil.copyfile(POM, fetched_for)
    return JARS


def _fetch(pom: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise ParallelConsumerUnavailableError(f"no `mvn` on PATH to fetch the jars of {pom}: install Maven")
    command = [maven, "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT, check=False)
    if fetched.returncode != 0:
        raise ParallelConsumerUnavailableError(f"Maven could not fetch {pom}:\n{fetched.stdout}{fetched.stderr}")
