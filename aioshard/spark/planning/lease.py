"""Keeping the group's own apps off its partitions while a run over history has them."""

import os
import time

from aioshard.core.commit_metadata import Lease
from aioshard.errors import CommitRefusedError, GroupBusyError, GroupMovedError, PlanError
from aioshard.kafka.history import HistoryBrokers
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.spark.planning.commits import leased, moved, then_of
from aioshard.spark.runs.access import settings_for
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.plan import Plan

__all__ = ["check_lease", "lease", "take_lease"]

_LONGEST = 366 * 24 * 3600.0


async def lease(directory: str | os.PathLike[str] | RunDirectory, seconds: float) -> list[TopicPartition]:
    """Lease the partitions of a planned run anew from now on, or with 0 seconds give them back.

    Args:
        directory: Of the run.
        seconds: How long apps of the group are to keep off.

    Returns:
        Partitions that could not be leased; see `take_lease`.

    Raises:
        PlanError: There is no plan, or *seconds* makes no sense.
        GroupBusyError: The group has members. Nothing was changed.
        GroupMovedError: The group has committed something else since the plan was made. Nothing was changed.
        TransportError: The brokers do not answer, or refuse us.

    Example:
        ```python
        await lease("runs/7", 3600)  # an hour more
        await lease("runs/7", 0)     # given up: the apps may start
        ```
    """
    place = RunDirectory.of(directory)
    plan = place.plan()
    async with HistoryBrokers(settings_for(plan)) as brokers:
        return await take_lease(brokers, plan, seconds)


def check_lease(seconds: float) -> None:
    """Refuse a lease that cannot be meant.

    Raises:
        PlanError: *seconds* makes no sense.
    """
    if isinstance(seconds, bool) or not 0 <= seconds <= _LONGEST:
        raise PlanError(f"lease={seconds!r} was found, seconds between 0 and {_LONGEST:g} were expected")


async def take_lease(brokers: HistoryBrokers, plan: Plan, seconds: float) -> list[TopicPartition]:
    """Commit the group's own offsets once more, with a lease noted beside them.

    It protects against one accident: somebody starts an app of the group while the run lasts. The app reads the lease
    where it reads its offsets, and refuses to start with a sentence. And it keeps the brokers from forgetting the
    offsets of a group that has no members for long. It is no lock:

    * Consumers that are not aioshard's do not read it, nor do apps that were built before there were leases.
    * It changes no offset. Where nothing is committed there is nothing to note it with, and where another program has
      noted something, that would be hidden: such partitions are not leased, and returned.
    * Between reading the offsets and committing the same ones again, somebody could start, commit, and stop again;
      that moment is a few milliseconds long.

    What holds whatever happens is the check at the hand-over: the group has no members, and has committed nothing
    since the plan was made.

    Args:
        brokers: Connected.
        plan: Of the run.
        seconds: From now on; 0 ends the lease.

    Returns:
        Partitions that could not be leased.

    Raises:
        PlanError: *seconds* makes no sense.
        GroupBusyError: The group has members. Nothing was changed.
        GroupMovedError: The group has committed something else since the plan was made. Nothing was changed.
        TransportError: It was not stored.
    """
    check_lease(seconds)
    then = then_of(plan)
    now = await brokers.group_commits(plan.group_id, then)
    changes = list(moved(then, now))
    if changes:
        raise GroupMovedError(plan.group_id, changes)
    noted = Lease(plan.id, round(time.time() + seconds)) if seconds else None
    due: dict[TopicPartition, Committed] = {}
    without = []
    for one, committed in now.items():
        again = None if committed is None else leased(committed, noted)
        if again is None:
            without.append(one)
        elif again != committed:
            due[one] = again
    if due:
        try:
            await brokers.commit_without_member(plan.group_id, due)
        except CommitRefusedError:
            members = (await brokers.describe_group(plan.group_id)).members
            raise GroupBusyError(plan.group_id, map(str, members), 0.0) from None
    return without
