"""A real schema registry in its own process: Apicurio Registry, with the interface of Confluent's, which Maven has."""

import fcntl
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Self

from tests.support.kafka import STOP_TIMEOUT, end_group
from tests.support.maven import copy_artifact
from tests.support.paths import PROJECT

VERSION = "3.0.9"
"""The newest that runs on Java 17."""
ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
FOLDER = PROJECT / "build" / "schema-registry" / VERSION
RUNNER = f"apicurio-registry-app-{VERSION}-runner.jar"
OPTIONS = (
    "-Dquarkus.http.host=127.0.0.1",
    "-Dquarkus.http.port=0",  # a free one, which it logs
    '-Dquarkus.log.category."io.quarkus".level=INFO',
)
START_TIMEOUT = 60.0
LISTENING = re.compile(r"Listening on: (http://[\w.:]+)")


class RegistryUnavailableError(RuntimeError):
    """This machine cannot run a schema registry; the message says what is missing and how to get it."""


class RegistryFailedError(RuntimeError):
    """The server ended, or did not answer in time; the message holds the end of its log."""


def registry_files() -> Path:
    """The folder of the server; fetches it with Maven when it is not there.

    Raises:
        RegistryUnavailableError: Java or Maven is missing, or Maven cannot fetch it.
    """
    if shutil.which("java") is None:
        raise RegistryUnavailableError(
            "no `java` on PATH, needed to run a schema registry: install a JRE of version 17 or newer"
        )
    if not (FOLDER / RUNNER).exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with (FOLDER.parent / "fetch.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here concurrently
            if not (FOLDER / RUNNER).exists():
                _fetch()
    return FOLDER


def _fetch() -> None:
    partial = FOLDER.with_name("partial")
    copy_artifact(ARTIFACT, partial, RegistryUnavailableError)
    (archive,) = partial.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(partial, filter="data")
    archive.unlink()
    shutil.rmtree(FOLDER, ignore_errors=True)
    partial.rename(FOLDER)


class SchemaRegistryServer:
    """One server that keeps its schemas in memory, on a free port of 127.0.0.1; it ends with this process.

    Example:
        with SchemaRegistryServer() as server:
            registry = SchemaRegistry(server.url)
    """

    def __init__(self) -> None:
        self.url = ""
        """The address of its interface, once it has started."""
        self._process: subprocess.Popen[str] | None = None
        self._log: list[str] = []
        self._listening: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        """Start it; return when it answers.

        Raises:
            RegistryUnavailableError: The machine cannot run it.
            RegistryFailedError: It ended, or did not answer in time.
        """
        guard = [sys.executable, "-S", str(PROJECT / "tests" / "support" / "guard.py"), str(os.getpid())]
        java = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", *OPTIONS]
        self._process = process = subprocess.Popen(
            [*guard, *java, "-jar", str(registry_files() / RUNNER)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        try:
            address = self._listening.get(timeout=START_TIMEOUT)
        except queue.Empty:
            address = None
        if address is None:
            self.close()
            raise RegistryFailedError("the schema registry did not start:\n" + "".join(self._log[-20:]))
        self.url = f"{address}/apis/ccompat/v7"
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server."""
        process = self._process
        if process is None:
            return
        if not end_group(process.pid, signal.SIGTERM, STOP_TIMEOUT):
            end_group(process.pid, signal.SIGKILL, STOP_TIMEOUT)
        process.wait()
        self._process = None

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._log = [*self._log[-100:], line]
                found = LISTENING.search(line)
                if found is not None:
                    self._listening.put(found[1])
        self._listening.put(None)
