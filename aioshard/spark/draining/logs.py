"""Check that the log still has the rest of a run, before a task waits for records that never arrive."""

import functools
import logging
from collections.abc import Sequence

from aioshard.errors import DataLossError, SettingsError, TransportError
from aioshard.kafka.history import HistoryBrokers
from aioshard.records import TopicPartition
from aioshard.spark.runs.access import settings_for
from aioshard.spark.runs.blocking import blocking
from aioshard.spark.runs.checkpoint import Border
from aioshard.spark.runs.plan import Plan, PlannedRange
from aioshard.spark.source.vectors import ends_of, ranges_between, starts_of

__all__ = ["check_logs"]

logger = logging.getLogger("aioshard.spark.logs")


def check_logs(plan: Plan, border: Border | None) -> None:
    """Refuse to drain records that the log no longer has.

    If the brokers are unknown or do not answer from here, nothing is refused: the tasks may still reach them.

    Args:
        plan: The plan of the run.
        border: The progress of the run.

    Raises:
        DataLossError: A topic was deleted or recreated, or retention deleted some of the remaining records.
    """
    left = ranges_between(starts_of(plan.ranges) if border is None else border.vector, ends_of(plan.ranges))
    losses = blocking(functools.partial(_losses, plan, left)) if left else []
    if losses:
        raise DataLossError(losses, "Drain what is left with a new plan")


async def _losses(plan: Plan, left: Sequence[PlannedRange]) -> list[str]:
    names = {TopicPartition(one.topic, one.partition): one for one in left}
    try:
        async with HistoryBrokers(settings_for(plan)) as brokers:
            gone = sorted({one.topic for one in left} - await brokers.topics())
            if gone:
                return [f"topic {topic!r} does not exist any more, or this user may not see it" for topic in gone]
            bounds = await brokers.bounds(names)
    except (SettingsError, TransportError) as error:
        logger.info("it is not known whether the records are still there: %s", error)
        return []
    losses = []
    for name, log in sorted(bounds.items()):
        one = names[name]
        if one.start < log.start:
            losses.append(f"{name}: offsets {one.start} to {min(log.start, one.end) - 1}")
        elif one.end > log.end:
            losses.append(f"{name}: the range ends at {one.end}, and the log at {log.end}")
    return losses
