"""Commits of a run: their metadata, and what must not change in them while the run lasts."""

import dataclasses
from collections.abc import Iterable, Mapping

from aioshard.core.commit_metadata import CommitMetadata, Lease
from aioshard.errors import PlanError
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.spark.runs.plan import CommittedThen, Plan

__all__ = ["after", "leased", "moved", "noted", "then_of"]


def noted(committed: Committed | CommittedThen | None) -> CommitMetadata:
    """Return the parsed metadata of a commit; it is empty without a commit."""
    if committed is None or committed.offset is None:
        return CommitMetadata()
    return CommitMetadata.read(committed.metadata, committed.offset)


def then_of(plan: Plan) -> dict[TopicPartition, CommittedThen]:
    """Return the group's commit on each partition when the plan was made."""
    return {TopicPartition(then.topic, then.partition): then for then in plan.committed}


def after(then: CommittedThen, end: int) -> Committed:
    """Return the commit for a partition that the run has processed up to *end*.

    Completions beyond *end* are kept, and another program's metadata is kept separately. The first-commit marker is
    dropped: this commit already shows that the group knows the topic.

    Raises:
        PlanError: The other program's metadata cannot be kept.
    """
    before = noted(then)
    beyond = tuple(run._replace(start=max(run.start, end)) for run in before.finished if run.end > end)
    return Committed(end, _text(CommitMetadata(finished=beyond, foreign=before.foreign), end, then))


def leased(now: Committed, lease: Lease | None) -> Committed | None:
    """Return the same commit with another lease, or None if that would hide another program's metadata.

    Parallel Consumer's metadata counts as such although aioshard reads it: once the lease ends, its author may resume.
    """
    before = noted(now)
    if before.foreign is not None or before.ignored or (now.metadata and not now.metadata.startswith("aioshard/")):
        return None
    return now._replace(metadata=dataclasses.replace(before, lease=lease).text(now.offset))


def moved(
    then: Mapping[TopicPartition, CommittedThen], now: Mapping[TopicPartition, Committed | None]
) -> Iterable[str]:
    """Describe each commit that has changed since the plan was made; leases are ignored."""
    for one, before in sorted(then.items()):
        after_it = now[one]
        offset = None if after_it is None else after_it.offset
        if offset != before.offset:
            yield f"{one}: then {_offset(before.offset)}, now {_offset(offset)}"
        elif _unleased(noted(before)) != _unleased(noted(after_it)):
            yield f"{one}: {_offset(offset)}, and what is noted with it has changed"


def _unleased(metadata: CommitMetadata) -> CommitMetadata:
    return dataclasses.replace(metadata, lease=None)


def _offset(offset: int | None) -> str:
    return "no commit" if offset is None else str(offset)


def _text(metadata: CommitMetadata, offset: int, then: CommittedThen) -> str:
    try:
        return metadata.text(offset)
    except ValueError as error:
        raise PlanError(
            f"what is committed with offset {then.offset} of {then.topic}/{then.partition} would be lost at the "
            f"hand-over: {error}. Have its owner commit without it, or reset the group to the same offset"
        ) from None
