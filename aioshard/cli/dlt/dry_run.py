"""`aioshard dlt try`: run the handlers of an app on dead letters, but publish and commit nothing."""

import asyncio
from collections.abc import Iterator

import click

from aioshard.cli import options
from aioshard.cli.brokers import confirm, entered, open_runner
from aioshard.cli.dlt import arguments
from aioshard.cli.dlt.plans import Selection, read_plan, remarks_on
from aioshard.cli.loading import load_function
from aioshard.cli.output import UNHEALTHY, cut, part_as_text, print_result
from aioshard.core.text import as_text, bytes_as_text
from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.plan import Plan
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.dead_letters.tries import Trial, Tried, message_as_object, try_dead_letters
from aioshard.ports import Message
from aioshard.records import counted
from aioshard.signals import Signals


@click.command("try")
@options.topic_argument
@options.filters
@options.at
@click.option("--app", "target", metavar="MODULE:APP", required=True, help="The app whose handlers run.")
@arguments.transform
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="Run at most N records."
)
@arguments.again
@arguments.yes
@options.app_dir
@arguments.log_level
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS, or the setting of the app")
@options.as_json("the results, with the messages that would be published")
def command(
    topic: str,
    *,
    filters: Filters,
    target: str,
    transform: str | None,
    limit: int,
    again: bool,
    yes: bool,
    app_dir: str,
    log_level: str,
    bootstrap_servers: str | None,
    as_json: bool,
) -> int:
    """Run handlers on dead letters, but publish and commit nothing.

    The handlers really run, once for each record, with the resources of the app. Their messages are shown instead of
    published, and all dead letters stay due. Requests and writes that a handler makes itself are real. Exits with 3 if
    some failed.
    """
    arguments.check_at(filters, topic)
    app = arguments.app_to_run(target, app_dir, bootstrap_servers, log_level, filters)
    selection = Selection(topic, filters._replace(group=app.group_id), limit, again=again)
    function = None if transform is None else load_function(transform, app_dir)

    async def read(dead_letter_topic: DeadLetterTopic) -> tuple[Plan, list[StoredDeadLetter]]:
        plan = await read_plan(dead_letter_topic, selection)
        return plan, [item.dead_letter async for item in plan.items(dead_letter_topic)]

    async def run_handlers(dead_letters: list[StoredDeadLetter], signals: Signals) -> Trial:
        stop = asyncio.Event()
        signals.on_first(stop.set)
        return await try_dead_letters(app, dead_letters, transform=function, stop=stop)

    with open_runner() as runner:
        with entered(runner, DeadLetterTopic.opened(app.settings, topic)) as dead_letter_topic:
            plan, dead_letters = runner.run(read(dead_letter_topic))
        if dead_letters:
            confirm(
                f"Run the handlers of app {app.group_id!r} on {counted(len(dead_letters), 'dead letter')} of {topic}? "
                "Nothing is published or committed, but requests and writes that they make themselves are real.",
                yes=yes,
            )
        with Signals("ending after the handlers in progress") as signals:
            trial = runner.run(run_handlers(dead_letters, signals))
    content = {
        "topic": topic,
        "beyond_limit": plan.beyond_limit,
        "tried": [tried.as_object() for tried in trial.tried],
        "other_messages": list(map(message_as_object, trial.unattributed)),
    }
    print_result(content, [*_lines_of(trial), *remarks_on(topic, plan)], as_json=as_json)
    return UNHEALTHY if any(tried.error is not None for tried in trial.tried) else 0


def _lines_of(trial: Trial) -> Iterator[str]:
    succeeded = sum(tried.succeeded for tried in trial.tried)
    total = part_as_text(succeeded, len(trial.tried), "dead letter")
    yield f"{total} would succeed; nothing was published or committed"
    for tried in trial.tried:
        yield f"{tried.dead_letter.source} (dead letter {tried.dead_letter.at}): {_outcome_of(tried)}"
        if tried.is_edited:
            yield f"  changed to: {cut(bytes_as_text(tried.record.value))}"
        yield from map(_line_of_message, tried.messages)
    if trial.unattributed:
        yield "Published by tasks and threads that no handler waits for:"
        yield from map(_line_of_message, trial.unattributed)


def _outcome_of(tried: Tried) -> str:
    if tried.left_alone:
        return "left alone by the transform"
    if tried.error is not None:
        return f"failed: {as_text(tried.error)}"
    took = "" if tried.seconds is None else f" in {tried.seconds:.3f} s"
    return f"succeeded{took}"


def _line_of_message(message: Message) -> str:
    return f"  to {message.topic}: {cut(bytes_as_text(message.key))}: {cut(bytes_as_text(message.value))}"
