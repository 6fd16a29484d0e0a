"""Tables in a terminal: aligned, with escaped record contents."""

import pytest

from aioshard.cli.output import cut, moment_as_text, table
from aioshard.core.text import as_json_value, as_text, bytes_as_text


def test_columns_are_aligned_without_a_terminal() -> None:
    assert table(("key", "n"), [("alice", "1"), ("b", "10")]) == ["key    n", "alice  1", "b      10"]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (None, "-"),
        (b"", ""),
        ("Ångström €".encode(), "Ångström €"),
        (b"\x1b[2J\r\n\x07", r"\x1b[2J\r\n\x07"),
        ("\u202egnp.exe\u2028".encode(), r"\u202egnp.exe\u2028"),
        (b"\xff\x00", "0xff00"),
    ],
)
def test_record_contents_are_escaped_on_one_line(content: bytes | None, shown: str) -> None:
    assert bytes_as_text(content) == shown


@pytest.mark.parametrize(("content", "expected"), [(None, None), (b"a\n", "a\n"), (b"\xff", {"base64": "/w=="})])
def test_json_has_the_whole_record(content: bytes | None, expected: object) -> None:
    assert as_json_value(content) == expected


def test_long_values_are_shortened() -> None:
    assert cut("x" * 60) == "x" * 60
    assert cut("x" * 61) == "x" * 59 + "…"
    assert as_text("a\tb") == r"a\tb"


def test_a_timestamp_out_of_range_is_shown_as_a_number() -> None:
    assert moment_as_text(1e300) == "1e+300 s"
