"""Decide where to resume an assigned partition: in place, at the committed offset, or elsewhere."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from aioshard.core.commit_metadata import FirstCommit


class Claim(NamedTuple):
    """Our knowledge of a partition from the previous assignment."""

    member_id: str
    generation: int
    """The generation in which we last held the partition."""
    acknowledged: int | None
    """The last committed offset that the broker acknowledged or reported to us; None if there was none."""
    position: int
    """The next offset that we would read."""


def reason_to_end(
    claim: Claim | None, member_id: str, generation: int, committed: int | None, log: tuple[int, int]
) -> str | None:
    """Return why a partition cannot be continued in place, or None if it can.

    A partition can be continued if nobody else can have owned it, and nothing moved its offsets, since we last held
    it. Any single reason ends the epoch. Manually assigned consumers have no member id and never continue, because no
    group keeps others away from their partitions.

    Args:
        claim: None if the partition was not in the previous assignment.
        member_id: Our member id under the new assignment.
        generation: The group's generation of the new assignment.
        committed: The group's committed offset, None if there is none.
        log: First offset of the log, and one past its last.
    """
    if claim is None:
        return "it was not in the assignment before this one"
    if not claim.member_id or claim.member_id != member_id:
        return "the group has given us another member id"
    if generation != claim.generation + 1:
        return f"the group's generation went from {claim.generation} to {generation}"
    if claim.acknowledged != committed:
        return f"the committed offset is {committed} and ours was {claim.acknowledged}"
    if not log[0] <= claim.position <= log[1]:
        return f"position {claim.position} is outside the log ({log[0]} to {log[1]})"
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
    """Return where to begin, or None if neither a commit nor the policy decides it.

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
    if group_knows_topic or policy == "earliest":
        return Origin(start, resolved=True)
    if policy == "latest":
        return Origin(end, resolved=True)
    return None


def knows_topic(commits: Iterable[FirstCommit | None], partition: int, now: float) -> bool:
    """Whether the group had commits on a topic before its current members began to resolve its partitions.

    Several members resolve their partitions of a new topic at the same time, and others may join meanwhile. Without
    the first-commit marker, slower members would take the commits of faster ones as proof that the group has known the
    topic for a long time, and would read their partitions from the start under `latest`.

    Args:
        commits: The first-commit marker of each of the group's commits on the topic; None if the commit has none.
        partition: A partition without a commit.
        now: Seconds since the epoch.

    Example:
        >>> marker = FirstCommit(partitions=8, at=1000)
        >>> knows_topic([marker], 7, now=1005.0), knows_topic([marker], 8, now=1005.0)
        (False, True)
        >>> knows_topic([marker], 7, now=9000.0), knows_topic([], 7, now=9000.0)
        (True, False)
    """
    return any(first is None or not first.is_recent(now) or partition >= first.partitions for first in commits)


class Losses:
    """Distinguishes an isolated loss from repeated ones.

    Example:
        >>> now = 0.0
        >>> losses = Losses(lambda: now)
        >>> losses.again(45.0)
        False
        >>> now = 50.0
        >>> losses.again(45.0)
        False
        >>> now = 60.0
        >>> losses.again(45.0)
        True
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without any loss; *clock* is in seconds."""
        self._clock = clock
        self._last: float | None = None

    def again(self, within: float) -> bool:
        """Record a loss; return whether the previous one was at most *within* seconds ago."""
        previous = self._last
        self._last = self._clock()
        return previous is not None and self._last - previous <= within
