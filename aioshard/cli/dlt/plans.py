"""The dead letters that a command works on: selected by its options, and read from the topic before it begins."""

from typing import NamedTuple

from aioshard.cli.output import progress
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.plan import Plan, make_plan
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.records import counted


class Selection(NamedTuple):
    """The dead letters of a topic that the options of a command select."""

    topic: str
    filters: Filters
    limit: int | None
    again: bool = False
    """Whether those that are done are included."""


async def read_plan(dead_letter_topic: DeadLetterTopic, selection: Selection) -> Plan:
    """Read a topic, and show the progress.

    Raises:
        AuthorizationError: This user may not read which dead letters are done.
        TransportError: The topic cannot be read.
    """
    # Not final: a run that sends takes over first, reads the progress again, and leaves out what is done by then.
    await dead_letter_topic.fetch_progress()
    async with progress(f"reading {dead_letter_topic.name}", lambda: dead_letter_topic.dead_letters_read):
        return await make_plan(dead_letter_topic, selection.filters, limit=selection.limit, again=selection.again)


def remarks_on(topic: str, plan: Plan, *, has_again: bool = True) -> list[str]:
    """Say why a plan is empty, or that it leaves out dead letters because of the limit.

    Args:
        topic: The dead-letter topic.
        plan: The plan.
        has_again: Whether the command has the option `--again`.
    """
    # 1. It is only a part of those that are due.
    if plan.beyond_limit:
        are = "is" if plan.beyond_limit == 1 else "are"
        return [f"{plan.beyond_limit:,} more {are} due: a higher --limit includes them"]
    if plan.due or plan.covered:
        return []
    # 2. All of them are done.
    if plan.done:
        are = "is" if plan.done == 1 else "are"
        done = f"{counted(plan.done, 'dead letter')} {are} done already"
        return [f"{done}: --again includes them" if has_again else done]
    # 3. None matches.
    total = sum(map(len, plan.offsets.values()))
    if total == 0:
        return []
    none = f"None of the {counted(total, 'dead letter')} in {topic} matches"
    return [f"{none}: `aioshard dlt show {topic}` counts them by error, handler and topic"]
