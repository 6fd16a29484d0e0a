"""A run of `dlt replay` or `dlt finish`: planned, confirmed by the operator, carried out and reported."""

import asyncio
import contextlib

import click

from aioshard.cli.brokers import audit_log, confirm, entered, open_runner, os_user
from aioshard.cli.dlt.plans import Selection, read_plan, remarks_on
from aioshard.cli.dlt.reports import Report, by_topic
from aioshard.cli.output import UNHEALTHY, progress
from aioshard.dead_letters.edits import Transform
from aioshard.dead_letters.finishing import Finish
from aioshard.dead_letters.plan import Plan
from aioshard.dead_letters.processing import RunHandlers
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.dead_letters.replaying import Action, Replay, preview
from aioshard.dead_letters.sending import SendBack
from aioshard.errors import AioshardError
from aioshard.records import counted
from aioshard.settings import Settings
from aioshard.signals import INTERRUPTED, Signals


def run_on(
    settings: Settings,
    selection: Selection,
    action: Action,
    *,
    stop: asyncio.Event,
    transform: Transform | None = None,
    has_value: bool = False,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Plan a run, ask for confirmation, and carry it out; return the exit code.

    Args:
        settings: The brokers.
        selection: The dead letters.
        action: The action on them.
        stop: Set by the first signal; ends the run early.
        transform: Changes the records before.
        has_value: Whether the transform is a value for exactly one of them.
        dry_run: Whether to print only the plan.
        yes: Whether to ask nothing.
        as_json: Whether to print JSON.

    Raises:
        UsageError: A value is given, and not exactly one dead letter is selected; or nobody can confirm.
        AioshardError: The run was cut short.
    """
    topic = selection.topic
    with open_runner() as runner, entered(runner, DeadLetterTopic.opened(settings, topic)) as dead_letter_topic:
        plan = runner.run(read_plan(dead_letter_topic, selection))
        remarks = remarks_on(topic, plan, has_again=not isinstance(action, Finish))
        if has_value:
            _check_single(plan, remarks)
        report = Report(topic, plan, action.verb, remarks, as_json)
        if dry_run:
            report.show_plan(None if transform is None else runner.run(preview(dead_letter_topic, plan, transform)))
            return 0
        if plan.due:
            confirm(_question(topic, plan, action, is_changed=transform is not None), yes=yes)
        replay = Replay(dead_letter_topic, plan, action, who=os_user(), transform=transform, stop=stop)
        result = replay.result

        async def carry_out(signals: Signals) -> None:
            signals.on_first(stop.set)
            label = f"{counted(len(plan), 'dead letter')} of {topic} to be {action.verb}"
            async with progress(label, result.total):
                await replay.run(settings)

        try:
            # With an app, logging is configured already.
            audited = contextlib.nullcontext() if isinstance(action, RunHandlers) else audit_log()
            with audited, Signals("ending after the records in progress") as signals:
                runner.run(carry_out(signals))
        except AioshardError as error:
            report.show_result(result, error)
            raise
    report.show_result(result)
    if result.stopped:
        return INTERRUPTED
    return UNHEALTHY if result.failed else 0


def _check_single(plan: Plan, remarks: list[str]) -> None:
    if len(plan) == 1:
        return
    sentence = f"a value was given for one dead letter, and {len(plan):,} match"
    raise click.UsageError(f"{sentence}: select one with --at" if plan.due else ". ".join([sentence, *remarks]))


def _question(topic: str, plan: Plan, action: Action, *, is_changed: bool) -> str:
    number = counted(len(plan), "dead letter")
    after = ", after the transform," if is_changed else ""
    topics = by_topic(plan.topics)
    match action:
        case SendBack():
            return f"Send {number} of {topic} back{after} to their topics ({topics})?"
        case RunHandlers():
            return (
                f"Run the handlers of app {action.app.group_id!r}{after} on {number} of {topic} ({topics})? Their "
                "messages are published, and all their other effects are real."
            )
        case Finish():
            return f"Mark {number} of {topic} as done ({topics})? Their records are neither sent back nor processed."
