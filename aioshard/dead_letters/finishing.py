"""Marks dead letters as done without sending or processing them."""

from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.results import Chunk, positions_of


class Finish:
    """Stores that dead letters are done: their records were given up, or fixed elsewhere."""

    name = "finish"
    verb = "marked as done"
    most_records = 10_000
    most_bytes = 64 * 1024 * 1024

    async def apply(self, chunk: Chunk, ledger: Ledger) -> None:
        """Store that the dead letters of a chunk are done.

        Raises:
            TransportError: Nothing was stored, unless nobody can tell; see `Ledger.store`.
        """
        await ledger.store(positions_of(chunk.items))
        chunk.finish(chunk.items)
