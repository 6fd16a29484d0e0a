"""The fixtures that give a test a real Kafka, and the servers that the processes of a test run share.

Take the first one that lets the test do what it does. What a test may do to the later ones includes the earlier ones.

* `kafka`: the run's broker, which all tests use at the same time. Use topics and groups of your own; costs nothing.
* `proxies`: proxies in front of that broker, at `kafka.proxied_bootstrap`, to delay, drop and rewrite requests and
  responses. One test at a time.
* `breakable_kafka`: a broker to stop, kill, freeze and restart. Earlier tests of this process have used it, so use
  topics and groups of your own; a start only after a test that left it broken.
* `own_kafka`: a new broker for this test alone, for fixed names of topics and chosen levels of features; a start.
* `brokers`: the run's cluster of three, to stop, kill and freeze nodes and to move leaders and coordinators. One test
  at a time.

Three classes stand behind them. `KafkaCluster` (`cluster.py`) is what a test does to each of them from outside: topics,
records, transactions, committed offsets. `KafkaBroker` (`kafka.py`) is a broker in its own process, and `ThreeBrokers`
(`three_brokers.py`) a cluster of those. A test that needs no broker uses `aioshard.testing`.

The first process of a run that needs a shared server starts it, under a lock; the process that leads the run ends all.
Without Java or the jars the test is skipped, and fails in CI.
"""

import asyncio
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import GuardedCluster
from tests.support.kafka import KafkaBroker
from tests.support.kafka_libs import BrokerUnavailableError
from tests.support.paths import RUN_DIRECTORY
from tests.support.proxies import Proxies
from tests.support.requirements import skip_or_fail
from tests.support.three_brokers import ThreeBrokers

RUN_LEADER = "AIOSHARD_TEST_LEADER"
"""Environment variable with the id of the leading process; the brokers end with it."""


class SharedKafka(GuardedCluster):
    """The run's broker as a test sees it: use it, leave it running.

    Attributes:
        proxied_bootstrap: Address for clients that reach the broker through the fixture `proxies`.
        routes: The port that a proxy must listen on, and that of the broker behind it, by node.
    """

    def __init__(self, broker: KafkaBroker) -> None:
        super().__init__(broker.bootstrap, broker.secure_bootstrap, broker.certificates)
        self.proxied_bootstrap = f"127.0.0.1:{broker.ports.proxy}"
        self.routes = {1: (broker.ports.proxy, broker.ports.proxied)}


# Fixtures -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kafka() -> SharedKafka:
    """The run's broker: use names of your own, leave it running."""
    with _skipped_without_broker(), alone("kafka"):
        broker = _run_broker()
        if not broker.running:
            asyncio.run(broker.start())
    return SharedKafka(broker)


@pytest.fixture
async def proxies(kafka: SharedKafka) -> AsyncIterator[Proxies]:
    """Proxies in front of the run's broker, at `kafka.proxied_bootstrap`; this test alone uses them."""
    async with Proxies(kafka.routes) as proxies:
        yield proxies


@pytest.fixture(scope="session")
def broken_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """The broker of `breakable_kafka` as the last test left it; it is killed at the end of the session."""
    broker = KafkaBroker(tmp_path_factory.mktemp("breakable-kafka"))
    yield broker
    asyncio.run(broker.kill())


@pytest.fixture
async def breakable_kafka(broken_kafka: KafkaBroker) -> KafkaBroker:
    """A broker that this test may stop, kill, freeze and restart: use names of your own."""
    with _skipped_without_broker():
        if not broken_kafka.answers:
            await broken_kafka.kill()
            await broken_kafka.start()
    return broken_kafka


@pytest.fixture
async def own_kafka(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KafkaBroker]:
    """A new broker that this test alone uses.

    A parameter holds levels of features, such as `{"transaction.version": 1}`.
    """
    broker = KafkaBroker(tmp_path, features=getattr(request, "param", None))
    with _skipped_without_broker():
        await broker.start()
    try:
        yield broker
    finally:
        await broker.kill()


@pytest.fixture
async def brokers() -> AsyncIterator[ThreeBrokers]:
    """The run's cluster of three, which this test alone uses as long as it lasts, and may harm as it likes."""
    async with contextlib.AsyncExitStack() as stack:
        with _skipped_without_broker():
            cluster = await stack.enter_async_context(_run_cluster())
        yield cluster


@contextlib.contextmanager
def _skipped_without_broker() -> Iterator[None]:
    try:
        yield
    except BrokerUnavailableError as missing:
        skip_or_fail("Kafka broker", missing)


# Servers of the run -------------------------------------------------------------------


def begin_run() -> None:
    """Called by the leading process before it starts workers."""
    os.environ[RUN_DIRECTORY] = tempfile.mkdtemp(prefix="aioshard-tests-")
    os.environ[RUN_LEADER] = str(os.getpid())


def end_run() -> None:
    """Called by the leading process at the very end: ends the brokers that there are, and their data."""
    if _directory("kafka").exists():
        asyncio.run(_run_broker().kill())
    if _directory("cluster").exists():
        asyncio.run(_run_cluster().end())
    os.environ.pop(RUN_LEADER)
    shutil.rmtree(os.environ.pop(RUN_DIRECTORY), ignore_errors=True)


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
    """Hold the lock *what*, which one process of the run holds at a time."""
    with Path(os.environ[RUN_DIRECTORY], f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Both are kept until the process ends: a dropped `Popen` would warn that it still runs.
@functools.cache
def _run_broker() -> KafkaBroker:
    """Return the run's broker, which may not have been started; only the holder of the lock `kafka` may do that."""
    return KafkaBroker(_directory("kafka"), watched=int(os.environ[RUN_LEADER]))


@functools.cache
def _run_cluster() -> ThreeBrokers:
    """Return the run's cluster; only the holder of the lock `cluster` may start, use and harm it."""
    return ThreeBrokers(_directory("cluster"), watched=int(os.environ[RUN_LEADER]))


def _directory(name: str) -> Path:
    return Path(os.environ[RUN_DIRECTORY], name)
