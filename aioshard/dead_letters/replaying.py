"""One run over the dead letters of a topic: read again, edited, and sent, processed or marked as done in chunks."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from aioshard.dead_letters.audit import audit, positions_as_text
from aioshard.dead_letters.dead_letter import Position
from aioshard.dead_letters.edits import Transform, edit
from aioshard.dead_letters.finishing import Finish
from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.plan import Plan
from aioshard.dead_letters.processing import RunHandlers
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.dead_letters.results import Chunk, Failed, Result, WorkItem, positions_of
from aioshard.dead_letters.sending import SendBack
from aioshard.ports import record_size
from aioshard.records import counted
from aioshard.serde.side_records import Coordinates
from aioshard.settings import Settings

Action = SendBack | RunHandlers | Finish
"""The action of a run on its dead letters.

Each has a `name` for the audit log, and a `verb` for messages, as in: dead letters were sent back. `most_records` and
`most_bytes` limit the chunks that `apply` works on."""


class Replay:
    """One run over the dead letters of a plan.

    Invariants:
        * The audit log has a change before it happens: a process that is killed can write nothing more.
    """

    def __init__(
        self,
        topic: DeadLetterTopic,
        plan: Plan,
        action: Action,
        *,
        who: str,
        transform: Transform | None = None,
        stop: asyncio.Event,
    ) -> None:
        """Prepare a run; see `run`.

        Args:
            topic: The topic, with all partitions.
            plan: Its dead letters that are due.
            action: The action on them.
            who: The operator, for the audit log.
            transform: Changes the records before.
            stop: Ends the run early, after the chunk that is in progress.
        """
        self.result = Result()
        """How far the run has come, also if it fails."""
        self._topic = topic
        self._plan = plan
        self._action = action
        self._who = who
        self._transform = transform
        self._stop = stop

    async def run(self, settings: Settings) -> None:
        """Fence any other run, work on the dead letters, and write the audit log.

        Args:
            settings: The brokers.

        Raises:
            TakenOverError: Another run has taken over.
            AioshardError: The run was cut short.
        """
        if not (self._plan.due or self._plan.covered):
            return
        async with Ledger.opened(settings, self._topic) as ledger:
            self._plan.adopt(self._topic)
            try:
                await self._finish_covered(ledger)
                await ledger.copy()
                async for items in self._chunks():
                    await self._apply(Chunk(items), ledger)
                    await ledger.copy()
            finally:
                self.result.stopped = self._stop.is_set()

    async def _finish_covered(self, ledger: Ledger) -> None:
        """Store that dead letters are done whose records were finished by others."""
        covered = self._plan.covered
        if covered:
            sentence = f"{counted(len(covered), 'dead letter')} to be done, because others of their records are"
            self._audit(Finish.name, covered, sentence)
            await ledger.store(covered)

    async def _chunks(self) -> AsyncIterator[list[WorkItem]]:
        """Yield items that fit together, in the order of their records; nothing more once the run is stopped."""
        chunk: list[WorkItem] = []
        size = 0
        async for item in self._edited():
            if self._stop.is_set():
                return
            chunk.append(item)
            size += record_size(item.record.key, item.record.value, item.record.headers)
            if len(chunk) >= self._action.most_records or size >= self._action.most_bytes:
                yield sorted(chunk, key=_source_of)
                chunk = []
                size = 0
        if chunk and not self._stop.is_set():
            yield sorted(chunk, key=_source_of)

    async def _edited(self) -> AsyncIterator[WorkItem]:
        """Read the dead letters of the plan, and yield those that the transform changes, as it changes them."""
        async for item in self._plan.items(self._topic):
            match await edit(item, self._transform):
                case WorkItem() as edited:
                    yield edited
                case Failed() as failed:
                    self.result.failed.append(failed)
                case None:
                    self.result.left_alone += 1

    async def _apply(self, chunk: Chunk, ledger: Ledger) -> None:
        """Send, process or mark the items of a chunk."""
        action = self._action
        edited = sum(item.is_edited for item in chunk.items)
        sentence = f"{counted(len(chunk.items), 'record')} to be {action.verb}"
        if edited:
            sentence += f", {edited:,} of them edited"
        self._audit(action.name, positions_of(chunk.items), sentence)
        try:
            await action.apply(chunk, ledger)
        finally:
            self.result.add(chunk)
            if len(chunk.done) < len(chunk.items):
                sentence = f"{len(chunk.done):,} of {counted(len(chunk.items), 'record')} {action.verb}"
                self._audit(action.name, positions_of(chunk.done), sentence)

    def _audit(self, name: str, positions: Iterable[Position], sentence: str) -> None:
        audit(name, self._topic.name, positions_as_text(positions), self._who, sentence)


def _source_of(item: WorkItem) -> Coordinates:
    return item.dead_letter.source


class Preview(NamedTuple):
    """The effect of a transform on the dead letters of a plan."""

    changed: int
    """Number of records that it changes."""
    left_alone: int
    """Number of records that it leaves alone."""
    failed: list[Failed]


async def preview(topic: DeadLetterTopic, plan: Plan, transform: Transform) -> Preview:
    """Apply a transform to the dead letters of a plan, and send or store nothing.

    Raises:
        TransportError: The records cannot be read.
    """
    changed = 0
    left_alone = 0
    failed: list[Failed] = []
    async for item in plan.items(topic):
        match await edit(item, transform):
            case WorkItem():
                changed += 1
            case Failed() as failure:
                failed.append(failure)
            case None:
                left_alone += 1
    return Preview(changed, left_alone, failed)
