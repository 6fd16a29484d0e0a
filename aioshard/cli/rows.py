"""Turn JSON lines into records; each line is checked."""

import codecs
import json
from typing import Any, NoReturn

from aioshard.errors import AioshardError

__all__ = ["BadLineError", "JsonRows", "LineSplitter", "Row"]

Row = tuple[bytes | None, bytes]
"""Key and value of a record."""


class BadLineError(AioshardError):
    """A line of the input is not what it should be; nothing of it was published.

    Attributes:
        line: Counted from 1.
    """

    def __init__(self, name: str, line: int, reason: str) -> None:
        self.line = line
        super().__init__(f"line {line} of {name} {reason}")


class JsonRows:
    """One JSON object per line; the value is the line itself. Blank lines are passed over."""

    def __init__(self, name: str, key_field: str | None) -> None:
        """Make a parser.

        Args:
            name: The input's, for the sentences.
            key_field: The field that the key is taken from: text as it is, anything else as JSON; where it is
                missing or null the record has no key. None gives no record a key.
        """
        self._name = name
        self._key_field = key_field
        self._line = 0

    def feed(self, line: bytes) -> Row | None:
        """Return the record of *line*, or None for a blank line.

        Raises:
            BadLineError: The line cannot be read.
        """
        self._line += 1
        value = line.removeprefix(codecs.BOM_UTF8).strip() if self._line == 1 else line.strip()
        if not value:
            return None
        try:
            row = json.loads(value, parse_constant=_refuse_constant)
            if not isinstance(row, dict):
                self._refuse(f"is JSON, but {_kind(row)}: one JSON object per line was expected")
            return self._key(row), value
        except RecursionError:
            self._refuse("is nested too deeply")
        except UnicodeError:
            self._refuse("is not UTF-8, or its key cannot be written in it")
        except ValueError as error:
            self._refuse(f"is not JSON ({error}): one JSON object per line was expected")

    def _key(self, row: dict[str, Any]) -> bytes | None:
        key = row.get(self._key_field) if self._key_field is not None else None
        if key is None:
            return None
        if isinstance(key, dict | list):
            self._refuse(f"has {_kind(key)} in the field {self._key_field!r}: a key is text or a number")
        return (key if isinstance(key, str) else json.dumps(key)).encode()

    def _refuse(self, reason: str) -> NoReturn:
        raise BadLineError(self._name, self._line, reason) from None


class LineSplitter:
    """Bytes as they come, in whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, data: bytes) -> list[bytes]:
        """The lines that *data* ends, with their line breaks. No data is the end of the input."""
        if not data:
            rest, self._rest = self._rest, b""
            return [rest] if rest else []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line + b"\n" for line in lines]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _kind(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return "a text"
        case bool() | None:
            return json.dumps(value)
        case _:
            return "a number"
