"""Times as options give them, and options that say where in a log: a word, a time, or a file with offsets."""

import datetime as dt
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = ["moment", "parse_time"]

_AGO = re.compile(r"-(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_time(text: str, other: str = "") -> dt.datetime:
    """Read a time: ISO 8601, in UTC unless it has an offset, or relative to now, such as `-6h`.

    Args:
        text: The text of an option.
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


def moment(*words: str) -> Callable[[click.Context, click.Parameter, str], Any]:
    """A callback for an option that takes one of some words, a time, or a file with offsets."""

    def read(_: click.Context, __: click.Parameter, value: str) -> Any:
        if value in words:
            return value
        if Path(value).is_file():
            try:
                return json.loads(Path(value).read_text(encoding="utf-8"))
            except ValueError as error:
                raise click.BadParameter(
                    f"{value} is no JSON ({error}): offsets by topic and partition were expected"
                ) from None
        return parse_time(value, f'{", ".join(map(repr, words))}, a JSON file such as {{"orders": {{"0": 41}}}}, or ')

    return read
