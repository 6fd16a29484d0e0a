"""`aioshard dlt`: dead letters, shown, tried and replayed."""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.brokers import audit_log, confirm, entered, open_runner, os_user, run, settings_of
from aioshard.cli.loading import load_app, load_function
from aioshard.cli.output import (
    UNHEALTHY,
    cut,
    moment_as_text,
    part_as_text,
    print_json,
    print_result,
    progress,
    table,
)
from aioshard.core.text import as_text, bytes_as_text
from aioshard.dead_letters import audit
from aioshard.dead_letters.decoding import Decoded, decoded, decoded_as_object
from aioshard.dead_letters.edits import Transform, with_value
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.letters import Letter, as_object
from aioshard.dead_letters.pages import Cursor, Page, cursor_as_text, read_cursor, read_page
from aioshard.dead_letters.plan import Plan, make_plan
from aioshard.dead_letters.reading import DeadLetterTopic, Survey
from aioshard.dead_letters.replaying import Finish, How, Process, SendBack, planned, preview, verb_of
from aioshard.dead_letters.replaying import replay as run_plan
from aioshard.dead_letters.results import Result
from aioshard.dead_letters.tries import Trial, Tried, message_as_object, tried_as_object, try_letters
from aioshard.errors import AioshardError, AuthorizationError
from aioshard.ports import Message
from aioshard.records import counted
from aioshard.settings import Settings
from aioshard.signals import INTERRUPTED, Signals
from aioshard.telemetry import logs

_SHOWN = 20
"""Maximum number of failures that are printed."""


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Show, try and replay dead letters."""


# show ---------------------------------------------------------------------------------


def _page(text: str) -> Cursor | Literal["newest"]:
    if text == "newest":
        return "newest"
    try:
        return read_cursor(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}; 'newest' is the first page") from None


@command.command()
@options.topic_argument
@options.filters
@options.at
@click.option("--due", "done", flag_value=False, default=None, help="Only those that were not replayed yet.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    metavar="N",
    help=f"Show at most N, the newest ones; by default {options.ROWS}, and with --json all.",
)
@click.option(
    "--page",
    type=_page,
    metavar="CURSOR",
    help="Read only a page, newest first, without counts: 'newest', or the cursor that the page before has printed.",
)
@click.option("--app", "target", metavar="MODULE:APP", help="Decode values as the handlers of this app do.")
@options.app_dir
@options.bootstrap_servers()
@options.as_json("the dead letters and their counts")
def show(
    topic: str,
    *,
    filters: Filters,
    limit: int | None,
    page: Cursor | Literal["newest"] | None,
    target: str | None,
    app_dir: str,
    bootstrap_servers: str | None,
    as_json: bool,
) -> None:
    """Show the dead letters of TOPIC.

    Reads from the start of TOPIC to its current end, and commits nothing. Keys, values and messages are printed as
    they are in the topic, cut to a line; --json prints all of them.
    """
    _check_at(filters, topic)
    app = None if target is None else load_app(target, app_dir)
    if app is not None and bootstrap_servers is not None:
        app.configure(bootstrap_servers=bootstrap_servers)
    settings = settings_of(bootstrap_servers) if app is None else app.settings
    if page is not None:
        found = run(_page_of(settings, topic, filters, page, options.ROWS if limit is None else limit))
        values = run(_values_of(app, found.letters))
        cursor = None if found.cursor is None else cursor_as_text(found.cursor)
        content: dict[str, Any] = {"topic": topic, "dead_letters": _objects(found.letters, values), "cursor": cursor}
        lines = [*_table_of(found.letters, values), "", f"Older ones: --page {cursor}" if cursor else "No older ones"]
        print_result(content, lines, as_json=as_json)
        return
    newest = options.ROWS if limit is None and not as_json else limit
    survey, progress_known = run(_survey(settings, topic, filters, newest))
    values = run(_values_of(app, survey.newest))
    content = {
        "topic": topic,
        "dead_letters": _objects(survey.newest, values),
        "summary": survey.as_object(progress_known=progress_known),
    }
    print_result(content, _lines_of(topic, survey, values, progress_known=progress_known), as_json=as_json)


async def _survey(settings: Settings, topic: str, filters: Filters, newest: int | None) -> tuple[Survey, bool]:
    """Return figures about the dead letters that match, and whether it is known which ones are done."""
    async with DeadLetterTopic.opened(settings, topic, filters.partitions) as dead_letters:
        progress_known = await _fetch_progress(dead_letters, required=filters.done is not None)
        async with progress(f"reading {topic}", lambda: dead_letters.read):
            return await dead_letters.survey(filters, newest=newest), progress_known


async def _page_of(
    settings: Settings, topic: str, filters: Filters, page: Cursor | Literal["newest"], size: int
) -> Page:
    async with DeadLetterTopic.opened(settings, topic, filters.partitions) as dead_letters:
        await _fetch_progress(dead_letters, required=filters.done is not None)
        cursor = None if page == "newest" else page
        async with progress(f"reading {topic}", lambda: dead_letters.read):
            return await read_page(dead_letters, filters, cursor=cursor, size=size)


async def _fetch_progress(dead_letters: DeadLetterTopic, *, required: bool) -> bool:
    """Return whether it is known which ones are done.

    Raises:
        AuthorizationError: It is not, and *required*.
    """
    try:
        await dead_letters.fetch_progress()
    except AuthorizationError as error:
        if required:
            raise
        click.echo(f"Cannot show which dead letters were replayed: {error}", err=True)
        return False
    return True


async def _values_of(app: App | None, letters: Sequence[Letter]) -> list[Decoded]:
    return [] if app is None else await decoded(app, letters)


def _objects(letters: Sequence[Letter], values: Sequence[Decoded]) -> list[dict[str, Any]]:
    if not values:
        return list(map(as_object, letters))
    pairs = zip(letters, values, strict=True)
    return [{**as_object(letter), "decoded": decoded_as_object(value)} for letter, value in pairs]


def _lines_of(topic: str, survey: Survey, values: Sequence[Decoded], *, progress_known: bool) -> Iterator[str]:
    selected = part_as_text(survey.selected, survey.dead_letters, "dead letter")
    done = f", {survey.done:,} of them already replayed" if progress_known else ""
    yield f"{selected} in {topic}{done}"
    if survey.dead_letters and not survey.selected:
        yield "None matches: without filters, this command counts them by error, handler and topic"
    if survey.others:
        yield f"{counted(survey.others, 'other record')} in {topic}"
    if survey.first_failed_at is not None and survey.last_failed_at is not None:
        yield f"  failed: {moment_as_text(survey.first_failed_at)} to {moment_as_text(survey.last_failed_at)}"
    for name, counts in (("errors", survey.errors), ("handlers", survey.handlers), ("topics", survey.topics)):
        if counts:
            listed = [f"{as_text(value)} {count:,}" for value, count in counts.most_common()]
            yield f"  {name}: {', '.join(listed)}"
    newest = survey.newest
    if newest:
        yield from ["", *_table_of(newest, values)]
        if len(newest) < survey.selected:
            yield f"\n{survey.selected - len(newest):,} older ones are not shown: --limit shows more"
        elif survey.selected == 1:
            yield from ["", *_details_of(newest[0], values)]


_HEADINGS = ("failed", "dead letter", "record", "key", "handler", "attempts", "error", "value", "")


def _table_of(letters: Sequence[Letter], values: Sequence[Decoded]) -> list[str]:
    shown = map(_text_of, values) if values else (bytes_as_text(letter.original.value) for letter in letters)
    return table(_HEADINGS, map(_cells, letters, shown))


def _text_of(value: Decoded) -> str:
    if value.faults:
        return as_text("; ".join(f"{location}: {message}".removeprefix(": ") for location, message in value.faults))
    return json.dumps(value.value)


def _details_of(letter: Letter, values: Sequence[Decoded]) -> Iterator[str]:
    """Yield what the table cuts or leaves out."""
    original = letter.original
    yield f"  error: {as_text(f'{letter.failure.error}: {letter.failure.message}')}"
    yield f"  key: {bytes_as_text(original.key)}"
    yield f"  value: {bytes_as_text(original.value)}"
    for name, content in original.headers:
        yield f"  header {as_text(name)}: {bytes_as_text(content)}"
    for value in values:
        yield f"  {'not decoded' if value.faults else 'decoded'}: {_text_of(value)}"


def _cells(letter: Letter, value: str) -> tuple[object, ...]:
    original = letter.original
    failure = letter.failure
    return (
        moment_as_text(failure.failed_at),
        f"{letter.at.partition}/{letter.at.offset}",
        letter.source,
        cut(bytes_as_text(original.key)),
        as_text(failure.handler),
        failure.attempts,
        cut(as_text(f"{failure.error}: {failure.message}")),
        cut(value),
        "done" if letter.done else "",
    )


# Options of the commands below -------------------------------------------------------


_again = click.option("--again", is_flag=True, help="Include those that are done already.")
_transform = click.option(
    "--transform",
    metavar="MODULE:FUNCTION",
    help="Change each record: the function takes the Record, and returns the new value, or None to leave it alone.",
)
_yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
_log_level = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
    default="critical",
    show_default=True,
    help="Lowest level that is logged, with --app; error shows the traceback of each failure.",
)


def _check_at(filters: Filters, topic: str) -> None:
    for position in filters.at:
        if position.topic != topic:
            raise click.UsageError(f"--at {position} is not in {topic}: it takes positions in the dead-letter topic")


def _open_app(target: str, app_dir: str, bootstrap_servers: str | None, log_level: str, filters: Filters) -> App:
    """Load an app, and check that it has brokers and that the filters fit its group."""
    logs.configure(log_level)
    audit.logger.setLevel(logging.WARNING)
    app = load_app(target, app_dir)
    if bootstrap_servers is not None:
        app.configure(bootstrap_servers=bootstrap_servers)
    app.settings.require_bootstrap_servers()
    if filters.group not in {None, app.group_id}:
        raise click.UsageError(
            f"--group {filters.group} was given, but the handlers of --app {target} belong to {app.group_id!r}"
        )
    return app


def _transform_of(function: str | None, app_dir: str, value: str | None, value_file: str | None) -> Transform | None:
    if sum(given is not None for given in (function, value, value_file)) > 1:
        raise click.UsageError("--transform, --value and --value-file exclude each other: give one of them")
    if function is not None:
        return load_function(function, app_dir)
    if value is not None:
        return with_value(value.encode("utf-8", "surrogateescape"))
    if value_file is not None:
        return with_value(Path(value_file).read_bytes())
    return None


# replay -------------------------------------------------------------------------------


@command.command()
@options.topic_argument
@options.filters
@options.at
@click.option(
    "--app",
    "target",
    metavar="MODULE:APP",
    help="Run the handlers of this app on them in this process, instead of sending them back.",
)
@_transform
@click.option("--value", metavar="VALUE", help="New value of the one dead letter that is selected.")
@click.option(
    "--value-file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="PATH",
    help="File with the new value of the one dead letter that is selected.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Process at most N records.")
@_again
@click.option(
    "--timestamp",
    type=click.Choice(["now", "original"]),
    default="now",
    show_default=True,
    help="Time of the records that are sent back. A topic may delete old ones before a consumer reads them.",
)
@click.option("--dry-run", is_flag=True, help="Only show how many would be replayed.")
@_yes
@options.app_dir
@_log_level
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS, or the setting of the app")
@options.as_json("the result")
def replay(
    topic: str,
    *,
    filters: Filters,
    target: str | None,
    transform: str | None,
    value: str | None,
    value_file: str | None,
    limit: int | None,
    again: bool,
    timestamp: str,
    dry_run: bool,
    yes: bool,
    app_dir: str,
    log_level: str,
    bootstrap_servers: str | None,
    as_json: bool,
) -> int:
    """Send the dead letters of TOPIC back, or process them with --app.

    First asks for confirmation, with their number. The records and the progress are written in one transaction, so
    no record is sent twice. A record that is sent back arrives behind newer ones of its key, and in every group that
    reads its topic. A first Ctrl-C ends the run after the transaction in progress. Exits with 3 if some failed, and
    with 4 if another run has taken over.
    """
    _check_at(filters, topic)
    app = None
    if target is None:
        settings = settings_of(bootstrap_servers)
    else:
        app = _open_app(target, app_dir, bootstrap_servers, log_level, filters)
        settings = app.settings
        filters = filters._replace(group=app.group_id)
    change = _transform_of(transform, app_dir, value, value_file)
    how = SendBack(keep_time=timestamp == "original") if app is None else Process(app)
    selection = _Selection(topic, filters, limit, again=again, is_one=value is not None or value_file is not None)
    return _run(settings, selection, how, change, dry_run=dry_run, yes=yes, as_json=as_json)


class _Selection(NamedTuple):
    """The dead letters that a command is to work on."""

    topic: str
    filters: Filters
    limit: int | None
    again: bool = False
    """Whether those that are done are included."""
    is_one: bool = False
    """Whether there must be exactly one."""


def _run(
    settings: Settings,
    selection: _Selection,
    how: How,
    change: Transform | None,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Plan a run, ask for confirmation, and carry it out; return the exit code."""
    topic, filters, limit, again, is_one = selection
    verb = verb_of(how)
    result = Result()
    with open_runner() as runner, entered(runner, DeadLetterTopic.opened(settings, topic)) as dead_letters:
        plan = runner.run(_plan(dead_letters, filters, limit=limit, again=again))
        remarks = _remarks_on(topic, plan, has_again=not isinstance(how, Finish))
        if is_one and len(plan) != 1:
            sentence = f"a value was given for one dead letter, and {len(plan):,} match"
            raise click.UsageError(f"{sentence}: select one with --at" if plan.due else ". ".join([sentence, *remarks]))
        if dry_run:
            if change is not None:
                result = runner.run(preview(dead_letters, plan, change))
            _report_plan(topic, plan, result if change else None, verb, remarks=remarks, as_json=as_json)
            return 0
        if plan.due:
            confirm(_question(topic, plan, how, changed=change is not None), yes=yes)

        async def work(signals: Signals) -> None:
            stop = asyncio.Event()
            signals.on_first(stop.set)
            async with progress(f"{counted(len(plan), 'dead letter')} of {topic} to be {verb}", result.total):
                await run_plan(
                    settings, dead_letters, plan, result, who=os_user(), how=how, transform=change, stop=stop
                )

        try:
            audited = contextlib.nullcontext() if isinstance(how, Process) else audit_log()
            with audited, Signals("ending after the records in progress") as signals:
                runner.run(work(signals))
        except AioshardError as error:
            _report(topic, plan, result, verb, error, remarks=remarks, as_json=as_json)
            raise
    _report(topic, plan, result, verb, None, remarks=remarks, as_json=as_json)
    if result.stopped:
        return INTERRUPTED
    return UNHEALTHY if result.failed else 0


async def _plan(dead_letters: DeadLetterTopic, filters: Filters, *, limit: int | None, again: bool) -> Plan:
    # Not final: a run that sends takes over first, reads the progress again, and leaves out what is done by then.
    await dead_letters.fetch_progress()
    async with progress(f"reading {dead_letters.name}", lambda: dead_letters.read):
        return await make_plan(dead_letters, filters, limit=limit, again=again)


def _remarks_on(topic: str, plan: Plan, *, has_again: bool = True) -> list[str]:
    """Say why a plan is empty, or that it leaves out dead letters because of the limit."""
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


def _question(topic: str, plan: Plan, how: How, *, changed: bool) -> str:
    letters = counted(len(plan), "dead letter")
    after = ", after the transform," if changed else ""
    topics = _by_topic(plan.topics)
    match how:
        case SendBack():
            return f"Send {letters} of {topic} back{after} to their topics ({topics})?"
        case Process(app):
            return (
                f"Run the handlers of app {app.group_id!r}{after} on {letters} of {topic} ({topics})? Their messages "
                "are published, and all their other effects are real."
            )
        case Finish():
            return f"Mark {letters} of {topic} as done ({topics})? Their records are neither sent back nor processed."


def _by_topic(topics: Counter[str]) -> str:
    return ", ".join(f"{topic} {count:,}" for topic, count in topics.most_common())


def _report_plan(
    topic: str, plan: Plan, result: Result | None, verb: str, *, remarks: Sequence[str], as_json: bool
) -> None:
    """Print how many dead letters a run would work on, and the result of the transform."""
    content: dict[str, Any] = {
        "topic": topic,
        "dry_run": True,
        "selected": len(plan),
        "replayed": plan.done,
        "beyond_limit": plan.beyond_limit,
        "topics": plan.topics,
        "errors": plan.errors,
    }
    lines = [f"{counted(len(plan), 'dead letter')} would be {verb}"]
    if plan.topics:
        lines[0] += f": {_by_topic(plan.topics)}"
    lines += remarks
    if result is not None:
        changed = result.done.total()
        content |= {"changed": changed, "left": result.left, "failed": _failed(result)}
        lines.append(
            f"The transform changes {changed:,}, leaves {result.left:,} alone and fails for {len(result.failed):,}"
        )
    print_result(content, lines, as_json=as_json)
    if result is not None:
        _echo_failed(result)


def _report(
    topic: str,
    plan: Plan,
    result: Result,
    verb: str,
    error: BaseException | None,
    *,
    remarks: Sequence[str],
    as_json: bool,
) -> None:
    """Print the result; on standard error if the run was cut short."""
    is_cut_short = error is not None or result.stopped
    total = result.done.total()
    if as_json:
        reason = None if error is None else str(error) or type(error).__name__
        content = {"topic": topic, "done": result.done, "failed": _failed(result), "error": reason}
        print_json({**content, "edited": result.edited, "left": result.left, "stopped": result.stopped})
    else:
        line = f"{counted(total, 'dead letter')} {'was' if total == 1 else 'were'} {verb}"
        click.echo(f"{line}: {_by_topic(result.done)}" if result.done else line, err=is_cut_short)
        for remark in remarks:
            click.echo(remark, err=is_cut_short)
        if result.left:
            click.echo(f"The transform left {counted(result.left, 'dead letter')} alone", err=is_cut_short)
        if result.stopped:
            due = len(plan) - total - len(result.failed) - result.left
            click.echo(f"Stopped: {counted(due, 'dead letter')} of this run stay due", err=True)
    _echo_failed(result)


def _failed(result: Result) -> list[dict[str, str]]:
    return [
        {"record": str(failed.letter.source), "dead_letter": str(failed.letter.at), "error": failed.reason}
        for failed in result.failed
    ]


def _echo_failed(result: Result) -> None:
    for letter, why in result.failed[:_SHOWN]:
        click.echo(f"Failed: {letter.source} (dead letter {letter.at}): {why}", err=True)
    if len(result.failed) > _SHOWN:
        click.echo(f"Failed: {len(result.failed) - _SHOWN:,} more; --json names all of them", err=True)


# finish -------------------------------------------------------------------------------


@command.command()
@options.topic_argument
@options.filters
@options.at
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Mark at most N records.")
@click.option("--dry-run", is_flag=True, help="Only show how many would be marked.")
@_yes
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("the result")
def finish(
    topic: str,
    *,
    filters: Filters,
    limit: int | None,
    dry_run: bool,
    yes: bool,
    bootstrap_servers: str | None,
    as_json: bool,
) -> int:
    """Mark the dead letters of TOPIC as done.

    Their records are neither sent back nor processed: they are given up, or were fixed elsewhere. First asks for
    confirmation, with their number. Nothing is deleted: `dlt replay --again` includes them. Exits with 4 if another run
    has taken over.
    """
    _check_at(filters, topic)
    settings = settings_of(bootstrap_servers)
    return _run(settings, _Selection(topic, filters, limit), Finish(), None, dry_run=dry_run, yes=yes, as_json=as_json)


# try ----------------------------------------------------------------------------------


@command.command("try")
@options.topic_argument
@options.filters
@options.at
@click.option("--app", "target", metavar="MODULE:APP", required=True, help="The app whose handlers run.")
@_transform
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="Run at most N records."
)
@_again
@_yes
@options.app_dir
@_log_level
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS, or the setting of the app")
@options.as_json("the results, with the messages that would be published")
def try_(
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
    _check_at(filters, topic)
    app = _open_app(target, app_dir, bootstrap_servers, log_level, filters)
    filters = filters._replace(group=app.group_id)
    function = _transform_of(transform, app_dir, None, None)

    async def read(dead_letters: DeadLetterTopic) -> tuple[Plan, list[Letter]]:
        plan = await _plan(dead_letters, filters, limit=limit, again=again)
        return plan, [item.letter async for item in planned(dead_letters, plan, None, Result())]

    async def run_handlers(letters: list[Letter], signals: Signals) -> Trial:
        stop = asyncio.Event()
        signals.on_first(stop.set)
        return await try_letters(app, letters, transform=function, stop=stop)

    with open_runner() as runner:
        with entered(runner, DeadLetterTopic.opened(app.settings, topic)) as dead_letters:
            plan, letters = runner.run(read(dead_letters))
        if letters:
            confirm(
                f"Run the handlers of app {app.group_id!r} on {counted(len(letters), 'dead letter')} of {topic}? "
                "Nothing is published or committed, but requests and writes that they make themselves are real.",
                yes=yes,
            )
        with Signals("ending after the handlers in progress") as signals:
            trial = runner.run(run_handlers(letters, signals))
    content = {
        "topic": topic,
        "beyond_limit": plan.beyond_limit,
        "tried": list(map(tried_as_object, trial.tried)),
        "other_messages": list(map(message_as_object, trial.unattributed)),
    }
    print_result(content, [*_lines_of_trial(trial), *_remarks_on(topic, plan)], as_json=as_json)
    return UNHEALTHY if any(tried.error is not None for tried in trial.tried) else 0


def _lines_of_trial(trial: Trial) -> Iterator[str]:
    succeeded = part_as_text(
        sum(tried.error is None and not tried.left for tried in trial.tried), len(trial.tried), "dead letter"
    )
    yield f"{succeeded} would succeed; nothing was published or committed"
    for tried in trial.tried:
        yield f"{tried.letter.source} (dead letter {tried.letter.at}): {_outcome_of(tried)}"
        if tried.record is not tried.letter.original:
            yield f"  changed to: {cut(bytes_as_text(tried.record.value))}"
        yield from map(_line_of_message, tried.messages)
    if trial.unattributed:
        yield "Published by tasks and threads that no handler waits for:"
        yield from map(_line_of_message, trial.unattributed)


def _outcome_of(tried: Tried) -> str:
    if tried.left:
        return "left alone by the transform"
    if tried.error is not None:
        return f"failed: {as_text(tried.error)}"
    took = "" if tried.seconds is None else f" in {tried.seconds:.3f} s"
    return f"succeeded{took}"


def _line_of_message(message: Message) -> str:
    return f"  to {message.topic}: {cut(bytes_as_text(message.key))}: {cut(bytes_as_text(message.value))}"
