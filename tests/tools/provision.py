"""Fetch or install what the tests need besides Python: `python -m tests.tools.provision broker postgresql`.

Jars are fetched by Maven; programs are packages of Debian's, installed where the tests run as root. If that is not
possible, the tests that need them are skipped: it is an error only in CI.
"""

import asyncio
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

from tests.support import chromium, connector_jars, kafka, kafka_libs, postgresql, prometheus, schema_registry
from tests.support.requirements import provide

INSTALL = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends"]
UPDATE = ["apt-get", "update", "--quiet=2"]
INSTALL_TIMEOUT = 600.0

T = TypeVar("T")


def provide_broker() -> int:
    """Fetch the jars of both brokers, and of the chosen one; an exit code, as from all of these."""
    if os.environ.get(kafka_libs.LIBS_VARIABLE):
        return provide("Kafka broker", kafka_libs.kafka_libs, kafka_libs.BrokerUnavailableError)
    versions = dict.fromkeys([kafka_libs.chosen_kafka(), kafka_libs.NEWEST, kafka_libs.OLDER])
    codes = [
        provide(f"Kafka broker {version}", functools.partial(_broker, version), kafka_libs.BrokerUnavailableError)
        for version in versions
    ]
    return max(codes)


def _broker(version: str) -> Path:
    """Return the folder of a broker's jars; fetch them, and archive its classes, unless that was done."""
    libs = kafka_libs.kafka_libs(version)
    archive = libs / kafka_libs.CLASS_ARCHIVE
    if not archive.exists():
        try:
            with patch.dict(os.environ, {kafka_libs.VERSION_VARIABLE: version}):
                asyncio.run(_archive_classes(archive))
        except kafka.KafkaFailedError as failure:
            print(f"the classes of Kafka {version} are not archived, so it starts more slowly: {failure}")
    return libs


async def _archive_classes(archive: Path) -> None:
    """Start and stop the broker that the environment chooses, whose Java then writes the archive."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as directory:
        written = Path(directory) / archive.name
        broker = kafka.KafkaBroker(Path(directory), archive_to=written)
        try:
            await broker.start()
            await broker.stop()
            if written.exists():
                written.replace(archive)
        finally:
            await broker.kill()


def provide_connector() -> int:
    """Fetch the jars of Spark's own connector."""
    return provide(
        "Kafka connector",
        lambda: connector_jars.connector_jars()[0].parent,
        connector_jars.ConnectorUnavailableError,
    )


def provide_chromium() -> int:
    """Install Chromium and a font."""
    unavailable = chromium.ChromiumUnavailableError
    packages = ("chromium", "fonts-dejavu-core")
    return provide("Chromium", lambda: or_installed(chromium.browser, packages, unavailable), unavailable)


def provide_postgresql() -> int:
    """Install the PostgreSQL server."""
    unavailable = postgresql.PostgresqlUnavailableError
    return provide(
        "PostgreSQL", lambda: or_installed(postgresql.server_programs, ["postgresql"], unavailable), unavailable
    )


def provide_prometheus() -> int:
    """Install Prometheus and promtool."""
    unavailable = prometheus.PrometheusUnavailableError
    return provide(
        "Prometheus", lambda: ", ".join(or_installed(prometheus.programs, ["prometheus"], unavailable)), unavailable
    )


def provide_schema_registry() -> int:
    """Fetch the schema registry."""
    return provide("schema registry", schema_registry.registry_files, schema_registry.RegistryUnavailableError)


PROVIDED = {
    "broker": provide_broker,
    "connector": provide_connector,
    "chromium": provide_chromium,
    "postgresql": provide_postgresql,
    "prometheus": provide_prometheus,
    "schema-registry": provide_schema_registry,
}


def or_installed(find: Callable[[], T], packages: Sequence[str], unavailable: type[RuntimeError]) -> T:
    """Find something; where it is missing and we may, install packages of Debian's and find it then."""
    try:
        return find()
    except unavailable:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise
    _install(packages, unavailable)
    return find()


def _install(packages: Sequence[str], unavailable: type[RuntimeError]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = [*INSTALL, *packages]
    output = ""
    for command in (install, UPDATE, install):  # lists of packages may be old, or missing
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=INSTALL_TIMEOUT, check=False
        )
        if command is install and done.returncode == 0:
            return
        output = done.stdout + done.stderr
    raise unavailable(f"`{' '.join(install)}` failed:\n{output}")


def main(names: Sequence[str]) -> int:
    """Provide each of *names*; return the exit code."""
    unknown = sorted(set(names) - PROVIDED.keys())
    if unknown or not names:
        print(f"expected some of {', '.join(PROVIDED)}; found {', '.join(unknown) or 'nothing'}", file=sys.stderr)
        return 2
    return max(PROVIDED[name]() for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
