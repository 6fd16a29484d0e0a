"""A dead letter that a command or the dashboard works on."""

import hashlib
from typing import Any, NamedTuple

from aioshard.core.text import as_json_value
from aioshard.dead_letters.filters import Filters
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, Failure

Position = tuple[int, int]
"""Partition and offset in the dead-letter topic."""


class StoredDeadLetter(NamedTuple):
    """A dead letter."""

    at: Coordinates
    """Its position in the dead-letter topic."""
    original: Record
    failure: Failure
    done: bool
    """Whether it was sent back or processed before."""
    schema_id: str | None = None
    """The number or GUID of the schema that its value names in a schema registry; None if it is not known."""
    subject: str | None = None
    """The subject of that schema; None if it is not known."""

    def matches(self, filters: Filters) -> bool:
        """Return whether it matches all filters."""
        return (
            filters.match_position(self.at)
            and filters.done in {None, self.done}
            and filters.match(self.original, self.failure)
        )

    @property
    def position(self) -> Position:
        """Partition and offset of the dead letter."""
        return self.at.partition, self.at.offset

    @property
    def source(self) -> Coordinates:
        """The position of the original record."""
        return Coordinates.of(self.original)

    @property
    def identity(self) -> bytes:
        """A hash of the record: dead letters with the same one are about the same failure.

        A process that is killed after it wrote a dead letter and before it committed the offset writes it again. The
        position alone does not tell: a topic that was deleted and created again has other records at the same offsets.
        """
        original = self.original
        digest = hashlib.blake2b(repr((self.source, original.timestamp)).encode(), digest_size=16)
        for content in (original.key, original.value):
            digest.update(b"-" if content is None else b"+%d:" % len(content) + content)
        return digest.digest()

    def as_object(self, *, payload: bool = True) -> dict[str, Any]:
        """Return the dead letter for JSON.

        Args:
            payload: Whether to include key, value, headers and the message of the error; otherwise they are None, and
                `hidden` is true.
        """
        original = self.original
        failure = self.failure._asdict()
        headers = [[name, as_json_value(value)] for name, value in original.headers]
        if not payload:
            failure["message"] = None
        content = {
            "partition": self.at.partition,
            "offset": self.at.offset,
            "replayed": self.done,
            "record": {
                **self.source._asdict(),
                "timestamp": original.timestamp,
                "key": as_json_value(original.key) if payload else None,
                "value": as_json_value(original.value) if payload else None,
                "headers": headers if payload else None,
            },
            **failure,
            "schema_id": self.schema_id,
            "subject": self.subject,
        }
        return content if payload else {**content, "hidden": True}
