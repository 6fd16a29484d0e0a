"""Keep the group's own apps off its partitions while a backfill owns them."""

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
    """Renew the lease of a planned run's partitions from now on, or release it with 0 seconds.

    Args:
        directory: The directory of the run.
        seconds: How long the group's apps must stay off the partitions.

    Returns:
        Partitions that could not be leased; see `take_lease`.

    Raises:
        PlanError: The directory has no plan, or *seconds* is out of range.
        GroupBusyError: The group has members. Nothing was changed.
        GroupMovedError: The group's commits have changed since the plan was made. Nothing was changed.
        TransportError: The brokers do not answer, or refuse access.

    Example:
        ```python
        await lease("runs/7", 3600)  # another hour
        await lease("runs/7", 0)     # released: the apps may start
        ```
    """
    place = RunDirectory.of(directory)
    plan = place.plan()
    async with HistoryBrokers(settings_for(plan)) as brokers:
        return await take_lease(brokers, plan, seconds)


def check_lease(seconds: float) -> None:
    """Refuse a lease of impossible length.

    Raises:
        PlanError: *seconds* is out of range.
    """
    if isinstance(seconds, bool) or not 0 <= seconds <= _LONGEST:
        raise PlanError(f"lease={seconds!r} was found, seconds between 0 and {_LONGEST:g} were expected")


async def take_lease(brokers: HistoryBrokers, plan: Plan, seconds: float) -> list[TopicPartition]:
    """Commit the group's own offsets again with a lease in their metadata.

    The lease protects against one accident: an app of the group starts while the run lasts. The app reads the lease
    together with its offsets and refuses to start with an explanation. The commit also keeps the brokers from
    expiring the offsets of a group that has no members for a long time. A lease is not a lock:

    * Consumers without aioshard ignore it, and so do apps built with an aioshard version older than leases.
    * It changes no offset. A partition is skipped, and returned, if it has no commit that could carry the lease or if
      the lease would hide another program's metadata.
    * A consumer could start, commit and stop between reading the offsets and committing them again. That window is
      a few milliseconds long.

    The check at the hand-over holds in every case: the group has no members and has committed nothing since the plan
    was made.

    Args:
        brokers: A connected client.
        plan: The plan of the run.
        seconds: Duration from now; 0 ends the lease.

    Returns:
        Partitions that could not be leased.

    Raises:
        PlanError: *seconds* is out of range.
        GroupBusyError: The group has members. Nothing was changed.
        GroupMovedError: The group's commits have changed since the plan was made. Nothing was changed.
        TransportError: The lease was not stored.
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
