"""Reads parked records back when they are to be run again."""

from aioshard.core.parking import ParkedEntry
from aioshard.engine.failing.parked import Lot
from aioshard.engine.failing.shelf import Shelf
from aioshard.errors import TransportError
from aioshard.ports import SideTopics
from aioshard.records import Record
from aioshard.serde.side_records import ParkedRecord, read_parked

__all__ = ["Retrieval"]


class Retrieval:
    """The payloads of parked records, which are not kept in memory while they wait."""

    def __init__(self, side_topics: SideTopics) -> None:
        """Make it for one handler."""
        self._side = side_topics
        self._shelf = Shelf()
        self._missing: dict[ParkedEntry, Lot] = {}
        """Records that were not found where they were stored."""
        self._failure: str | None = None

    @property
    def holds_some(self) -> bool:
        """Whether anything that was read is kept."""
        return bool(self._shelf)

    def forget(self) -> None:
        """Keep nothing any more that was read."""
        self._shelf.clear()

    def trouble(self) -> str | None:
        """Why a record cannot be had, in a sentence; None when all could that were wanted."""
        self._missing = {entry: lot for entry, lot in self._missing.items() if lot.keys.get(entry.offset) is entry}
        for entry, lot in self._missing.items():
            return (
                f"parked record {lot.place(entry).coordinates} is not in {lot.stored_in} at offset {entry.stored_at} "
                "any more, and its key waits for it: not compaction has deleted it; 'aioshard park drop' "
                "gives it up"
            )
        return self._failure

    async def fetch(self, lot: Lot, entry: ParkedEntry) -> Record | None:
        """A parked record as it was; None when it cannot be had now, or another was written in its place."""
        stored = self._shelf.take(lot.stored_in, entry.stored_at)
        if stored is None:
            try:
                found = await self._side.read(lot.stored_in, entry.stored_at)
            except TransportError as error:
                self._failure = str(error)
                return None
            self._failure = None
            self._shelf.keep(lot.stored_in, found)
            stored = self._shelf.take(lot.stored_in, entry.stored_at)
        parked = None if stored is None else read_parked(stored)
        if not isinstance(parked, ParkedRecord):
            self._missing[entry] = lot
            return None
        self._missing.pop(entry, None)
        return parked.original
