"""Fixtures for every test: real servers and unique names; see `tests.support.brokers` for those with a Kafka."""

import contextlib
import gc
import re
import shutil
import signal
import sys
import uuid
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from aioshard.core.text import encodable
from tests.support.brokers import alone, begin_run, end_run
from tests.support.brokers import breakable_kafka as breakable_kafka  # noqa: PLC0414 - fixtures of all tests
from tests.support.brokers import broken_kafka as broken_kafka  # noqa: PLC0414
from tests.support.brokers import brokers as brokers  # noqa: PLC0414
from tests.support.brokers import kafka as kafka  # noqa: PLC0414
from tests.support.brokers import own_kafka as own_kafka  # noqa: PLC0414
from tests.support.brokers import proxies as proxies  # noqa: PLC0414
from tests.support.kafka_libs import chosen_kafka
from tests.support.postgresql import PostgresqlServer, PostgresqlUnavailableError
from tests.support.requirements import skip_or_fail
from tests.support.schema_registry import RegistryUnavailableError, SchemaRegistryServer
from tests.support.spark import spark_session, start_java_quickly

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEFT_BY_AIOKAFKA = re.compile(
    r"Unclosed AIOKafkaConnection|unclosed transport <_SelectorSocketTransport|unclosed <socket|loop is closed"
)

SERVERS = "Kafka broker", "PostgreSQL", "Spark", "schema registry"
"""Real ones that tests need. Without one they are skipped, and fail in CI."""
TOGETHER = "tests/spark", "tests/kafka/client", "tests/cluster", "tests/kafka/conformance"
"""Tests of such a folder run in one process of the run: they share what takes many seconds to start, or what only one
test at a time may use, so that the other processes would wait."""

# An example takes as long as a busy machine lets it: its duration does not matter.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    # A shell has its background jobs ignore it, and so would the processes that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start_java_quickly()
    if not hasattr(config, "workerinput"):
        begin_run()


def pytest_report_header() -> str:
    return f"Kafka broker: {chosen_kafka()}"


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
        if fixtures & {"kafka", "breakable_kafka", "own_kafka", "brokers"}:
            item.add_marker(pytest.mark.kafka)
        if "brokers" in fixtures:
            item.add_marker(pytest.mark.cluster)
        if "postgresql" in fixtures:
            item.add_marker(pytest.mark.postgresql)
        if "registry_server" in fixtures:
            item.add_marker(pytest.mark.schema_registry)


def pytest_collection_finish() -> None:
    """Takes what was imported and collected out of all later garbage collections: each would take 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lets one process of the run at a time have the cluster, or the port of `proxies`; its timeout starts then."""
    fixtures = getattr(item, "fixturenames", ())
    with (
        alone("cluster") if item.get_closest_marker("cluster") else contextlib.nullcontext(),
        alone("proxies") if "proxies" in fixtures else contextlib.nullcontext(),
    ):
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
        leaks = [text for warning in caught if not LEFT_BY_AIOKAFKA.match(text := str(warning.message))]
        if leaks:
            pytest.fail("left open: " + "; ".join(leaks), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what UTF-8 cannot encode in captured output: a process of the run could not send it to the others."""
    report = yield
    report.sections = [(heading, encodable(text)) for heading, text in report.sections]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for server in SERVERS:
        missing = f"no {server}: "
        unproven = [report for report in terminalreporter.getreports("skipped") if missing in str(report.longrepr)]
        if unproven:
            terminalreporter.section(f"NO {server.upper()}", sep="!", red=True, bold=True)
            terminalreporter.line(f"{len(unproven)} tests did not run: what they prove is unproven on this machine.")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """A real PostgreSQL server; each test that needs one makes its own databases in it."""
    try:
        with PostgresqlServer() as server:
            yield server
    except PostgresqlUnavailableError as missing:
        skip_or_fail("PostgreSQL", missing)


@pytest.fixture
def postgresql_url(postgresql: PostgresqlServer) -> Iterator[str]:
    """The URL of an empty database."""
    url = postgresql.create_database()
    yield url
    postgresql.drop_database(url)


@pytest.fixture(scope="session")
def registry_server() -> Iterator[SchemaRegistryServer]:
    """A real schema registry; each test that needs one uses subjects of its own."""
    try:
        with SchemaRegistryServer() as server:
            yield server
    except RegistryUnavailableError as missing:
        skip_or_fail("schema registry", missing)


@pytest.fixture(scope="session")
def spark_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory from which the workers of `spark` import; put a test's app there, under a unique name."""
    return tmp_path_factory.mktemp("spark-modules")


@pytest.fixture(scope="session")
def spark(spark_modules: Path) -> Iterator["SparkSession"]:
    """The process's only Spark session, with two cores; leave it running."""
    if shutil.which("java") is None:
        skip_or_fail("Spark", "Java is missing")
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
