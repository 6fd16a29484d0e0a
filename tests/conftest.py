"""Fixtures for every test: shared and private brokers, unique names."""

import contextlib
import gc
import re
import shutil
import signal
import sys
import uuid
import warnings
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import pytest

from tests.support.kafka import KafkaBroker
from tests.support.kafka_libs import BrokerUnavailableError
from tests.support.postgresql import PostgresqlServer, PostgresqlUnavailableError
from tests.support.provision import in_ci
from tests.support.shared_kafka import SharedKafka, alone, begin_run, end_run, shared_kafka, shared_three_brokers
from tests.support.spark import spark_session, start_java_quickly
from tests.support.three_brokers import ThreeBrokers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEFT_BY_AIOKAFKA = re.compile(
    r"Unclosed AIOKafkaConnection|unclosed transport <_SelectorSocketTransport|unclosed <socket|loop is closed"
)

SERVERS = "Kafka broker", "PostgreSQL", "Spark"
"""Real ones that tests need. Without one they are skipped, and fail in CI."""
TOGETHER = "tests/spark", "tests/kafka/client"
"""Tests of such a folder run in one process of the run: what they share takes many seconds to start."""

# An example takes as long as a busy machine lets it: how long says nothing of what is tested.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    # A shell has its background jobs ignore it, and so would the processes that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start_java_quickly()
    if not hasattr(config, "workerinput"):
        begin_run()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        end_run()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Gives the tests of a folder in `TOGETHER` to one process, and any other test to the next process that is free."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # noqa: PLC0415 - only where it runs

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(f"{folder}/")), nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Says how a process of the run ended, if it ended by itself: -9 is SIGKILL, as by a machine without memory."""
    if error is not None:
        process = node.gateway._io.popen
        print(f"{node.gateway.id} (process {process.pid}) ended with {process.wait(10)}", file=sys.stderr, flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & {"kafka", "own_kafka", "brokers"}:
            item.add_marker(pytest.mark.kafka)
        if "brokers" in fixtures:
            item.add_marker(pytest.mark.cluster)
        if "postgresql" in fixtures:
            item.add_marker(pytest.mark.postgresql)


def pytest_collection_finish() -> None:
    """Takes what was imported and collected out of all later garbage collections: each would take 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lets one process of the run at a time have the cluster; its timeout starts after that."""
    with alone("cluster") if item.get_closest_marker("cluster") else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Collects what a test on a real broker, or of the demo, left, so that no later test is blamed for it.

    aiokafka neither waits until its TLS connections are closed nor closes one whose start was cancelled. All other
    leaks count.
    """
    result = yield
    if item.get_closest_marker("kafka") is not None or item.path.name == "test_demo.py":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            gc.collect()
        leaks = [text for one in caught if not LEFT_BY_AIOKAFKA.match(text := str(one.message))]
        if leaks:
            pytest.fail("left open: " + "; ".join(leaks), pytrace=False)
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for server in SERVERS:
        missing = f"no {server}: "
        unproven = [report for report in terminalreporter.getreports("skipped") if missing in str(report.longrepr)]
        if unproven:
            terminalreporter.section(f"NO {server.upper()}", sep="!", red=True, bold=True)
            terminalreporter.line(f"{len(unproven)} tests did not run: what they prove is unproven on this machine.")


@pytest.fixture(scope="session")
def kafka() -> SharedKafka:
    """The run's real broker, shared with every other test: use names of your own, leave it running."""
    try:
        return shared_kafka()
    except BrokerUnavailableError as missing:
        _skip_or_fail("Kafka broker", missing)


@pytest.fixture
async def own_kafka(tmp_path: Path) -> AsyncIterator[KafkaBroker]:
    """A started broker that this test alone uses, and may stop, kill, freeze and restart."""
    broker = KafkaBroker(tmp_path)
    try:
        await broker.start()
    except BrokerUnavailableError as missing:
        _skip_or_fail("Kafka broker", missing)
    try:
        yield broker
    finally:
        await broker.kill()


@pytest.fixture
async def brokers() -> AsyncIterator[ThreeBrokers]:
    """The run's cluster of three, which this test alone uses as long as it lasts, and may harm as it likes."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            cluster = await stack.enter_async_context(shared_three_brokers())
        except BrokerUnavailableError as missing:
            _skip_or_fail("Kafka broker", missing)
        yield cluster


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """A real PostgreSQL server; each test that needs one makes its own databases in it."""
    try:
        with PostgresqlServer() as server:
            yield server
    except PostgresqlUnavailableError as missing:
        _skip_or_fail("PostgreSQL", missing)


@pytest.fixture
def postgresql_url(postgresql: PostgresqlServer) -> Iterator[str]:
    """The URL of an empty database."""
    url = postgresql.create_database()
    yield url
    postgresql.drop_database(url)


@pytest.fixture(scope="session")
def spark_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory from which the workers of `spark` import; put a test's app there, under a unique name."""
    return tmp_path_factory.mktemp("spark-modules")


@pytest.fixture(scope="session")
def spark(spark_modules: Path) -> Iterator["SparkSession"]:
    """The process's only Spark session, with two cores; leave it running."""
    if shutil.which("java") is None:
        _skip_or_fail("Spark", "Java is missing")
    with spark_session(spark_modules) as session:
        yield session


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses; the topic does not exist yet."""
    return _unique(request, "topic")


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """A group id that no other test uses."""
    return _unique(request, "group")


def _unique(request: pytest.FixtureRequest, kind: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:80]
    return f"{readable}-{kind}-{uuid.uuid4().hex[:8]}"


def _skip_or_fail(server: str, missing: Exception | str) -> NoReturn:
    if in_ci():
        pytest.fail(f"no {server}, which CI must have: {missing}", pytrace=False)
    pytest.skip(f"no {server}: {missing}")
