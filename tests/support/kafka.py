"""A real Kafka broker in its own process, on free ports of 127.0.0.1."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from tests.support.certificates import make_certificates
from tests.support.cluster import GuardedCluster, is_ready
from tests.support.guard import wait_for_end
from tests.support.kafka_libs import CLASS_ARCHIVE, kafka_libs
from tests.support.kafka_properties import SCRAM_USER, Ports, broker_properties
from tests.support.paths import PROJECT
from tests.support.ports import free_ports

START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
READY_INTERVAL = 0.05
TAIL_LINES = 40
PORT_ATTEMPTS = 3

JVM_OPTIONS = [
    "-Xms128m",
    "-XX:+UseSerialGC",  # the quickest start, and the least CPU next to the tests
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
]


class KafkaFailedError(RuntimeError):
    """The broker ended, or did not answer in time; the message holds the end of its log."""


class KafkaBroker(GuardedCluster):
    """One KRaft node, broker and controller in one, that keeps its ports and data over a restart.

    It ends with the process *watched*, however that ends. The directory holds all its state, so that several
    processes may each have an object of the same broker, as long as only one at a time starts or ends it.

    Attributes:
        log_file: The output of the broker, over all its starts.
        ports: Where it listens.
        properties: Settings that win over our own, as of the first start.
        cluster_id: The id with which its storage is formatted.
        features: Levels of features that differ from the newest ones, such as `{"transaction.version": 1}`.

    Args:
        archive_to: Where its Java writes an archive of its classes when it is stopped; see `CLASS_ARCHIVE`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        properties: Mapping[str, str] | None = None,
        watched: int | None = None,
        heap: str = "512m",
        cluster_id: uuid.UUID | None = None,
        features: Mapping[str, int] | None = None,
        archive_to: Path | None = None,
    ) -> None:
        self.directory = directory
        self.log_file = directory / "broker.log"
        super().__init__("", "", make_certificates(directory / "certificates"))
        self.properties = dict(properties or {})
        self.cluster_id = cluster_id or uuid.uuid4()
        self.features = dict(features or {})
        self._watched = watched or os.getpid()
        self._heap = heap
        self._archive_to = archive_to
        self._process: subprocess.Popen[bytes] | None = None
        self._take_ports()

    @property
    def running(self) -> bool:
        """Whether the process is alive, frozen or not."""
        return self._process_file.exists() and not wait_for_end(self.process_group, 0)

    @property
    def answers(self) -> bool:
        """Whether the process is alive and not frozen."""
        return self.running and psutil.Process(self.process_group).status() != psutil.STATUS_STOPPED

    @property
    def process_group(self) -> int:
        """Id of the process group that is the broker; signal this to end it from another process."""
        if not self._process_file.exists():
            raise KafkaFailedError("the broker was not started: call start() first")
        return int(self._process_file.read_text())

    async def start(self) -> None:
        """Starts the broker; returns when it answers and coordinates groups.

        Raises:
            BrokerUnavailableError: Java or the broker's jars are missing.
            KafkaFailedError: It ended or did not answer in time.
        """
        for attempt in range(1, PORT_ATTEMPTS + 1):
            first = not self._properties_file.exists()
            try:
                await self.launch()
                await self._until_ready()
            except KafkaFailedError as failure:
                taken = "Address already in use" in str(failure)
                if not (first and taken) or attempt == PORT_ATTEMPTS:
                    raise
                self._ports_file.unlink()  # no client has the old ones yet
                self._properties_file.unlink()
                self._take_ports()
            else:
                return

    async def launch(self) -> None:
        """Starts the process and does not wait until it answers."""
        if not self._properties_file.exists():
            await asyncio.to_thread(self._format)
        self._launch()

    def _launch(self) -> None:
        self._reap()
        guard = [sys.executable, "-S", str(PROJECT / "tests" / "support" / "guard.py"), str(self._watched)]
        java = self._java()
        if self._archive_to is not None:
            java.append(f"-XX:ArchiveClassesAtExit={self._archive_to}")
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *java, "kafka.Kafka", str(self._properties_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process_file.write_text(str(self._process.pid))

    async def stop(self) -> None:
        """Lets the broker shut down in order, as an operator would."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """Ends the broker immediately, without a chance to write anything."""
        await self._end(signal.SIGKILL)

    async def restart(self) -> None:
        """Stops the broker and starts it again on the same ports and data."""
        await self.stop()
        await self.start()

    def freeze(self) -> None:
        """Makes the broker hang: connections stay open and nothing answers, until `thaw`."""
        os.killpg(self.process_group, signal.SIGSTOP)
        while not _is_stopped(self.process_group):
            time.sleep(0.001)

    def thaw(self) -> None:
        """Resumes a frozen broker."""
        os.killpg(self.process_group, signal.SIGCONT)

    def tail(self) -> str:
        """The last lines of the broker's log."""
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        return "\n".join(lines[-TAIL_LINES:])

    def _take_ports(self) -> None:
        if not self._ports_file.exists():
            self._ports_file.write_text(json.dumps(asdict(Ports(*free_ports(5)))))
        self.ports = Ports(**json.loads(self._ports_file.read_text()))
        self.bootstrap = f"127.0.0.1:{self.ports.plain}"
        self.secure_bootstrap = f"127.0.0.1:{self.ports.secure}"

    def _format(self) -> None:
        """Writes the configuration and an empty metadata log with the one SCRAM user in it."""
        written = self._properties_file.with_suffix(".new")
        written.write_text(broker_properties(self.directory, self.ports, self.certificates, self.properties))
        cluster_id = urlsafe_b64encode(self.cluster_id.bytes).decode().rstrip("=")
        command = ["kafka.tools.StorageTool", "format", "--ignore-formatted"]
        # Joined with "=", as one id in 64 begins with a dash.
        command += [f"--cluster-id={cluster_id}", f"--config={written}"]
        command += [f"--feature={name}={level}" for name, level in self.features.items()]
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            credentials = f"name={SCRAM_USER.username},password={SCRAM_USER.password}"
            command += ["--add-scram", f"{mechanism}=[{credentials}]"]
        done = subprocess.run(
            self._java() + command, capture_output=True, text=True, timeout=START_TIMEOUT, check=False
        )
        if done.returncode != 0:
            raise KafkaFailedError(f"the broker's storage could not be formatted:\n{done.stdout}{done.stderr}")
        written.replace(self._properties_file)

    async def _until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + START_TIMEOUT
        while loop.time() < give_up:
            if not self.running:
                raise KafkaFailedError(f"the broker ended while it started; its log ends with\n{self.tail()}")
            if await _listens(self.ports.plain) and await is_ready(self.bootstrap):
                return
            await asyncio.sleep(READY_INTERVAL)
        await self.kill()
        raise KafkaFailedError(
            f"the broker did not answer within {START_TIMEOUT:g} s; its log ends with\n{self.tail()}"
        )

    async def _end(self, number: signal.Signals) -> None:
        if self.running and not await asyncio.to_thread(end_group, self.process_group, number, STOP_TIMEOUT):
            await asyncio.to_thread(end_group, self.process_group, signal.SIGKILL, STOP_TIMEOUT)
        self._reap()

    def _reap(self) -> None:
        """Take note of the end of the process that we started; another process may have ended it."""
        if self._process is not None and wait_for_end(self._process.pid, 0):
            self._process.wait()

    def _java(self) -> list[str]:
        log_settings = PROJECT / "tests" / "support" / "broker" / "log4j2.properties"
        libs = kafka_libs()
        archive = libs / CLASS_ARCHIVE
        return [
            "java",
            *JVM_OPTIONS,
            *([f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []),
            f"-Xmx{self._heap}",
            f"-Dlog4j2.configurationFile={log_settings}",
            "-cp",
            f"{libs}/*",
        ]

    @property
    def _properties_file(self) -> Path:
        """Exists when the storage is formatted."""
        return self.directory / "server.properties"

    @property
    def _ports_file(self) -> Path:
        return self.directory / "ports.json"

    @property
    def _process_file(self) -> Path:
        return self.directory / "process"


def end_group(leader: int, number: signal.Signals, timeout: float) -> bool:
    """Signals a broker's process group; returns whether the guard and the broker had ended in time.

    The guard may end before the broker has given back its ports and the lock on its data.
    """
    give_up = time.monotonic() + timeout
    try:
        guard = psutil.Process(leader)
        members = [leader, *(process.pid for process in guard.children())]
        os.killpg(leader, number)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return True
    return all(wait_for_end(pid, max(0.0, give_up - time.monotonic())) for pid in members)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def _is_stopped(leader: int) -> bool:
    """Whether all threads of a process and its children have stopped; each stops when it notices the signal."""
    states = []
    process = psutil.Process(leader)
    for member in (process, *process.children(recursive=True)):
        for thread in Path(f"/proc/{member.pid}/task").glob("*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                states.append(thread.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)
