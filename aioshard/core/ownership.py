"""Decide where to resume an assigned partition: in place, at the committed offset, or elsewhere."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from aioshard.core.commit_metadata import CommitMetadata

__all__ = ["Claim", "Evidence", "Origin", "first_mark", "kept_mark", "knows_topic", "origin_of", "reason_to_end"]


class Claim(NamedTuple):
    """Our knowledge of a partition from the previous assignment."""

    member_id: str
    generation: int
    """The generation in which we last held the partition."""
    acknowledged: int | None
    """The last committed offset that the broker acknowledged or reported to us; None if there was none."""
    position: int
    """The next offset that we would read."""


class Evidence(NamedTuple):
    """The broker's current view of the partition."""

    member_id: str
    generation: int
    committed: int | None
    log_start: int
    log_end: int


def reason_to_end(claim: Claim | None, evidence: Evidence) -> str | None:
    """Return why a partition cannot be continued in place, or None if it can.

    A partition can be continued if nobody else can have owned it, and nothing moved its offsets, since we last held
    it. Any single reason ends the epoch. Manually assigned consumers have no member id and never continue, because no
    group keeps others away from their partitions.

    Args:
        claim: None if the partition was not in the previous assignment.
        evidence: The broker's view after the new assignment.
    """
    if claim is None:
        return "it was not in the assignment before this one"
    if not claim.member_id or claim.member_id != evidence.member_id:
        return "the group has given us another member id"
    if evidence.generation != claim.generation + 1:
        return f"the group's generation went from {claim.generation} to {evidence.generation}"
    if claim.acknowledged != evidence.committed:
        return f"the committed offset is {evidence.committed} and ours was {claim.acknowledged}"
    if not evidence.log_start <= claim.position <= evidence.log_end:
        return f"position {claim.position} is outside the log ({evidence.log_start} to {evidence.log_end})"
    return None


class Origin(NamedTuple):
    """The start of a new epoch."""

    offset: int
    resolved: bool
    """Whether the offset is not committed yet. It must be committed before a record is delivered; otherwise a crash
    before the first commit would lose the records that arrived in between (under `latest`)."""


def origin_of(
    committed: int | None,
    log: tuple[int, int],
    policy: Literal["earliest", "latest", "error"] | None,
    *,
    group_knows_topic: bool,
) -> Origin | None:
    """Return where to begin, or None if nothing decides it.

    The policy applies only to a group without a commit on the topic. A partition created later begins at its start
    under every policy, and so does one whose committed offset is no longer in its log (retention passed it, or the
    topic was recreated): its records came after the group's first position, and jumping to the end would lose them.

    Args:
        committed: The group's committed offset, None if there is none.
        log: First offset of the log, and one past its last.
        policy: `auto_offset_reset`. With `"error"`, an offset outside the log also gives None.
        group_knows_topic: Whether the group has committed on another partition of the topic before.

    Example:
        >>> origin_of(None, (5, 9), "latest", group_knows_topic=False)
        Origin(offset=9, resolved=True)
        >>> origin_of(3, (5, 9), "latest", group_knows_topic=True)
        Origin(offset=5, resolved=True)
        >>> origin_of(7, (5, 9), None, group_knows_topic=True)
        Origin(offset=7, resolved=False)
    """
    start, end = log
    if committed is not None:
        if start <= committed <= end:
            return Origin(committed, resolved=False)
        return None if policy == "error" else Origin(start, resolved=True)
    if group_knows_topic:
        return Origin(start, resolved=True)
    if policy == "earliest":
        return Origin(start, resolved=True)
    if policy == "latest":
        return Origin(end, resolved=True)
    return None


_FIRST_LASTS = 300
"""Seconds after which every member of a group has committed on a topic that was new to the group."""


def first_mark(generation: int, partitions: int, now: float) -> CommitMetadata:
    """Return the first-commit marker: the metadata of a group's first commit on a partition; see `knows_topic`."""
    return CommitMetadata(first_generation=generation, first_partitions=partitions, first_at=int(now))


def kept_mark(noted: CommitMetadata, now: float) -> CommitMetadata:
    """Return the part of the first-commit marker that later commits repeat: nothing if it is old."""
    if noted.first_at is not None and now - noted.first_at > _FIRST_LASTS:
        return CommitMetadata()
    return CommitMetadata(
        first_generation=noted.first_generation, first_partitions=noted.first_partitions, first_at=noted.first_at
    )


def knows_topic(noted: Iterable[CommitMetadata], partition: int, generation: int, now: float) -> bool:
    """Whether the group had commits on a topic before its current members began to resolve its partitions.

    Several members resolve their partitions of a new topic at the same time, and others may join meanwhile. Without
    the first-commit marker, slower members would take the commits of faster ones as proof that the group has known the
    topic for long, and would read their partitions from the start under `latest`.

    Args:
        noted: The metadata of each commit of the group on the topic.
        partition: A partition without a commit.
        generation: The current generation of the group.
        now: Seconds since the epoch.

    Example:
        >>> born = first_mark(generation=1, partitions=8, now=1000.0)
        >>> knows_topic([born], 7, generation=2, now=1005.0), knows_topic([born], 8, generation=2, now=1005.0)
        (False, True)
        >>> knows_topic([born], 7, generation=2, now=9000.0), knows_topic([], 7, generation=2, now=9000.0)
        (True, False)
    """
    return any(not _just_began(commit, partition, generation, now) for commit in noted)


def _just_began(noted: CommitMetadata, partition: int, generation: int, now: float) -> bool:
    if noted.first_generation is None:
        return False
    if noted.first_at is None or noted.first_partitions is None:
        return noted.first_generation == generation
    return partition < noted.first_partitions and now - noted.first_at <= _FIRST_LASTS
