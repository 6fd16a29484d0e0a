"""Text of the application that any output can show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.text import encodable, message_of


@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_encoded(text: str) -> None:
    shown = encodable(text)

    assert shown.encode().decode() == shown
    assert shown == text or any("\ud800" <= character <= "\udfff" for character in text)


def test_a_lone_surrogate_is_shown_as_its_escape_sequence() -> None:
    assert message_of(ValueError("cannot open " + b"caf\xe9.txt".decode("utf-8", "surrogateescape"))) == (
        r"cannot open caf\udce9.txt"
    )


@pytest.mark.parametrize("problem", [RuntimeError, UnicodeError, RecursionError])
def test_an_exception_without_a_message_is_named(problem: type[Exception]) -> None:
    class SpeechlessError(Exception):
        def __str__(self) -> str:
            raise problem

    assert problem.__name__ in message_of(SpeechlessError())
