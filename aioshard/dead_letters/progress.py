"""Which dead letters of a partition are done, as brokers store it."""

import copy
from collections.abc import Collection, Iterable, Iterator
from typing import Self

from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run, beyond, holds, joined
from aioshard.ports import Committed


def progress_group(topic: str) -> str:
    """Return the group whose committed offsets store which dead letters of a topic are done."""
    return f"aioshard-dlt.{topic}"


def sending_group(topic: str) -> str:
    """Return the group that stores the same in the transactions that send dead letters back.

    Brokers delete offsets that a transaction has stored a week after the last one. So they are copied to
    `progress_group`, which they keep for years. A copy that arrives late, from a run that another one has replaced,
    must not undo the progress of that one: a dead letter is done if either group says so.
    """
    return f"{progress_group(topic)}:sending"


class ReplayProgress:
    """Tracks which dead letters of one partition are done.

    Stored like an app's progress: an offset below which all are done, and the finished offsets above it.

    `add` all dead letters in offset order, from `start` on, before you commit: offsets between them hold no dead
    letter, so they need no room in the stored text.

    Example:
        >>> progress = ReplayProgress()
        >>> for offset in (3, 5, 6, 9):
        ...     progress.add(offset)
        >>> progress.finish([6, 3])
        >>> again = ReplayProgress(progress.commit())
        >>> [offset for offset in (3, 5, 6, 9) if again.is_done(offset)]
        [3, 6]
    """

    def __init__(self, *commits: Committed) -> None:
        """Begin with stored progress; a dead letter is done if any of *commits* says so."""
        self.start = max((offset for offset, _ in commits), default=0)
        """All offsets below were done when this was read."""
        runs = [run for offset, text in commits for run in CommitMetadata.read(text, offset).finished]
        self._finished = _union(beyond(runs, self.start))
        """Finished offsets; of use at and above the position."""
        self._position = self.start
        """All dead letters below were added."""
        self._due: dict[int, None] = {}
        """Dead letters below the position that are not done, ascending."""

    def after(self, offsets: Collection[int]) -> Self:
        """Return the progress with more dead letters done; this one does not change."""
        following = copy.copy(self)
        following.finish(offsets)
        return following

    def is_done(self, offset: int) -> bool:
        """Return whether the dead letter at *offset* is done."""
        if offset < self._position:
            return offset not in self._due
        return holds(self._finished, offset)

    def add(self, offset: int) -> None:
        """Add the next dead letter; nothing happens if it was added before."""
        if offset < self._position:
            return
        if not holds(self._finished, offset):
            self._due[offset] = None
        self._position = offset + 1

    def finish(self, offsets: Collection[int]) -> None:
        """Mark dead letters as done; nothing happens to those that already are."""
        done = set(offsets)
        self._due = {offset: None for offset in self._due if offset not in done}
        later = [Run(offset, offset + 1) for offset in done if offset >= self._position]
        if later:
            self._finished = _union([*self._finished, *later])

    def commit(self) -> Committed:
        """Return the progress to store. Offsets that do not fit into it are left out, the highest first; see `fits`."""
        start, finished = self._state()
        return Committed(start, CommitMetadata(finished=finished).text(start))

    @property
    def fits(self) -> bool:
        """Whether brokers can store all finished offsets."""
        start, finished = self._state()
        text = CommitMetadata(finished=finished).text(start)
        return CommitMetadata.read(text, start).finished == finished

    def _state(self) -> tuple[int, tuple[Run, ...]]:
        """Return the offset below which all are done, and the finished runs above it."""
        runs = joined([*self._finished_below(), *beyond(self._finished, self._position)])
        start = next(iter(self._due), self._position)
        if runs and runs[0].start == start:
            return runs[0].end, tuple(runs[1:])
        return start, tuple(runs)

    def _finished_below(self) -> Iterator[Run]:
        """Iterate over the finished runs between the oldest dead letter that is due and the position."""
        later = iter(self._due)
        previous = next(later, self._position)
        for offset in later:
            if offset > previous + 1:
                yield Run(previous + 1, offset)
            previous = offset
        if self._position > previous + 1:
            yield Run(previous + 1, self._position)


def _union(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return runs that contain the same offsets, ascending and apart from each other."""
    result: list[Run] = []
    for run in sorted(runs):
        if result and run.start <= result[-1].end:
            result[-1] = Run(result[-1].start, max(result[-1].end, run.end))
        else:
            result.append(run)
    return tuple(result)
