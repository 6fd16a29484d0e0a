"""Log output of the command line."""

import io
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest

from aioshard.telemetry.logs import REPEAT_INTERVAL, LogFormat, configure

Configure = Callable[[str, LogFormat], io.StringIO]


@pytest.fixture
def configured() -> Iterator[Configure]:
    """`configure` on a stream of its own, undone afterwards."""
    root = logging.getLogger()
    level = root.level
    quiet = {name: logging.getLogger(name).level for name in ("aiokafka", "kafka", "uvicorn", "asyncio")}
    handlers: list[logging.Handler] = []

    def start(name: str, style: LogFormat) -> io.StringIO:
        stream = io.StringIO()
        handlers.append(configure(name, style, stream))
        return stream

    yield start
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(level)
    for name, number in quiet.items():
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(capture=False)


def test_text_is_one_readable_line_with_the_extra_fields(configured: Configure) -> None:
    stream = configured("info", "text")
    logging.getLogger("aioshard.engine").warning(
        "partition %s waits", "orders/3", extra={"topic": "orders", "offset": 7}
    )
    line = stream.getvalue()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING aioshard\.engine: partition orders/3 waits "
        r"\[topic=orders offset=7\]\n",
        line,
    )


def test_json_is_one_object_per_line_whatever_is_logged(configured: Configure) -> None:
    stream = configured("info", "json")
    logger = logging.getLogger("aioshard.engine")
    logger.info("two\nlines", extra={"topic": "orders", "what": object()})
    try:
        raise ValueError("wrong")  # noqa: TRY301
    except ValueError:
        logger.exception("it broke")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "two\nlines"
    assert (first["level"], first["logger"], first["topic"]) == ("INFO", "aioshard.engine", "orders")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "ValueError: wrong" in second["exception"]


def test_an_extra_field_cannot_replace_the_message(configured: Configure) -> None:
    stream = configured("info", "json")
    logging.getLogger("aioshard").info("sentence", extra={"level": "mine"})
    assert json.loads(stream.getvalue())["level"] == "INFO"


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("warning", {"ours warning", "client warning"}),
        ("info", {"ours info", "ours warning", "client warning"}),
        ("debug", {"ours debug", "ours info", "ours warning", "client info", "client warning"}),
        ("error", set()),
    ],
)
def test_the_client_is_quieter_than_we_are(configured: Configure, level: str, heard: set[str]) -> None:
    stream = configured(level, "json")
    ours, client = logging.getLogger("aioshard.engine"), logging.getLogger("aiokafka.consumer")
    ours.debug("ours debug")
    ours.info("ours info")
    ours.warning("ours warning")
    client.info("client info")
    client.warning("client warning")
    assert {json.loads(line)["message"] for line in stream.getvalue().splitlines()} == heard


def test_what_the_client_repeats_is_counted(configured: Configure) -> None:
    """Fifty lines a second for the same outage would hide everything else, and fill a disk."""
    stream = configured("info", "text")
    client = logging.getLogger("aiokafka.consumer.fetcher")

    def say(text: str, at: float) -> None:
        record = client.makeRecord(client.name, logging.ERROR, "", 0, "cannot reach %s", (text,), None)
        record.created = at
        client.handle(record)

    for number in range(100):
        say("broker 1", at=1_000.0 + number / 100)
    say("broker 2", at=1_001.0)
    say("broker 1", at=1_000.0 + REPEAT_INTERVAL)
    said = [line.partition(": ")[2] for line in stream.getvalue().splitlines()]
    assert said == [
        "cannot reach broker 1",
        "cannot reach broker 2",
        "cannot reach broker 1 (and 99 times more in 30 s)",
    ]


def test_what_we_say_ourselves_is_never_held_back(configured: Configure) -> None:
    stream = configured("info", "text")
    for _ in range(3):
        logging.getLogger("aioshard.engine").warning("partition orders/3 waits")
    assert len(stream.getvalue().splitlines()) == 3


def test_warnings_become_log_records(configured: Configure) -> None:
    stream = configured("info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old ways", stacklevel=1)
    assert "old ways" in json.loads(stream.getvalue())["message"]


def test_importing_the_module_configures_nothing() -> None:
    script = "import logging, aioshard.telemetry.logs as _; print(logging.getLogger().handlers)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
