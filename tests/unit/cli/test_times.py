"""One way to write a time, in every command that takes one."""

import datetime as dt
import time
from collections.abc import Iterator

import click
import pytest

from aioshard.cli import dlt, group, park, spark

OPTIONS = [
    (dlt.show.command, "--since"),
    (dlt.show.command, "--until"),
    (park.show, "--since"),
    (group.reset, "--to"),
    (spark.plan, "--start"),
    (spark.plan, "--end"),
]

every_option = pytest.mark.parametrize(
    ("command", "option"), OPTIONS, ids=[f"{command.name} {option}" for command, option in OPTIONS]
)


@pytest.fixture
def _far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


def parsed(command: click.Command, option: str, text: str) -> float:
    (parameter,) = (each for each in command.params if option in each.opts)
    found = parameter.process_value(click.Context(command), text)
    return found.timestamp() if isinstance(found, dt.datetime) else found


@every_option
@pytest.mark.usefixtures("_far_from_utc")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00", "2026-01-31T12:00:00+00:00"),
        ("2026-01-31", "2026-01-31T00:00:00+00:00"),
        ("2026-01-31T12:00:30.5Z", "2026-01-31T12:00:30.5+00:00"),
        ("2026-01-31T12:00+02:00", "2026-01-31T10:00:00+00:00"),
    ],
)
def test_a_time_without_an_offset_is_utc(command: click.Command, option: str, text: str, expected: str) -> None:
    assert parsed(command, option, text) == dt.datetime.fromisoformat(expected).timestamp()


@every_option
@pytest.mark.parametrize(
    ("text", "seconds"), [("-90s", 90), ("-30m", 1800), ("-6h", 21_600), ("-1.5d", 129_600), ("-1w", 604_800)]
)
def test_a_time_can_be_relative_to_now(command: click.Command, option: str, text: str, seconds: float) -> None:
    before = time.time()
    found = parsed(command, option, text)

    assert before - seconds - 0.01 <= found <= time.time() - seconds + 0.01


@every_option
@pytest.mark.parametrize("text", ["6h", "-6", "-6y", "yesterday", "2026-13-01", "-99999999999w"])
def test_an_invalid_time_is_refused(command: click.Command, option: str, text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"2026-01-31T12:00.*-6h"):
        parsed(command, option, text)
