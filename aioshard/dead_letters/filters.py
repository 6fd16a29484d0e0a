"""Filters for dead letters and parked records: one value, built from the options of a command or from a web request."""

from collections.abc import Collection
from typing import NamedTuple

from aioshard.core.text import bytes_as_text
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, Failure


class HeaderFilter(NamedTuple):
    """A header that a record must have.

    Example:
        >>> HeaderFilter.parse("tenant=acme"), HeaderFilter.parse("tenant")
        (HeaderFilter(name='tenant', value='acme'), HeaderFilter(name='tenant', value=None))
    """

    name: str
    value: str | None = None
    """None accepts any value."""

    @classmethod
    def parse(cls, text: str) -> "HeaderFilter":
        """Read `name=value` or `name`."""
        name, separator, value = text.partition("=")
        return cls(name, value if separator else None)

    def matches(self, record: Record) -> bool:
        """Return whether a record has the header."""
        return any(
            name == self.name and (self.value is None or _is_content(content, self.value))
            for name, content in record.headers
        )


class Filters(NamedTuple):
    """Filters for the records of a side topic; a record must match all of them.

    Example:
        >>> record = Record("orders", 0, 41, b"alice", b'{"total": -1}', (("tenant", b"acme"),), 0.0)
        >>> failure = Failure("billing", "on_order", 5, "ValueError", "total is negative", 1700000000.0)
        >>> Filters(error="ValueError", text="negative").match(record, failure)
        True
        >>> Filters(headers=(HeaderFilter("tenant", "initech"),)).match(record, failure)
        False
    """

    partitions: tuple[int, ...] = ()
    """Partitions of the side topic; empty means all."""
    at: Collection[Coordinates] = ()
    """Positions in the side topic; empty means all."""
    done: bool | None = None
    """Whether a dead letter was sent back or processed before; None means both. Parked records are never done."""
    handler: str | None = None
    group: str | None = None
    error: str | None = None
    """Class of the exception."""
    source: str | None = None
    """Topic of the original record."""
    key: str | None = None
    """The key, as text or as the commands print it."""
    records: tuple[Coordinates, ...] = ()
    """Positions of the original records; empty means all."""
    headers: tuple[HeaderFilter, ...] = ()
    text: str | None = None
    """Text that the key, the value or the message of the error contains."""
    since: float | None = None
    """Time of the failure or later, in seconds since the epoch."""
    until: float | None = None
    """Before this time of the failure."""

    def match_position(self, at: Coordinates) -> bool:
        """Return whether the position of a record in the side topic matches."""
        return (not self.partitions or at.partition in self.partitions) and (not self.at or at in self.at)

    def match(self, original: Record, failure: Failure) -> bool:
        """Return whether a record matches, wherever it is in the side topic."""
        return (
            self._match_failure(failure)
            and self._match_original(original)
            and (self.text is None or _contains(original, failure, self.text))
        )

    def _match_failure(self, failure: Failure) -> bool:
        return (
            self.handler in {None, failure.handler}
            and self.group in {None, failure.group}
            and self.error in {None, failure.error}
            and (self.since is None or failure.failed_at >= self.since)
            and (self.until is None or failure.failed_at < self.until)
        )

    def _match_original(self, original: Record) -> bool:
        return (
            self.source in {None, original.topic}
            and (self.key is None or _is_content(original.key, self.key))
            and (not self.records or Coordinates.of(original) in self.records)
            and all(header.matches(original) for header in self.headers)
        )


EVERYTHING = Filters()


def _is_content(content: bytes | None, given: str) -> bool:
    """Return whether *given* is a key or a header, either as text or as the commands print it."""
    return content is not None and (content == _as_bytes(given) or bytes_as_text(content) == given)


def _contains(original: Record, failure: Failure, text: str) -> bool:
    searched = _as_bytes(text)
    return searched in (original.key or b"") or searched in (original.value or b"") or text in failure.message


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
