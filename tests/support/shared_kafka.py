"""The one broker of a test run, shared by every process of the run.

The first process that needs it starts it, under a lock; the process that leads the run ends it.
"""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.certificates import certificates_in
from tests.support.cluster import GuardedCluster
from tests.support.kafka import STOP_TIMEOUT, KafkaBroker, end_group

__all__ = ["SharedKafka", "begin_run", "end_run", "shared_kafka"]

RUN_DIRECTORY = "AIOSHARD_TEST_RUN"
"""Environment variable by which the leading process tells its workers where the run keeps its state."""
RUN_LEADER = "AIOSHARD_TEST_LEADER"
"""Environment variable with the id of the leading process; the broker ends with it."""

# A started broker is kept until its process ends: a dropped `Popen` would warn that it still runs.
_started: list[KafkaBroker] = []


@dataclass(frozen=True)
class _Address:
    bootstrap: str
    secure_bootstrap: str
    directory: str
    process_group: int


class SharedKafka(GuardedCluster):
    """The run's broker as a test sees it: use it, leave it running."""


def begin_run() -> None:
    """Called by the leading process before it starts workers."""
    os.environ[RUN_DIRECTORY] = tempfile.mkdtemp(prefix="aioshard-tests-")
    os.environ[RUN_LEADER] = str(os.getpid())


def end_run() -> None:
    """Called by the leading process at the very end: ends the broker, if there is one, and its data."""
    directory = Path(os.environ.pop(RUN_DIRECTORY))
    os.environ.pop(RUN_LEADER)
    if (address := _read(directory)) is not None:
        end_group(address.process_group, signal.SIGKILL, STOP_TIMEOUT)
    if _started:
        asyncio.run(_started.pop().kill())
    shutil.rmtree(directory, ignore_errors=True)


def shared_kafka() -> SharedKafka:
    """The run's broker; starts it when no process of the run has done so yet.

    Raises:
        BrokerUnavailableError: Java or the broker's jars are missing.
        KafkaFailedError: It ended or did not answer in time.
    """
    directory = Path(os.environ[RUN_DIRECTORY])
    with (directory / "kafka.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        address = _read(directory) or _start(directory)
    certificates = certificates_in(Path(address.directory) / "certificates")
    return SharedKafka(address.bootstrap, address.secure_bootstrap, certificates)


def _read(directory: Path) -> _Address | None:
    file = directory / "kafka.json"
    return _Address(**json.loads(file.read_text())) if file.exists() else None


def _start(directory: Path) -> _Address:
    home = directory / "kafka"
    home.mkdir(exist_ok=True)  # an attempt of another process may have failed
    broker = KafkaBroker(home, watched=int(os.environ[RUN_LEADER]))
    asyncio.run(broker.start())
    _started.append(broker)
    address = _Address(broker.bootstrap, broker.secure_bootstrap, str(home), broker.process_group)
    (directory / "kafka.json").write_text(json.dumps(asdict(address)))
    return address
