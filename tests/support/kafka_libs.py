"""The jars of the broker: fetched once by Maven, or set in `AIOSHARD_KAFKA_LIBS`.

The tests run on the newest Kafka, unless `AIOSHARD_KAFKA_VERSION` names another version.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from tests.support.paths import PROJECT

POM = PROJECT / "tests" / "support" / "broker" / "pom.xml"
JARS = PROJECT / "build" / "kafka"
"""Holds one folder for each version."""
FETCH_TIMEOUT = 300.0

NEWEST = "4.4.0"
"""Version that the tests run on by default."""
OLDER = "4.1.1"
"""Version that a part of the tests runs on too: see `make test-older-broker`."""

LIBS_VARIABLE = "AIOSHARD_KAFKA_LIBS"
VERSION_VARIABLE = "AIOSHARD_KAFKA_VERSION"

CLASS_ARCHIVE = "classes.jsa"
"""File beside the jars: the broker's classes in the form of one Java version, which loads them in less time."""


class BrokerUnavailableError(RuntimeError):
    """This machine cannot run a broker; the message says what is missing and how to get it."""


def kafka_libs(version: str | None = None) -> Path:
    """The folder of the broker's jars; fetches them with Maven when they are not there.

    Args:
        version: None for the version that the environment chooses.

    Raises:
        BrokerUnavailableError: Java is missing, or the jars are and Maven cannot fetch them.
    """
    if shutil.which("java") is None:
        raise BrokerUnavailableError(
            "no `java` on PATH, needed to run a Kafka broker: install a JRE of version 17 or newer"
        )
    if named := os.environ.get(LIBS_VARIABLE):
        return _named_libs(Path(named), version or os.environ.get(VERSION_VARIABLE) or "*")
    version = version or os.environ.get(VERSION_VARIABLE) or NEWEST
    libs = JARS / version
    if not _current(libs):
        JARS.mkdir(parents=True, exist_ok=True)
        with (JARS / "fetch.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here concurrently
            if not _current(libs):
                _fetch(version, libs)
    return libs


def chosen_kafka() -> str:
    """Say which broker the environment chooses: its version, or the folder of its jars."""
    named = os.environ.get(LIBS_VARIABLE)
    if named:
        return f"the jars in {named}"
    return os.environ.get(VERSION_VARIABLE) or NEWEST


def _named_libs(libs: Path, version: str) -> Path:
    jar = f"kafka_2.13-{version}.jar"
    if not any(libs.glob(jar)):
        raise BrokerUnavailableError(
            f"{LIBS_VARIABLE}={libs} holds no {jar}: unset it and run `make broker`, or name a folder that has it"
        )
    return libs


def _current(libs: Path) -> bool:
    """Whether the folder was fetched for exactly this list of packages."""
    fetched_for = libs / POM.name
    return fetched_for.exists() and fetched_for.read_bytes() == POM.read_bytes()


def _fetch(version: str, libs: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise BrokerUnavailableError(
            f"the jars of Kafka {version} are not in {libs} and no `mvn` is on PATH to fetch them: install Maven"
        )
    partial = libs.with_name("partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [maven, "-q", "-B", "-f", str(POM), "dependency:copy-dependencies"]
    command += [f"-Dkafka.version={version}", "-DincludeScope=runtime", f"-DoutputDirectory={partial}"]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT, check=False)
    if fetched.returncode != 0:
        raise BrokerUnavailableError(
            f"Maven could not fetch the jars of Kafka {version}:\n{fetched.stdout}{fetched.stderr}"
        )
    shutil.copyfile(POM, partial / POM.name)
    shutil.rmtree(libs, ignore_errors=True)
    partial.rename(libs)
