"""Hand over a backfill: its ends become the group's offsets, and the live app resumes there."""

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from aioshard.errors import (
    CommitError,
    CommitRefusedError,
    DataLossError,
    GroupBusyError,
    GroupMovedError,
    NotVerifiedError,
    PlanError,
    TransportError,
)
from aioshard.kafka.history import HistoryBrokers
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.spark.planning.commits import after, moved, then_of
from aioshard.spark.runs.access import settings_for
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import HANDED_OVER, LETTERS, VERIFIED
from aioshard.spark.runs.plan import Plan

__all__ = ["Handover", "handover", "verified_ends"]

logger = logging.getLogger("aioshard.spark.handover")

_PAUSE = 0.5
_PATIENCE = 30.0
"""Minimum seconds to retry transient errors (a moving coordinator), even if the wait for members is shorter."""

Offsets = dict[str, dict[int, int | None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The result of a hand-over or of a dry run.

    Attributes:
        plan: The id of the plan.
        group_id: The group.
        state: `handed-over`; `already` if an earlier call did it; `dry-run`.
        before: The group's offsets before, by topic and partition; None for partitions without a commit.
        offsets: The group's offsets after, at which the live app resumes.
        moved: Commits that differed from the plan and were overruled by force.
        new_partitions: `topic/partition` of partitions that the plan does not know: the live app begins at their start.
        waited: Seconds spent waiting for members to leave.
    """

    plan: str
    group_id: str
    state: Literal["handed-over", "already", "dry-run"]
    before: Mapping[str, Mapping[int, int | None]]
    offsets: Mapping[str, Mapping[int, int | None]]
    moved: tuple[str, ...] = ()
    new_partitions: tuple[str, ...] = ()
    waited: float = 0.0

    def asdict(self) -> dict[str, Any]:
        """Return the result as plain values for JSON."""
        return dataclasses.asdict(self)


async def handover(
    directory: str | os.PathLike[str] | RunDirectory,
    *,
    wait: float | None = None,
    dry_run: bool = False,
    force: bool = False,
    tell: Callable[[str], None] = logger.warning,
) -> Handover:
    """Commit the ends of a verified run for its group, so that the live app resumes exactly there.

    A single request commits all partitions. The broker refuses it if the group has a member of any protocol. That
    refusal alone decides; the brokers' description of the group is only reported. Success proves that the group had no
    members at that moment. The check just before it shows that nothing was committed since the plan was made. Neither
    rules out consumers that read the topics without a group, or without committing.

    Args:
        directory: The directory of the run.
        wait: Seconds to wait for killed or static members to expire; by default the session timeout of the app's
            settings. A live member is waited for just as long and then named in the error.
        dry_run: Check everything that can be checked without a commit, and change nothing. Unsent dead letters cause
            a message instead of an error.
        force: Hand over although the group has moved since the plan was made, or hand over again. Members are never
            overruled.
        tell: Receives messages for the user; logs them by default.

    Returns:
        The result; it is also written to the directory.

    Raises:
        NotVerifiedError: The run was not verified, has halted records, or has unsent dead letters.
        GroupBusyError: The group has members. Nothing was changed.
        GroupMovedError: The group has moved since the plan was made. Nothing was changed.
        DataLossError: The run ends past the end of the log: the topic was recreated.
        PlanError: The directory has no plan, *wait* is invalid, or another program's commit metadata cannot be kept.
        TransportError: The brokers do not answer, or refuse access.

    Example:
        ```python
        done = await handover("runs/7")
        print(done.offsets["orders"][0])
        ```
    """
    if wait is not None and not wait >= 0:
        raise PlanError(f"wait={wait!r} was found, seconds were expected")
    place = RunDirectory.of(directory)
    plan = place.plan()
    ends = verified_ends(place, plan, tell if dry_run else None)
    then = then_of(plan)
    due = {one: after(then[one], end) for one, end in ends.items()}
    done = None if force else _done_already(place, plan)
    if done is not None:
        return done
    settings = settings_for(plan)
    patience = settings.session_timeout if wait is None else float(wait)
    async with HistoryBrokers(settings) as brokers:
        await _check_logs(brokers, due, tell)
        handing_over = _HandingOver(brokers, plan, due, force=force, tell=tell)
        if dry_run:
            await handing_over.rehearse()
        else:
            await handing_over.commit(patience)
        new = await _new_partitions(brokers, plan)
    result = Handover(
        plan=plan.id,
        group_id=plan.group_id,
        state="dry-run" if dry_run else "handed-over",
        before=_nested({one: None if was is None else was.offset for one, was in handing_over.before.items()}),
        offsets=_nested(ends),
        moved=handing_over.moved,
        new_partitions=new,
        waited=round(handing_over.waited, 3),
    )
    if not dry_run:
        place.write_json(HANDED_OVER, {"digest": plan.digest, "at": time.time(), **result.asdict()})
    return result


# Preconditions ------------------------------------------------------------------------


def verified_ends(
    place: RunDirectory, plan: Plan, tell_of_letters: Callable[[str], None] | None = None
) -> dict[TopicPartition, int]:
    """Return the ends of a verified run.

    Args:
        place: Its directory.
        plan: Its plan.
        tell_of_letters: Receives a message about unsent dead letters, which are an error without it.

    Raises:
        NotVerifiedError: The run was not verified, has halted records, or has unsent dead letters.
    """
    found = place.read_json(VERIFIED)
    if not isinstance(found, dict) or found.get("plan") != plan.digest:
        what = "was not verified" if found is None else "was verified with another plan"
        raise NotVerifiedError(f"the run in {place} {what}: run  aioshard spark verify {place}  first")
    halted = [str(name) for name in found.get("halted") or ()]
    if halted:
        more = "" if len(halted) == 1 else f" and {len(halted) - 1} more"
        raise NotVerifiedError(
            f"halted records are in the run in {place}: {halted[0]}{more}. Correct what they failed with, drain and "
            "verify again"
        )
    if found.get("ok") is not True:
        raise NotVerifiedError(
            f"the verification of the run in {place} failed: see {VERIFIED} there, then drain and verify again"
        )
    unsent = _unsent_letters(place, plan, int(found.get("dead_lettered") or 0))
    if unsent:
        if tell_of_letters is None:
            raise NotVerifiedError(unsent)
        tell_of_letters(unsent)
    starts = {TopicPartition(one.topic, one.partition): one.start for one in plan.ranges}
    ends = _flat(found.get("ends") or plan.ends)
    if ends.keys() != starts.keys() or any(ends[one] < starts[one] for one in starts):
        raise NotVerifiedError(f"{VERIFIED} in {place} does not name an end for each range of the plan: verify again")
    return ends


def _unsent_letters(place: RunDirectory, plan: Plan, due: int) -> str:
    """Describe the unsent dead letters of a run in a sentence, empty if all were sent."""
    letters = place.read_json(LETTERS)
    sent = letters.get("acknowledged", 0) if isinstance(letters, dict) and letters.get("plan") == plan.digest else 0
    if sent >= due:
        return ""
    return (
        f"{due - sent} of {due} dead letters of the run in {place} were not sent: the group does not go on before the "
        "brokers have acknowledged them all. The command  aioshard spark handover  sends them first, and so does "
        "aioshard.spark.send_letters"
    )


def _done_already(place: RunDirectory, plan: Plan) -> Handover | None:
    found = place.read_json(HANDED_OVER)
    if not isinstance(found, dict) or found.get("digest") != plan.digest:
        return None
    return Handover(
        plan=plan.id,
        group_id=plan.group_id,
        state="already",
        before=_numbered(found["before"]),
        offsets=_numbered(found["offsets"]),
        moved=tuple(found["moved"]),
        new_partitions=tuple(found["new_partitions"]),
        waited=0.0,
    )


async def _check_logs(
    brokers: HistoryBrokers, due: Mapping[TopicPartition, Committed], tell: Callable[[str], None]
) -> None:
    bounds = await brokers.bounds(due)
    lost = [
        f"{one}: the run ends at {due[one].offset}, and the log at {log.end}"
        for one, log in sorted(bounds.items())
        if due[one].offset > log.end
    ]
    if lost:
        raise DataLossError(lost, "Plan anew")
    for one, log in sorted(bounds.items()):
        if due[one].offset < log.start:
            tell(
                f"retention has deleted offsets {due[one].offset} to {log.start - 1} of {one} since the run ended: the "
                "live app goes on behind them"
            )


async def _new_partitions(brokers: HistoryBrokers, plan: Plan) -> tuple[str, ...]:
    known = {(one.topic, one.partition) for one in plan.ranges}
    new = []
    for topic in sorted({topic for topic, _ in known}):
        numbers = await brokers.partitions(topic)
        new += [f"{topic}/{number}" for number in sorted(numbers) if (topic, number) not in known]
    return tuple(new)


# Commit -------------------------------------------------------------------------------


class _HandingOver:
    """A single hand-over: checks the group, commits, and reads the offsets back."""

    def __init__(
        self,
        brokers: HistoryBrokers,
        plan: Plan,
        due: Mapping[TopicPartition, Committed],
        *,
        force: bool,
        tell: Callable[[str], None],
    ) -> None:
        self.before: Mapping[TopicPartition, Committed | None] = {}
        self.moved: tuple[str, ...] = ()
        self.waited = 0.0
        self._brokers = brokers
        self._plan = plan
        self._group_id = plan.group_id
        self._then = then_of(plan)
        self._due = due
        self._force = force
        self._tell = tell

    async def rehearse(self) -> None:
        """Do everything except the commit.

        Raises:
            GroupMovedError: The group has moved, and *force* is not set.
        """
        await self._look()
        members = (await self._brokers.describe_group(self._group_id)).members
        if members:
            self._tell(f"group {self._group_id!r} has {len(members)} member(s) now, {members[0]} first")

    async def commit(self, patience: float) -> None:
        """Commit; retry while members may expire or the coordinator moves.

        Raises:
            GroupBusyError: The group still has members after *patience* seconds.
            GroupMovedError: The group has moved, and *force* is not set.
            TransportError: The commit was not stored.
        """
        if not self._due:
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        told = False
        while True:
            # Check before every attempt: an unacknowledged commit may be stored, and a consumer may have resumed there.
            await self._look()
            try:
                await self._brokers.commit_without_member(self._group_id, self._due)
            except CommitRefusedError:
                self.waited = loop.time() - began
                members = [str(one) for one in (await self._brokers.describe_group(self._group_id)).members]
                if self.waited >= patience:
                    raise GroupBusyError(self._group_id, members, self.waited) from None
                if not told:
                    named = ", ".join(members) or "a member that the brokers do not tell (the newer group protocol)"
                    self._tell(f"group {self._group_id!r} has members; waiting up to {patience:g} s for them: {named}")
                    told = True
            except CommitError as error:
                if not error.retriable or loop.time() - began >= max(patience, _PATIENCE):
                    raise
            else:
                break
            await asyncio.sleep(_PAUSE)
        await self._read_back()

    async def _look(self) -> None:
        """Check whether another program has committed since the plan was made.

        Raises:
            GroupMovedError: It has, and *force* is not set.
        """
        now = await self._brokers.group_commits(self._group_id, self._due)
        self.before = self.before or now
        open_still = {one: then for one, then in self._then.items() if now[one] != self._due[one]}
        changes = tuple(moved(open_still, now))
        if changes and not self._force:
            raise GroupMovedError(self._group_id, changes)
        self.moved = changes or self.moved

    async def _read_back(self) -> None:
        """Compare the stored offsets with the committed ones.

        Raises:
            TransportError: A stored offset is missing or smaller.
        """
        now = await self._brokers.group_commits(self._group_id, self._due)
        for one, due in sorted(self._due.items()):
            found = now[one]
            if found is None or found.offset < due.offset:
                raise TransportError(
                    f"offset {due.offset} was committed for {one} of group {self._group_id!r} and acknowledged, and "
                    f"now {found.offset if found else 'nothing'} is: somebody else writes the group's offsets; look who"
                )
            if found.offset > due.offset:
                self._tell(f"{one} is at {found.offset} already: somebody consumes since the hand-over")


def _flat(offsets: Mapping[str, Mapping[Any, Any]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(number)): int(end) for topic, ends in offsets.items() for number, end in ends.items()
    }


def _nested(offsets: Mapping[TopicPartition, int | None]) -> Offsets:
    nested: Offsets = {}
    for one, offset in sorted(offsets.items()):
        nested.setdefault(one.topic, {})[one.partition] = offset
    return nested


def _numbered(offsets: Mapping[str, Mapping[str, int | None]]) -> Offsets:
    return {topic: {int(number): offset for number, offset in found.items()} for topic, found in offsets.items()}
