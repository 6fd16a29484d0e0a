"""Arguments and options that several commands share, and the types of their values."""

import datetime as dt
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from aioshard.dead_letters.filters import Filters, HeaderFilter
from aioshard.records import TOPIC_NAME
from aioshard.serde.side_records import Coordinates

F = TypeVar("F", bound=Callable[..., Any])

ROWS = 50
"""Maximum rows of a table without `--limit`."""
_AGO = re.compile(r"-(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhdw])")
_LEAST_SECONDS = 0.001
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

# Types --------------------------------------------------------------------------------


def topic_name(text: str) -> str:
    """Check the name of a topic.

    Raises:
        BadParameter: It is not valid.
    """
    if not TOPIC_NAME.fullmatch(text):
        raise click.BadParameter(
            f"{text!r} is not a topic name: expected 1 to 249 characters of a-z, A-Z, 0-9, '.', '_' and '-'"
        )
    return text


def seconds(text: str) -> float:
    """Read a number of seconds, at least a millisecond.

    Raises:
        BadParameter: It is not valid.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not _LEAST_SECONDS <= found < math.inf:
        raise click.BadParameter(f"{text!r} was found; expected a number of seconds, at least {_LEAST_SECONDS}")
    return found


def parse_time(text: str, other: str = "") -> dt.datetime:
    """Read a time: ISO 8601, in UTC unless it has an offset, or relative to now, such as `-6h`.

    Args:
        text: The value of an option.
        other: Alternatives to a time, for the error message.

    Raises:
        BadParameter: *text* is not a time.
    """
    try:
        if (ago := _AGO.fullmatch(text)) is not None:
            return dt.datetime.now(dt.UTC) - dt.timedelta(**{_UNITS[ago["unit"]]: float(ago["number"])})
        when = dt.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} was found; expected {other}a time such as 2026-01-31T12:00 (UTC unless it has an offset) or -6h "
            "(six hours ago; s, m, h, d and w are units)"
        ) from None
    return when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)


def moment(*words: str, offset: bool = False) -> Callable[[str], Any]:
    """Return the type of an option that selects positions: one of some words, a time, or offsets.

    Args:
        words: Valid words.
        offset: Whether offsets are a single number, not a JSON file with one for each partition.
    """
    other = "an offset" if offset else 'a JSON file such as {"orders": {"0": 41}}'

    def moment_or_file(value: str) -> Any:
        if value in words:
            return value
        if offset and value.isascii() and value.isdigit():
            return int(value)
        if offset or not Path(value).is_file():
            return parse_time(value, f"{', '.join(map(repr, words))}, {other}, or ")
        try:
            return json.loads(Path(value).read_text(encoding="utf-8"))
        except ValueError as error:
            raise click.BadParameter(
                f"{value} is not JSON ({error}): expected offsets by topic and partition"
            ) from None

    return moment_or_file


def coordinates(text: str) -> Coordinates:
    """Read the coordinates of a record.

    Raises:
        BadParameter: They are not valid.
    """
    found = Coordinates.parse(text)
    if found is None:
        raise click.BadParameter(f"{text!r} was found; expected TOPIC/PARTITION/OFFSET, such as orders/0/41")
    return found


class OrderedGroup(click.Group):
    """A group whose help lists its commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature is click's
        """Return the names in that order."""
        return list(self.commands)


# Arguments and options ----------------------------------------------------------------

target = click.argument("target", metavar="MODULE:APP")
topic_argument = click.argument("topic", metavar="TOPIC", type=topic_name)
group_argument = click.argument("group", metavar="GROUP")
run_directory = click.argument("directory", metavar="DIR")

app_dir = click.option(
    "--app-dir",
    type=click.Path(exists=True, file_okay=False),
    default=".",
    show_default=True,
    help="Directory to search for MODULE first.",
)
master = click.option(
    "--master",
    metavar="MASTER_URL",
    default="local[*,4]",
    show_default=True,
    help="Where Spark runs, as in spark-submit.",
)


def bootstrap_servers(replaced: str = "AIOSHARD_BOOTSTRAP_SERVERS") -> Callable[[F], F]:
    """Return `--bootstrap-servers`; its help says that it overrides *replaced*."""
    return click.option("--bootstrap-servers", "-b", metavar="HOST:PORT,…", help=f"Brokers; overrides {replaced}.")


def as_json(what: str) -> Callable[[F], F]:
    """Return `--json`, which prints *what* for a program to read."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as one JSON object on standard output.")


# Selecting dead letters and parked records --------------------------------------------

_FILTERS = (
    click.option(
        "--partition",
        "-p",
        "partitions",
        type=click.IntRange(0),
        metavar="PARTITION",
        multiple=True,
        help="Only this partition of TOPIC; repeatable.",
    ),
    click.option("--handler", metavar="NAME", help="Handler that failed."),
    click.option("--group", metavar="GROUP", help="Consumer group of that handler."),
    click.option("--error", metavar="CLASS", help="Class of the exception."),
    click.option("--topic", "-t", "source", metavar="NAME", help="Topic of the original record."),
    click.option("--key", metavar="KEY", help="Key of the record, as text or as printed."),
    click.option(
        "--record",
        "records",
        type=coordinates,
        metavar="TOPIC/PARTITION/OFFSET",
        multiple=True,
        help="Position of the original record; repeatable.",
    ),
    click.option(
        "--header",
        "headers",
        type=HeaderFilter.parse,
        metavar="NAME[=VALUE]",
        multiple=True,
        help="Header of the record; repeatable.",
    ),
    click.option(
        "--text", metavar="SUBSTRING", help="Text that the key, the value or the message of the error contains."
    ),
    click.option(
        "--since", type=parse_time, metavar="TIME", help="Failed at this time (UTC) or later; -6h is six hours ago."
    ),
    click.option("--until", type=parse_time, metavar="TIME", help="Failed before this time."),
)


def filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Filters`; the command gets them as `filters`, together with those of `at`."""

    @functools.wraps(command)
    def filtering(**values: Any) -> Any:
        given = {name: values.pop(name) for name in Filters._fields if name in values}
        for name in ("since", "until"):
            if given[name] is not None:
                given[name] = given[name].timestamp()
        return command(filters=Filters(**given), **values)

    for option in reversed(_FILTERS):
        filtering = option(filtering)
    return filtering


at = click.option(
    "--at",
    type=coordinates,
    metavar="TOPIC/PARTITION/OFFSET",
    multiple=True,
    help="Position of the dead letter; repeatable.",
)
