"""Where to go on with a partition that was assigned: in place, at the committed offset, or elsewhere."""

from typing import Literal, NamedTuple

from aioshard.core.commit_metadata import CommitMetadata

__all__ = ["Claim", "Evidence", "Origin", "first_generation", "origin_of", "reason_to_end", "with_first_generation"]


class Claim(NamedTuple):
    """What we know of a partition from the assignment before this one."""

    member_id: str
    generation: int
    """The generation in which we last held it."""
    acknowledged: int | None
    """The last committed offset that the broker acknowledged to us or told us; None when there was none."""
    position: int
    """The next offset that we would take in."""


class Evidence(NamedTuple):
    """What the broker says of the partition now."""

    member_id: str
    generation: int
    committed: int | None
    log_start: int
    log_end: int


def reason_to_end(claim: Claim | None, evidence: Evidence) -> str | None:
    """Why a partition cannot be continued in place, or None when it can.

    Continuing means that nobody else can have had the partition, and that nothing moved its offsets,
    since we last held it. Each condition alone ends the epoch.

    Args:
        claim: None when the partition was not in the immediately preceding assignment.
        evidence: What the broker said after the new assignment.
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
    """Where a new epoch begins."""

    offset: int
    resolved: bool
    """Whether the offset was not committed yet: it is committed before a record is handed out, or a
    crash before the first commit would lose what came in between (under `latest`)."""


def origin_of(
    committed: int | None,
    log: tuple[int, int],
    policy: Literal["earliest", "latest", "error"] | None,
    *,
    group_knows_topic: bool,
) -> Origin | None:
    """Where to begin, or None when nothing says so.

    The policy speaks only for a group without a commit on the topic. A partition that appeared later
    begins at its start under every policy, and so does one whose committed offset is not in its log any
    more (retention passed it, or the topic was made anew): its records came after the group's first
    position, and jumping to the end would lose them.

    Args:
        committed: The group's committed offset, None when there is none.
        log: First offset of the log and the one past its last.
        policy: `auto_offset_reset`. With `"error"`, an offset outside the log gives None too.
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


def first_generation(metadata: str) -> int | None:
    """The generation in which the group first resolved its position on a partition, from commit metadata.

    Several members resolve their partitions of a new topic at the same time. Without this mark the slower
    one would take the commits of the quicker one for those of a group that knew the topic long ago, and
    read its partition from the start under `latest`.
    """
    return CommitMetadata.read(metadata, 0).first_generation


def with_first_generation(generation: int | None) -> str:
    """Commit metadata that carries the mark; empty without one."""
    return CommitMetadata(first_generation=generation).text(0)
