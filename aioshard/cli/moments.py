"""Options that say where in a log: a word, a time, or a file with offsets."""

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = ["moment"]


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
        try:
            when = dt.datetime.fromisoformat(value)
        except ValueError:
            raise click.BadParameter(
                f"{value!r} was found; {' or '.join(map(repr, words))}, a time such as 2026-01-31T06:00:00+00:00, or a "
                'JSON file such as {"orders": {"0": 41}} was expected'
            ) from None
        return when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)

    return read
