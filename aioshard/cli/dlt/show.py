"""`aioshard dlt show`: list dead letters, and count them by error, handler and topic."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.brokers import run, settings_of
from aioshard.cli.dlt import arguments
from aioshard.cli.output import cut, moment_as_text, part_as_text, print_result, progress, table
from aioshard.core.text import as_text, bytes_as_text
from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.decoding import Decoded, decode
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.pages import Cursor, Page, cursor_as_text, read_cursor, read_page
from aioshard.dead_letters.reading import DeadLetterTopic, Survey
from aioshard.errors import AuthorizationError
from aioshard.records import counted
from aioshard.settings import Settings


def _page(text: str) -> Cursor | Literal["newest"]:
    if text == "newest":
        return "newest"
    try:
        return read_cursor(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}; 'newest' is the first page") from None


@click.command("show")
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
def command(
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
    arguments.check_at(filters, topic)
    app = None if target is None else arguments.load_configured_app(target, app_dir, bootstrap_servers)
    settings = settings_of(bootstrap_servers) if app is None else app.settings
    if page is not None:
        size = options.ROWS if limit is None else limit
        cursor = None if page == "newest" else page
        _show_page(run(_read_page(settings, topic, filters, cursor, size)), topic, app, as_json=as_json)
        return
    newest = options.ROWS if limit is None and not as_json else limit
    survey, progress_known = run(_survey(settings, topic, filters, newest))
    values = run(_values_of(app, survey.newest))
    content = {
        "topic": topic,
        "dead_letters": _objects(survey.newest, values),
        "summary": survey.as_object(progress_known=progress_known),
    }
    lines = [*_counts_in(topic, survey, progress_known=progress_known), *_newest_of(survey, values)]
    print_result(content, lines, as_json=as_json)


def _show_page(page: Page, topic: str, app: App | None, *, as_json: bool) -> None:
    values = run(_values_of(app, page.dead_letters))
    cursor = None if page.cursor is None else cursor_as_text(page.cursor)
    content = {"topic": topic, "dead_letters": _objects(page.dead_letters, values), "cursor": cursor}
    older = f"Older ones: --page {cursor}" if cursor else "No older ones"
    print_result(content, [*_table_of(page.dead_letters, values), "", older], as_json=as_json)


# Reading ------------------------------------------------------------------------------


async def _survey(settings: Settings, topic: str, filters: Filters, newest: int | None) -> tuple[Survey, bool]:
    """Return figures about the dead letters that match, and whether it is known which ones are done."""
    async with DeadLetterTopic.opened(settings, topic, filters.partitions) as dead_letter_topic:
        progress_known = await _fetch_progress(dead_letter_topic, required=filters.done is not None)
        async with progress(f"reading {topic}", lambda: dead_letter_topic.dead_letters_read):
            return await dead_letter_topic.survey(filters, newest=newest), progress_known


async def _read_page(settings: Settings, topic: str, filters: Filters, cursor: Cursor | None, size: int) -> Page:
    async with DeadLetterTopic.opened(settings, topic, filters.partitions) as dead_letter_topic:
        await _fetch_progress(dead_letter_topic, required=filters.done is not None)
        async with progress(f"reading {topic}", lambda: dead_letter_topic.dead_letters_read):
            return await read_page(dead_letter_topic, filters, cursor=cursor, size=size)


async def _fetch_progress(dead_letter_topic: DeadLetterTopic, *, required: bool) -> bool:
    """Return whether it is known which ones are done.

    Raises:
        AuthorizationError: It is not, and *required*.
    """
    try:
        await dead_letter_topic.fetch_progress()
    except AuthorizationError as error:
        if required:
            raise
        click.echo(f"Cannot show which dead letters were replayed: {error}", err=True)
        return False
    return True


async def _values_of(app: App | None, dead_letters: Sequence[StoredDeadLetter]) -> list[Decoded]:
    return [] if app is None else await decode(app, dead_letters)


# Output -------------------------------------------------------------------------------


def _objects(dead_letters: Sequence[StoredDeadLetter], values: Sequence[Decoded]) -> list[dict[str, Any]]:
    if not values:
        return [dead_letter.as_object() for dead_letter in dead_letters]
    pairs = zip(dead_letters, values, strict=True)
    return [{**dead_letter.as_object(), "decoded": value.as_object()} for dead_letter, value in pairs]


def _counts_in(topic: str, survey: Survey, *, progress_known: bool) -> Iterator[str]:
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


def _newest_of(survey: Survey, values: Sequence[Decoded]) -> Iterator[str]:
    newest = survey.newest
    if not newest:
        return
    yield ""
    yield from _table_of(newest, values)
    if len(newest) < survey.selected:
        yield f"\n{survey.selected - len(newest):,} older ones are not shown: --limit shows more"
    elif survey.selected == 1:
        yield ""
        yield from _details_of(newest[0], values)


_HEADINGS = ("failed", "dead letter", "record", "key", "handler", "attempts", "error", "value", "")


def _table_of(dead_letters: Sequence[StoredDeadLetter], values: Sequence[Decoded]) -> list[str]:
    shown = (
        map(_text_of, values) if values else (bytes_as_text(dead_letter.original.value) for dead_letter in dead_letters)
    )
    return table(_HEADINGS, map(_cells, dead_letters, shown))


def _text_of(value: Decoded) -> str:
    if value.faults:
        return as_text("; ".join(f"{location}: {message}".removeprefix(": ") for location, message in value.faults))
    return json.dumps(value.value)


def _details_of(dead_letter: StoredDeadLetter, values: Sequence[Decoded]) -> Iterator[str]:
    """Yield what the table cuts or leaves out."""
    original = dead_letter.original
    yield f"  error: {as_text(f'{dead_letter.failure.error}: {dead_letter.failure.message}')}"
    yield f"  key: {bytes_as_text(original.key)}"
    yield f"  value: {bytes_as_text(original.value)}"
    for name, content in original.headers:
        yield f"  header {as_text(name)}: {bytes_as_text(content)}"
    for value in values:
        yield f"  {'not decoded' if value.faults else 'decoded'}: {_text_of(value)}"


def _cells(dead_letter: StoredDeadLetter, value: str) -> tuple[object, ...]:
    original = dead_letter.original
    failure = dead_letter.failure
    return (
        moment_as_text(failure.failed_at),
        f"{dead_letter.at.partition}/{dead_letter.at.offset}",
        dead_letter.source,
        cut(bytes_as_text(original.key)),
        as_text(failure.handler),
        failure.attempts,
        cut(as_text(f"{failure.error}: {failure.message}")),
        cut(value),
        "done" if dead_letter.done else "",
    )
