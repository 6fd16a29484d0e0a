"""Marks dead letters as done without sending or processing them."""

from collections.abc import Sequence

from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.results import Result, Work


class AsDone:
    """Stores that dead letters are done: their records were given up, or fixed elsewhere. Used by one run."""

    action = "finish"
    verb = "marked as done"
    most_records = 10_000
    most_bytes = 64 * 1024 * 1024

    def __init__(self, ledger: Ledger) -> None:
        """Create a destination.

        Args:
            ledger: Stores which dead letters are done.
        """
        self._ledger = ledger

    async def process(self, work: Sequence[Work], result: Result) -> None:
        """Store that dead letters are done.

        Raises:
            TransportError: Nothing was stored, unless nobody can tell; see `Ledger.store`.
        """
        await self._ledger.store([place for item in work for place in item.places])
        result.finish(work)
