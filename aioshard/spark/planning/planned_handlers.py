"""The handlers of an app as a plan records them: topics and layouts. Refuses what a backfill cannot run."""

import sys
from collections.abc import Callable, Sequence

from aioshard.app import App
from aioshard.core.recourse import Park
from aioshard.errors import PlanError
from aioshard.handlers import Registration
from aioshard.kafka.history import HistoryBrokers
from aioshard.records import TOPIC_NAME
from aioshard.spark.runs.plan import Layout, PlannedHandler
from aioshard.spark.runs.versions import on_failure_text
from aioshard.spark.tasks.work import DEAD_LETTER

__all__ = ["Tell", "check_dead_letters", "check_policies", "planned_handlers", "target_of"]


Tell = Callable[[str], None]
"""Receives warnings for the user: sentences that do not make the plan fail."""


def target_of(app: App) -> str:
    """Return the `MODULE:APP` name of a loaded app.

    Raises:
        PlanError: The app is not an attribute of an importable module that defines one of its handlers.
    """
    for module in sorted({handler.function.__module__ for handler in app.handlers} - {"__main__"}):
        for name, value in vars(sys.modules.get(module, object)).items():
            if value is app:
                return f"{module}:{name}"
    raise PlanError(
        f"the app of group {app.group_id!r} is in no module that the tasks of Spark can import: put it into one, and "
        "name it, such as 'orders.app:app'"
    )


def check_policies(app: App, on_failure: str | None) -> None:
    """Refuse failure policies that a backfill does not support.

    Args:
        app: The app whose handlers are checked.
        on_failure: Replaces the handlers' own policies.

    Raises:
        PlanError: A handler parks, *on_failure* is unknown, or the app has no handlers.
    """
    if not app.handlers:
        raise PlanError(f"the app of group {app.group_id!r} has no handlers: decorate a function with @app.consume(…)")
    if on_failure is not None:
        topic = on_failure.removeprefix(DEAD_LETTER)
        if on_failure != "skip" and not (on_failure.startswith(DEAD_LETTER) and TOPIC_NAME.fullmatch(topic)):
            raise PlanError(f"on_failure={on_failure!r} was found, 'skip' or 'dead-letter:TOPIC' was expected")
        return
    parking = [handler.name for handler in app.handlers if isinstance(handler.on_failure, Park)]
    if parking:
        raise PlanError(
            f"handler {parking[0]!r} parks its failed records, and over history nobody comes back to them: plan with "
            "on_failure='dead-letter:TOPIC' or 'skip'"
        )


async def check_dead_letters(
    handlers: Sequence[PlannedHandler], on_failure: str | None, brokers: HistoryBrokers, tell: Tell
) -> None:
    """Refuse dead letters that the same run would read, and warn about missing dead-letter topics.

    A missing topic is not refused: the hand-over sends the dead letters, and the topic may be created until then, also
    by the brokers themselves. A user who may write to a topic is not necessarily allowed to see it.

    Raises:
        PlanError: A handler reads the topic that receives dead letters.
        TransportError: The brokers did not answer.
    """
    policies = [handler.on_failure for handler in handlers] if on_failure is None else [on_failure]
    topics = {policy.removeprefix(DEAD_LETTER) for policy in policies if policy.startswith(DEAD_LETTER)}
    read = {topic: handler.name for handler in handlers for topic in handler.topics}
    for topic in sorted(topics & read.keys()):
        raise PlanError(f"dead letters would go to topic {topic!r}, which handler {read[topic]!r} reads: name another")
    for topic in sorted(topics - await brokers.topics()) if topics else ():
        tell(
            f"dead letters would go to topic {topic!r}, which does not exist, or this user may not see it: create it "
            "before the hand-over, which sends them and does not end without it"
        )


async def planned_handlers(
    app: App, brokers: HistoryBrokers, *, shuffle: bool, tell: Tell
) -> tuple[PlannedHandler, ...]:
    """Return the handlers of an app with the topics that exist for them now.

    Raises:
        PlanError: A topic does not exist, belongs to several handlers, or would lose the requested order.
        TransportError: The brokers did not answer.
    """
    there = await brokers.topics()
    missing = sorted({topic for handler in app.handlers for topic in handler.topics} - there)
    if missing:
        raise PlanError(
            f"topic {missing[0]!r} does not exist, or this user may not see it: create it, check its name, or grant "
            "DESCRIBE on it"
        )
    taken: dict[str, Registration] = {}
    planned = []
    for handler in app.handlers:
        topics = tuple(sorted(topic for topic in there if handler.takes(topic)))
        for topic in topics:
            other = taken.setdefault(topic, handler)
            if other is not handler:
                raise PlanError(
                    f"topic {topic!r} belongs to the handlers {other.name!r} and {handler.name!r}: "
                    "narrow their patterns"
                )
        if not topics:
            tell(f"no topic matches pattern {handler.pattern!r} of handler {handler.name!r}: it has nothing to do")
        planned.append(_planned(handler, topics, shuffle=shuffle))
    return tuple(planned)


def _planned(handler: Registration, topics: tuple[str, ...], *, shuffle: bool) -> PlannedHandler:
    shard_by = handler.shard_by
    layout: Layout
    if callable(shard_by):
        layout = "shuffle"
    elif shard_by == "record":
        layout = "split"
    elif shard_by == "key" and shuffle:
        layout = "shuffle"
    else:
        layout = "partition"
    if shard_by == "key" and len(topics) > 1 and not shuffle:
        raise PlanError(
            f"handler {handler.name!r} reads {len(topics)} topics ({', '.join(topics[:5])}) by key, and a key can "
            "occur in several of them: plan with shuffle=True, which brings the records of a key together"
        )
    return PlannedHandler(
        name=handler.name,
        topics=topics,
        shard_by="function" if callable(shard_by) else shard_by,
        shards=handler.shards,
        concurrency=handler.concurrency,
        on_failure=on_failure_text(handler.on_failure),
        layout=layout,
    )
