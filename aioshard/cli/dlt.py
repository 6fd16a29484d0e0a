"""`aioshard dlt`: dead letters, shown and replayed."""

from collections.abc import Iterator

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.brokers import run, settings_of
from aioshard.cli.loading import load_app
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
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.letters import Letter, as_object
from aioshard.dead_letters.reading import DeadLetterTopic, Survey
from aioshard.dead_letters.replaying import Replaying
from aioshard.dead_letters.runs import ThroughHandlers
from aioshard.dead_letters.sending import ToTopic
from aioshard.errors import AioshardError, AuthorizationError
from aioshard.kafka.producer import KafkaProducer
from aioshard.records import counted
from aioshard.settings import Settings
from aioshard.telemetry import logs

_SHOWN = 20
"""Maximum number of failures that are printed."""


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Show and replay dead letters."""


# show ---------------------------------------------------------------------------------


@command.command()
@options.topic_argument
@options.filters
@click.option(
    "--limit",
    type=click.IntRange(0),
    metavar="N",
    help=f"Show at most N, the newest ones; by default {options.ROWS}, and with --json all.",
)
@options.bootstrap_servers()
@options.as_json("the dead letters and their counts")
def show(topic: str, *, filters: Filters, limit: int | None, bootstrap_servers: str | None, as_json: bool) -> None:
    """Show the dead letters of TOPIC.

    Reads from the start of TOPIC to its current end, and commits nothing. Keys, values and messages are printed as
    they are in the topic, cut to a line; --json prints all of them.
    """
    newest = options.ROWS if limit is None and not as_json else limit
    survey, progress_known = run(_survey(settings_of(bootstrap_servers), topic, filters, newest))
    content = {
        "topic": topic,
        "dead_letters": list(map(as_object, survey.newest)),
        "summary": survey.as_object(progress_known=progress_known),
    }
    print_result(content, _lines_of(topic, survey, progress_known=progress_known), as_json=as_json)


def _lines_of(topic: str, survey: Survey, *, progress_known: bool) -> Iterator[str]:
    selected = part_as_text(survey.selected, survey.dead_letters, "dead letter")
    done = f", {survey.done} of them already replayed" if progress_known else ""
    yield f"{selected} in {topic}{done}"
    if survey.others:
        yield f"{counted(survey.others, 'other record')} in {topic}"
    if survey.first_failed_at is not None and survey.last_failed_at is not None:
        yield f"  failed: {moment_as_text(survey.first_failed_at)} to {moment_as_text(survey.last_failed_at)}"
    for name, counts in (("errors", survey.errors), ("handlers", survey.handlers), ("topics", survey.topics)):
        if counts:
            listed = [f"{as_text(value)} {count}" for value, count in counts.most_common()]
            yield f"  {name}: {', '.join(listed)}"
    newest = survey.newest
    if newest:
        yield from ["", *table(_HEADINGS, map(_cells, newest))]
        if len(newest) < survey.selected:
            yield f"\n{survey.selected - len(newest)} older ones are not shown: --limit shows more"


async def _survey(settings: Settings, topic: str, filters: Filters, newest: int | None) -> tuple[Survey, bool]:
    """Return figures about the dead letters that match, and whether it is known which ones are done."""
    progress_known = True
    async with DeadLetterTopic.opened(settings, topic, filters.partitions) as dead_letters:
        try:
            await dead_letters.fetch_progress()
        except AuthorizationError as error:
            progress_known = False
            click.echo(f"Cannot show which dead letters were replayed: {error}", err=True)
        async with progress(f"reading {topic}", lambda: dead_letters.read):
            return await dead_letters.survey(filters, newest=newest), progress_known


_HEADINGS = ("failed", "dead letter", "record", "key", "handler", "attempts", "error", "value", "")


def _cells(letter: Letter) -> tuple[object, ...]:
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
        cut(bytes_as_text(original.value)),
        "done" if letter.done else "",
    )


# replay -------------------------------------------------------------------------------


@command.command()
@options.topic_argument
@options.filters
@click.option(
    "--app",
    "target",
    metavar="MODULE:APP",
    help="Run the handlers of this app on them in this process, instead of sending them back.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Process at most N records.")
@click.option("--again", is_flag=True, help="Include those that were replayed before.")
@click.option(
    "--timestamp",
    type=click.Choice(["now", "original"]),
    default="now",
    show_default=True,
    help="Time of the records that are sent back. A topic may delete old ones before a consumer reads them.",
)
@options.app_dir
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
    default="critical",
    show_default=True,
    help="Lowest level that is logged, with --app; error shows the traceback of each failure.",
)
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS, or the setting of the app")
@options.as_json("the result")
def replay(
    topic: str,
    *,
    filters: Filters,
    target: str | None,
    limit: int | None,
    again: bool,
    timestamp: str,
    app_dir: str,
    log_level: str,
    bootstrap_servers: str | None,
    as_json: bool,
) -> int:
    """Send the dead letters of TOPIC back, or process them with --app.

    The brokers store the progress as committed offsets of the group aioshard-dlt.TOPIC, so a second run leaves out
    finished ones. A record that is sent back arrives behind newer ones of its key, and in every group that reads its
    topic. Exits with 3 if some failed.
    """
    app = None
    if target is None:
        settings = settings_of(bootstrap_servers)
    else:
        logs.configure(log_level)
        app = load_app(target, app_dir)
        if bootstrap_servers is not None:
            app.configure(bootstrap_servers=bootstrap_servers)
        settings = app.settings
        settings.require_bootstrap_servers()
        if filters.group not in {None, app.group_id}:
            raise click.UsageError(
                f"--group {filters.group} was given, but the handlers of --app {target} belong to {app.group_id!r}"
            )
        filters = filters._replace(group=app.group_id)
    replaying = Replaying(topic=topic, filters=filters, limit=limit, again=again)
    verb = "sent back" if app is None else "processed"
    try:
        run(_replay(settings, app, replaying, keep_time=timestamp == "original"))
    except (AioshardError, KeyboardInterrupt) as error:
        _report(replaying, verb, error, as_json=as_json)
        raise
    _report(replaying, verb, None, as_json=as_json)
    return UNHEALTHY if replaying.failed else 0


async def _replay(settings: Settings, app: App | None, replaying: Replaying, *, keep_time: bool) -> None:
    producer = KafkaProducer(settings)  # connects on use
    try:
        async with DeadLetterTopic.opened(settings, replaying.topic, replaying.filters.partitions) as dead_letters:
            await dead_letters.fetch_progress()
            destination = (
                ToTopic(dead_letters.administration, producer, keep_time) if app is None else ThroughHandlers(app)
            )
            async with progress(f"replaying {replaying.topic}", replaying.done.total):
                await replaying.run(dead_letters, destination)
    finally:
        await producer.close()


def _report(replaying: Replaying, verb: str, error: BaseException | None, *, as_json: bool) -> None:
    """Print the result; on standard error if the run was cut short."""
    if as_json:
        failed = [
            {"record": str(letter.source), "dead_letter": str(letter.at), "error": why}
            for letter, why in replaying.failed
        ]
        reason = None if error is None else str(error) or type(error).__name__
        print_json({"topic": replaying.topic, "done": replaying.done, "failed": failed, "error": reason})
    else:
        total = replaying.done.total()
        topics = ", ".join(f"{topic} {count}" for topic, count in replaying.done.most_common())
        result = f"{counted(total, 'dead letter')} {'was' if total == 1 else 'were'} {verb}"
        click.echo(f"{result}: {topics}" if topics else result, err=error is not None)
    for letter, why in replaying.failed[:_SHOWN]:
        click.echo(f"Failed: {letter.source} (dead letter {letter.at}): {why}", err=True)
    if len(replaying.failed) > _SHOWN:
        click.echo(f"Failed: {len(replaying.failed) - _SHOWN} more; --json names all of them", err=True)
