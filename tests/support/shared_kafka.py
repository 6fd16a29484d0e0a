"""The broker and the three-broker cluster of a test run, shared by all its processes.

The first process that needs one starts it, under a lock; the process that leads the run ends both.
"""

import asyncio
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import GuardedCluster
from tests.support.kafka import KafkaBroker
from tests.support.three_brokers import ThreeBrokers

RUN_DIRECTORY = "AIOSHARD_TEST_RUN"
"""Environment variable by which the leading process tells its workers where the run keeps its state."""
RUN_LEADER = "AIOSHARD_TEST_LEADER"
"""Environment variable with the id of the leading process; the brokers end with it."""


class SharedKafka(GuardedCluster):
    """The run's broker as a test sees it: use it, leave it running."""


def begin_run() -> None:
    """Called by the leading process before it starts workers."""
    os.environ[RUN_DIRECTORY] = tempfile.mkdtemp(prefix="aioshard-tests-")
    os.environ[RUN_LEADER] = str(os.getpid())


def end_run() -> None:
    """Called by the leading process at the very end: ends the brokers that there are, and their data."""
    if _directory("kafka").exists():
        asyncio.run(_broker().kill())
    if _directory("cluster").exists():
        asyncio.run(shared_three_brokers().end())
    os.environ.pop(RUN_LEADER)
    shutil.rmtree(os.environ.pop(RUN_DIRECTORY), ignore_errors=True)


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Hold the lock *what*, which one process of the run holds at a time."""
    with Path(os.environ[RUN_DIRECTORY], f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def shared_kafka() -> SharedKafka:
    """The run's broker; starts it when no process of the run has done so yet.

    Raises:
        BrokerUnavailableError: Java or the broker's jars are missing.
        KafkaFailedError: It ended or did not answer in time.
    """
    with alone("kafka"):
        broker = _broker()
        if not broker.running:
            asyncio.run(broker.start())
    return SharedKafka(broker.bootstrap, broker.secure_bootstrap, broker.certificates)


# Both are kept until the process ends: a dropped `Popen` would warn that it still runs.
@functools.cache
def _broker() -> KafkaBroker:
    return KafkaBroker(_directory("kafka"), watched=int(os.environ[RUN_LEADER]))


@functools.cache
def shared_three_brokers() -> ThreeBrokers:
    """The run's cluster; only the holder of the lock `cluster` may start, use and harm it."""
    return ThreeBrokers(_directory("cluster"), watched=int(os.environ[RUN_LEADER]))


def _directory(name: str) -> Path:
    return Path(os.environ[RUN_DIRECTORY], name)
