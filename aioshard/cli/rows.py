"""Lines of a file to records: JSON lines and CSV, each line checked."""

import codecs
import csv
import json
from typing import Any, Literal, NoReturn, Protocol

from aioshard.errors import AioshardError

__all__ = ["BadLineError", "CsvRows", "Format", "JsonRows", "LineSplitter", "Row", "Rows"]

Format = Literal["jsonl", "csv"]

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


class Rows(Protocol):
    """Makes records of the lines of one input, given one after the other."""

    def feed(self, line: bytes) -> Row | None:
        """The record that ends with *line*, or None when none does.

        Raises:
            BadLineError: The line cannot be read.
        """

    def finish(self) -> None:
        """The input has ended.

        Raises:
            BadLineError: In the middle of a record.
        """


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
        """See `Rows.feed`."""
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

    def finish(self) -> None:
        """See `Rows.finish`."""

    def _key(self, row: dict[str, Any]) -> bytes | None:
        key = row.get(self._key_field) if self._key_field is not None else None
        if key is None:
            return None
        if isinstance(key, dict | list):
            self._refuse(f"has {_kind(key)} in the field {self._key_field!r}: a key is text or a number")
        return (key if isinstance(key, str) else json.dumps(key)).encode()

    def _refuse(self, reason: str) -> NoReturn:
        raise BadLineError(self._name, self._line, reason) from None


class CsvRows:
    """CSV with a header; the value is a JSON object of texts. An empty key field gives no key."""

    def __init__(self, name: str, key_field: str | None) -> None:
        """Make a parser; the arguments are those of `JsonRows`."""
        self._name = name
        self._key_field = key_field
        self._line = 0
        self._header: list[str] | None = None
        self._key_column: int | None = None
        self._pending: list[str] = []
        """Lines of a record with a line break inside quotes, which goes on."""

    def feed(self, line: bytes) -> Row | None:
        """See `Rows.feed`."""
        self._line += 1
        fields = self._fields(line)
        if not fields:
            return None
        if self._header is None:
            self._begin(fields)
            return None
        if len(fields) != len(self._header):
            self._refuse(f"has {len(fields)} fields: {len(self._header)} were expected, as in the header")
        key = fields[self._key_column] if self._key_column is not None else ""
        value = json.dumps(dict(zip(self._header, fields, strict=True)), ensure_ascii=False, separators=(",", ":"))
        return key.encode() or None, value.encode()

    def finish(self) -> None:
        """See `Rows.finish`."""
        if self._pending:
            self._line -= len(self._pending) - 1
            self._refuse("opens a quotation that nothing closes")

    def _fields(self, line: bytes) -> list[str]:
        """The fields of the record that ends with *line*; none when it goes on, or the line is blank."""
        try:
            self._pending.append(line.decode("utf-8-sig" if self._line == 1 else "utf-8"))
        except UnicodeError:
            self._refuse("is not UTF-8")
        try:
            (*_, fields) = csv.reader(self._pending, strict=True)
        except csv.Error as error:
            if str(error) == "unexpected end of data":
                return []
            self._refuse(f"is not CSV ({error})")
        self._pending.clear()
        return fields

    def _begin(self, header: list[str]) -> None:
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            self._refuse(f"names the column {twice[0]!r} twice: each column needs a name of its own")
        if self._key_field is not None:
            if self._key_field not in header:
                self._refuse(f"is a header without {self._key_field!r}; its columns are {', '.join(header)}")
            self._key_column = header.index(self._key_field)
        self._header = header

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
