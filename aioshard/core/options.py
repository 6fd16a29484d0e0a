"""Checks of the values of a user's options."""

from aioshard.errors import HandlerError
from aioshard.records import TOPIC_NAME


def check(option: object, name: str, is_valid: bool, expected: str) -> None:
    """Refuse *option*, such as `Retry(...)`, if the value of its field *name* is invalid.

    Raises:
        HandlerError: The value is not *expected*.
    """
    if not is_valid:
        value = getattr(option, name)
        raise HandlerError(f"{type(option).__name__}({name}={value!r}) was refused: expected {expected}")


def is_whole(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number of at least *least*; a bool is not."""
    return type(value) is int and value >= least


def is_number(value: object) -> bool:
    """Whether a value is a number; a bool is not."""
    return type(value) in (int, float)


def is_topic(value: object) -> bool:
    """Whether a value is the name of a topic."""
    return isinstance(value, str) and TOPIC_NAME.fullmatch(value) is not None
