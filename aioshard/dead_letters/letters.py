"""A dead letter that a command or the dashboard works on."""

from collections.abc import Callable
from typing import Any, NamedTuple

from aioshard.core.text import as_json_value
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, Failure


class Identity(NamedTuple):
    """The record that a dead letter is about: two dead letters with the same identity are about one failure.

    A process that is killed after it wrote a dead letter and before it committed the offset writes it again. The
    position alone is not enough: a topic that was deleted and created again has other records at the same offsets.
    """

    source: Coordinates
    timestamp: float
    content: int
    """Hash of key and value, of this process."""


class Letter(NamedTuple):
    """A dead letter."""

    at: Coordinates
    """Its position in the dead-letter topic."""
    original: Record
    failure: Failure
    done: bool
    """Whether it was sent back or processed before."""

    @property
    def source(self) -> Coordinates:
        """The position of the original record."""
        return Coordinates.of(self.original)

    @property
    def identity(self) -> Identity:
        """The record that it is about."""
        original = self.original
        return Identity(self.source, original.timestamp, hash((original.key, original.value)))


def as_object(letter: Letter, *, payload: bool = True) -> dict[str, Any]:
    """Return a dead letter for JSON.

    Args:
        letter: The dead letter.
        payload: Whether to include key, value, headers and the message of the error; otherwise they are None, and
            `hidden` is true.
    """
    original = letter.original
    failure = letter.failure._asdict()
    headers = [[name, as_json_value(value)] for name, value in original.headers]
    if not payload:
        failure["message"] = None
    shown = {
        "partition": letter.at.partition,
        "offset": letter.at.offset,
        "replayed": letter.done,
        "record": {
            **letter.source._asdict(),
            "timestamp": original.timestamp,
            "key": as_json_value(original.key) if payload else None,
            "value": as_json_value(original.value) if payload else None,
            "headers": headers if payload else None,
        },
        **failure,
    }
    return shown if payload else {**shown, "hidden": True}


Finished = Callable[[Letter, str | None], None]
"""Called for each dead letter: with None if it is done, otherwise with the reason why not."""
