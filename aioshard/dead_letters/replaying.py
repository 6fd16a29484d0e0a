"""One run over the dead letters of a topic: in chunks, with the progress stored after each."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.letters import Letter
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.dead_letters.runs import ThroughHandlers
from aioshard.dead_letters.sending import ToTopic
from aioshard.engine.tasks import finish
from aioshard.ports import record_size
from aioshard.serde.side_records import Coordinates


@dataclasses.dataclass(slots=True, kw_only=True)
class Replaying:
    """One run over the dead letters of a topic."""

    topic: str
    filters: Filters
    limit: int | None = None
    """Maximum number of records."""
    again: bool = False
    """Whether to include those that are done."""
    done: Counter[str] = dataclasses.field(default_factory=Counter)
    """By topic."""
    failed: list[tuple[Letter, str]] = dataclasses.field(default_factory=list)
    """Those that stay due, each with the reason."""
    records: dict[Coordinates, bool] = dataclasses.field(default_factory=dict)
    """The records of this run, and whether they are done."""

    async def run(self, dead_letters: DeadLetterTopic, destination: ToTopic | ThroughHandlers) -> None:
        """Read the topic, and replay its dead letters in chunks.

        Raises:
            AioshardError: The run was cut short; `done` has what was done before.
        """
        chunk: list[Letter] = []
        size = 0
        async for letter in dead_letters.due_letters(self.filters, again=self.again):
            chunk.append(letter)
            if letter.source in self.records:
                continue  # the app was killed between the dead letter and the commit
            self.records[letter.source] = False
            size += record_size(letter.original.key, letter.original.value, letter.original.headers)
            if len(self.records) == self.limit:
                break
            if len(chunk) >= destination.most_records or size >= destination.most_bytes:
                await self._process(dead_letters, destination, chunk)
                chunk = []
                size = 0
        await self._process(dead_letters, destination, chunk)

    async def _process(
        self, dead_letters: DeadLetterTopic, destination: ToTopic | ThroughHandlers, letters: Sequence[Letter]
    ) -> None:
        """Replay dead letters, the first one of each record, and store which ones are done."""
        due = {letter.source: letter for letter in reversed(letters) if not self.records[letter.source]}
        try:
            if due:
                await destination.process([due[source] for source in sorted(due)], self._finished)
        finally:
            done = [letter for letter in letters if self.records[letter.source]]
            # Even if interrupted: otherwise the next run would replay these again.
            await finish(dead_letters.store_progress(done), "store the progress")

    def _finished(self, letter: Letter, why: str | None) -> None:
        if why is None:
            self.records[letter.source] = True
            self.done[letter.original.topic] += 1
        else:
            self.failed.append((letter, why))
