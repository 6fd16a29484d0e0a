"""Repeated lines of the Kafka clients are counted while an app runs, and the program's logging stays as it is."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aioshard import App, Record
from aioshard.engine import client_log
from aioshard.engine.client_log import CLIENT_LOG, ClientLog
from aioshard.testing import TestClient

CLIENT = logging.getLogger("aiokafka.test_client_log")
ROOT = logging.getLogger("aiokafka")
OURS = "aioshard.engine.client_log"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(client_log, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


@pytest.fixture
def level_of_client() -> Iterator[None]:
    yield
    ROOT.setLevel(logging.NOTSET)
    CLIENT.setLevel(logging.NOTSET)


def make_app(group: str = "watched") -> App:
    app = App(group)

    @app.consume("orders")
    async def on_order(_: Record) -> None: ...

    return app


def of_client(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.name == CLIENT.name]


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    return [(vars(line)["event"], vars(line)["withheld"]) for line in caplog.records if line.name == OURS]


def fail(times: int) -> None:
    for number in range(times):
        CLIENT.error("Unable connect to node with id %s: [Errno 111] Connect call failed (%r, %s)", number, "a", number)


def test_an_outage_writes_each_line_once_and_counts_the_rest(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog()
    with log.limited():
        fail(100)
        CLIENT.error("Unable to update metadata from %s", [1])
        for _ in range(70):
            clock.now += 1.0
            fail(1)
            log.report()
        assert of_client(caplog) == [
            "Unable connect to node with id 0: [Errno 111] Connect call failed ('a', 0)",
            "Unable to update metadata from [1]",
        ]
        assert events(caplog) == [("client_repeats", 99 + 60)]
        assert "Unable connect" in caplog.records[-1].getMessage()

        clock.now += 9.0
        log.report()
        assert len(events(caplog)) == 1, "it may continue"
        clock.now += 1.0
        log.report()
        log.report()
        assert events(caplog)[1:] == [("client_repeats_over", 99 + 70)]

        fail(1)
        assert len(of_client(caplog)) == 3, "the next outage is reported again"


def test_each_summary_counts_the_lines_since_the_last_one(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog()
    with log.limited():
        fail(1)
        for _ in range(130):
            clock.now += 1.0
            fail(1)
            log.report()
        assert events(caplog) == [("client_repeats", 60), ("client_repeats", 60)]


def test_an_outage_lasts_while_the_client_logs_anything(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog()
    with log.limited():
        fail(1)
        clock.now += 8.0
        CLIENT.error("Unable to update metadata from %s", [1])
        clock.now += 4.0
        log.report()
        fail(1)
        assert len(of_client(caplog)) == 2, "the second of these lines repeats the first"


def test_no_summary_counts_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog()
    with log.limited():
        for topic in "abcdefghijklmn":
            CLIENT.error("Topic %s is not available", topic)
            clock.now += 5.0
            log.report()
        assert events(caplog) == []


def test_one_line_is_no_outage(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog()
    with log.limited():
        fail(1)
        clock.now += 100.0
        log.report()
    assert len(of_client(caplog)) == 1
    assert events(caplog) == []


def test_lines_about_different_things_are_all_written(caplog: pytest.LogCaptureFixture) -> None:
    with ClientLog().limited():
        for topic in ("orders", "payments"):
            CLIENT.warning("Topic %s is not available", topic)
        for error in (ValueError(), KeyError()):
            CLIENT.error("Unexpected error", exc_info=error)
    assert len(of_client(caplog)) == 4


def test_random_lines_do_not_fill_the_memory_or_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog()
    with log.limited():
        for number in range(1_000):
            CLIENT.warning("session %s is gone", "".join(chr(ord("a") + int(digit)) for digit in str(number)))
    assert len(of_client(caplog)) == client_log._MOST_KINDS
    assert events(caplog) == [("client_repeats_over", 1_000 - client_log._MOST_KINDS)]


def test_a_malformed_line_does_not_fail_in_the_client() -> None:
    with ClientLog().limited():
        record = CLIENT.makeRecord(CLIENT.name, logging.ERROR, "", 0, "%s %s", ("one",), None)
        assert CLIENT.filter(record)


@pytest.mark.usefixtures("level_of_client")
@pytest.mark.parametrize("logger", [ROOT, CLIENT])
def test_a_logger_that_the_program_set_to_debug_is_left_alone(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.setLevel(logging.DEBUG)
    with ClientLog().limited():
        fail(10)
    assert len(of_client(caplog)) == 10
    assert events(caplog) == []


def test_lines_below_warning_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with ClientLog().limited():
        for _ in range(10):
            CLIENT.info("joined")
    assert len(of_client(caplog)) == 10


# Apps


async def test_lines_are_limited_while_an_app_runs_and_logging_is_restored(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    before = [(logger.level, list(logger.handlers), list(logger.filters)) for logger in (root, ROOT, CLIENT)]
    fail(2)
    async with TestClient(make_app()):
        fail(10)
        during = [(logger.level, list(logger.handlers)) for logger in (root, ROOT, CLIENT)]
    fail(2)
    assert len(of_client(caplog)) == 2 + 1 + 2
    assert events(caplog) == [("client_repeats_over", 9)]
    assert during == [(level, handlers) for level, handlers, _ in before]
    assert [(logger.level, list(logger.handlers), list(logger.filters)) for logger in (root, ROOT, CLIENT)] == before


async def test_lines_are_limited_until_the_last_app_of_the_process_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with TestClient(make_app("first")):
        async with TestClient(make_app("second")):
            fail(5)
        fail(5)
        assert CLIENT.filters == [CLIENT_LOG], "once"
        assert len(of_client(caplog)) == 1
    assert events(caplog) == [("client_repeats_over", 9)]
    assert CLIENT.filters == []


def test_the_loggers_of_both_clients_exist_when_an_app_starts() -> None:
    pytest.importorskip("confluent_kafka")
    from aioshard.kafka.clients import kafka_clients  # noqa: PLC0415 - imports the clients
    from aioshard.settings import Settings  # noqa: PLC0415

    kafka_clients(Settings(bootstrap_servers="localhost:9092", client="confluent"), "group")
    with CLIENT_LOG.limited():
        names = {logger.name for logger in CLIENT_LOG._attached}
    assert {"aiokafka", "aiokafka.consumer.fetcher", "aioshard.kafka.confluent.librdkafka"} <= names
    assert "aiokafka" in sys.modules


def test_a_command_without_logging_shows_no_lines_of_the_clients() -> None:
    script = (
        "import logging\n"
        "from aioshard.engine.client_log import silence_clients\n"
        "logging.getLogger('aiokafka.conn').error('before')\n"
        "silence_clients()\n"
        "logging.getLogger('aiokafka.conn').error('after')\n"
        "logging.getLogger('other').error('of the program')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stderr.splitlines() == ["before", "of the program"]
