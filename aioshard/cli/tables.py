"""Rows for people: a table in a terminal, aligned columns elsewhere; and what records hold, safe to show."""

import base64
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click

__all__ = ["as_json_value", "as_text", "bytes_as_text", "cut", "duration_as_text", "moment_as_text", "print_table"]

_LONGEST = 60


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows on standard output.

    Args:
        headings: One for each column.
        rows: Cells that are safe to show; see `as_text`.
    """
    cells = [tuple(row) for row in rows]
    if sys.stdout.isatty():
        _print_rich(headings, cells)
        return
    lines = [tuple(headings), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_rich(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - imported on use
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")  # nothing is lost in a narrow terminal: offsets and keys are copied
    for row in rows:
        # As text: a record may hold what rich takes for its markup.
        table.add_row(*map(Text, row))
    Console().print(table)


def as_text(text: str) -> str:
    """*text* on one line, with what is not printable escaped: a record must not move a terminal's cursor."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def bytes_as_text(content: bytes | None) -> str:
    """What a key or a value holds: text where it is UTF-8, else `0x` and hexadecimal digits; `-` for null."""
    if content is None:
        return "-"
    try:
        return as_text(content.decode())
    except UnicodeDecodeError:
        return f"0x{content.hex()}"


def moment_as_text(seconds: float) -> str:
    """A moment, to the second, in the zone of this machine."""
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone().isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"


def duration_as_text(seconds: float) -> str:
    """A time in the largest unit of which there are two.

    Example:
        >>> duration_as_text(90), duration_as_text(150), duration_as_text(200_000)
        ('90 s', '2 min', '2 d')
    """
    for size, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def cut(text: str, longest: int = _LONGEST) -> str:
    """At most *longest* characters of *text*."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def as_json_value(content: bytes | None) -> Any:
    """What a key or a value holds, for JSON: a string where it is UTF-8, else `{"base64": "…"}`; nothing is lost."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
