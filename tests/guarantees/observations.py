"""Observations of records by member processes: written by them, read by the test.

Each process appends one line per observation to its own file. A line is one `write` call made
before the handler continues, so what was reported is there after `kill -9`. Times are of the machine's
monotonic clock, which all processes share.
"""

import enum
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".seen"

RecordId = tuple[int, int]
"""Partition and offset."""


class Kind(enum.StrEnum):
    """The kind of an event of a record."""

    TAKEN_IN = "I"
    """The engine gave it a shard key."""
    STARTED = "S"
    """A run of the handler began."""
    FINISHED = "F"
    """The run did its work and returns."""
    ENDED = "E"
    """The run was cancelled or failed, or was asked to end before it returned: it does not count."""
    EXHAUSTED = "X"
    """The last attempt of the record failed."""


class Seen(NamedTuple):
    """One observation."""

    at: int
    """Nanoseconds of the monotonic clock."""
    process: str
    kind: Kind
    partition: int
    offset: int
    epoch: int
    """Number of the ownership in its process, counted over all partitions; 0 where the handler cannot know."""
    key: str

    @property
    def record_id(self) -> RecordId:
        """Partition and offset."""
        return self.partition, self.offset


class Recorder:
    """A member's side; may be used from several threads."""

    def __init__(self, directory: Path, process: str) -> None:
        self._file = os.open(directory / f"{process}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, kind: Kind, record_id: RecordId, epoch: int, key: bytes | None) -> None:
        """Writes one observation; it is in the file when this returns."""
        text = "" if key is None else key.decode()
        os.write(
            self._file, f"{time.monotonic_ns()} {kind.value} {record_id[0]} {record_id[1]} {epoch} {text}\n".encode()
        )


class Observations:
    """The test's side: everything that all processes have reported up to the last `refresh`.

    Attributes:
        seen: All observations; those of one process in the order in which it made them.
        finished: Records of which a run has finished at least once.
        started: How often each record was started.
    """

    def __init__(self, directory: Path) -> None:
        self.seen: list[Seen] = []
        self.finished: set[RecordId] = set()
        self.started: dict[RecordId, int] = {}
        self._directory = directory
        self._read: dict[Path, int] = {}

    def refresh(self) -> "Observations":
        """Reads what has been added since."""
        for file in sorted(self._directory.glob(f"*{SUFFIX}")):
            for seen in self._new_of(file):
                self.seen.append(seen)
                if seen.kind is Kind.FINISHED:
                    self.finished.add(seen.record_id)
                elif seen.kind is Kind.STARTED:
                    self.started[seen.record_id] = self.started.get(seen.record_id, 0) + 1
        return self

    def of(self, process: str, *kinds: Kind) -> list[Seen]:
        """The observations of one process, of the given kinds."""
        return [seen for seen in self.seen if seen.process == process and seen.kind in kinds]

    def _new_of(self, file: Path) -> Iterator[Seen]:
        with file.open("rb") as stream:
            stream.seek(self._read.get(file, 0))
            text = stream.read()
        # A line that is being written is left for the next time.
        complete = text.rfind(b"\n") + 1
        self._read[file] = self._read.get(file, 0) + complete
        process = file.name.removesuffix(SUFFIX)
        for line in text[:complete].decode().splitlines():
            at, kind, partition, offset, epoch, key = line.split(" ", 5)
            yield Seen(int(at), process, Kind(kind), int(partition), int(offset), int(epoch), key)
