"""The jars of the broker: fetched once by Maven, or set in `AIOSHARD_KAFKA_LIBS`."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.provision import provide

PROJECT = Path(__file__).resolve().parents[2]
POM = PROJECT / "tests" / "support" / "broker" / "pom.xml"
DEFAULT_LIBS = PROJECT / "build" / "kafka" / "libs"
FETCH_TIMEOUT = 300.0


class BrokerUnavailableError(RuntimeError):
    """This machine cannot run a broker; the message says what is missing and how to get it."""


def kafka_libs() -> Path:
    """The folder of the broker's jars; fetches them with Maven when they are not there.

    Raises:
        BrokerUnavailableError: Java is missing, or the jars are and Maven cannot fetch them.
    """
    if shutil.which("java") is None:
        raise BrokerUnavailableError(
            "no `java` on PATH, needed to run a Kafka broker: install a JRE of version 17 or newer"
        )
    named = os.environ.get("AIOSHARD_KAFKA_LIBS")
    libs = Path(named) if named else DEFAULT_LIBS
    if (named and any(libs.glob("kafka_2.13-*.jar"))) or _current(libs):
        return libs
    if named:
        raise BrokerUnavailableError(
            f"AIOSHARD_KAFKA_LIBS={named} holds no kafka_2.13-*.jar: unset it, or run `make broker`"
        )
    libs.parent.mkdir(parents=True, exist_ok=True)
    with (libs.parent / "fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here at once
        if not _current(libs):
            _fetch(libs)
    return libs


def _current(libs: Path) -> bool:
    """Whether the folder was fetched for exactly this list of what is needed."""
    fetched_for = libs / POM.name
    return fetched_for.exists() and fetched_for.read_bytes() == POM.read_bytes()


def _fetch(libs: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise BrokerUnavailableError(
            f"the broker's jars are not in {libs} and no `mvn` is on PATH to fetch them: install Maven"
        )
    partial = libs.with_name("libs.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [maven, "-q", "-B", "-f", str(POM), "dependency:copy-dependencies"]
    command += ["-DincludeScope=runtime", f"-DoutputDirectory={partial}"]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT, check=False)
    if fetched.returncode != 0:
        raise BrokerUnavailableError(f"Maven could not fetch the broker's jars:\n{fetched.stdout}{fetched.stderr}")
    shutil.copyfile(POM, partial / POM.name)
    shutil.rmtree(libs, ignore_errors=True)
    partial.rename(libs)


def main() -> int:
    """Fetches the jars; without Java or Maven says so, which is an error only where `CI` is set."""
    return provide("Kafka broker", kafka_libs, BrokerUnavailableError)


if __name__ == "__main__":
    sys.exit(main())
