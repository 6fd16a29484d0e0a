"""Tables for people: aligned, and what a record holds does nothing to the terminal."""

import pytest

from aioshard.cli.output import as_json_value, as_text, bytes_as_text, cut, moment_as_text, table


def test_columns_are_aligned_where_nobody_looks() -> None:
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
def test_what_a_record_holds_is_shown_on_one_line_and_does_nothing(content: bytes | None, shown: str) -> None:
    assert bytes_as_text(content) == shown


@pytest.mark.parametrize(("content", "told"), [(None, None), (b"a\n", "a\n"), (b"\xff", {"base64": "/w=="})])
def test_a_program_is_told_all_that_a_record_holds(content: bytes | None, told: object) -> None:
    assert as_json_value(content) == told


def test_what_is_long_is_cut() -> None:
    assert cut("x" * 60) == "x" * 60
    assert cut("x" * 61) == "x" * 59 + "…"
    assert as_text("a\tb") == r"a\tb"


def test_a_moment_that_no_calendar_has_is_shown_as_it_is() -> None:
    assert moment_as_text(1e300) == "1e+300 s"
