"""`aioshard dlt show`: what a dead-letter topic holds."""

import heapq
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.letters import DeadLetters, Letter
from aioshard.cli.progress import Progress
from aioshard.cli.selection import Selection, filters
from aioshard.cli.sides import opened, run, settings_of, topic_argument
from aioshard.cli.tables import as_json_value, as_text, bytes_as_text, cut, moment_as_text, print_table
from aioshard.errors import AuthorizationError
from aioshard.settings import Settings

__all__ = ["show"]

_ROWS = 50
"""Rows of a table where nobody said how many."""


@click.command()
@topic_argument
@filters
@click.option(
    "--limit",
    type=click.IntRange(0),
    help=f"Only those that failed last, so many; by default {_ROWS}, and with --json all.",
)
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@options.as_json("the dead letters, and how many there are of what,")
def show(topic: str, *, selection: Selection, limit: int | None, bootstrap_servers: str | None, as_json: bool) -> None:
    """Show the dead letters of TOPIC.

    Reads from the start of TOPIC to the end that it has now, and consumes nothing. Keys, values and messages are
    shown as they are in the topic, cut to a line; --json has all of them.
    """
    run(_show(settings_of(bootstrap_servers), topic, selection, limit, as_json=as_json))


async def _show(settings: Settings, topic: str, selection: Selection, limit: int | None, *, as_json: bool) -> None:
    rows = _JsonRows(limit) if as_json else _TableRows(_ROWS if limit is None else limit)
    summary = _Summary()
    async with opened(settings, topic, selection.partitions) as side:
        letters = DeadLetters(side, selection)
        try:
            await letters.look_up_notes()
        except AuthorizationError as error:
            summary.replayed = None
            click.echo(f"What was sent back already is not known: {error}", err=True)
        rows.begin(topic)
        async with Progress(f"reading {topic}", lambda: letters.read, note=lambda: letters.share):
            async for letter in letters.letters():
                summary.take(letter)
                rows.take(letter)
    rows.end(topic, letters, summary)


class _Summary:
    """How many there are of what."""

    def __init__(self) -> None:
        self.total = 0
        self.replayed: int | None = 0
        """None where that is not known."""
        self.counts: dict[str, Counter[str]] = {"errors": Counter(), "handlers": Counter(), "topics": Counter()}
        self.first_failed_at: float | None = None
        self.last_failed_at: float | None = None

    def take(self, letter: Letter) -> None:
        """Count a dead letter."""
        failure = letter.failure
        self.total += 1
        if self.replayed is not None:
            self.replayed += letter.done
        self.counts["errors"][failure.error] += 1
        self.counts["handlers"][failure.handler] += 1
        self.counts["topics"][letter.original.topic] += 1
        self.first_failed_at = min(failure.failed_at, self.first_failed_at or failure.failed_at)
        self.last_failed_at = max(failure.failed_at, self.last_failed_at or failure.failed_at)

    def lines(self, topic: str, letters: DeadLetters) -> Iterator[str]:
        """For people."""
        of = f" of {letters.read}" if letters.read != self.total else ""
        done = "" if self.replayed is None else f", {self.replayed} of them sent back or processed already"
        yield f"{self.total}{of} dead letter(s) in {topic}{done}"
        if letters.strange:
            yield f"{letters.strange} record(s) of {topic} are no dead letters of aioshard"
        if self.first_failed_at is not None and self.last_failed_at is not None:
            yield f"  failed: {moment_as_text(self.first_failed_at)} to {moment_as_text(self.last_failed_at)}"
        for name, counts in self.counts.items():
            if counts:
                yield f"  {name}: {', '.join(f'{as_text(value)} {count}' for value, count in counts.most_common())}"


class _Newest:
    """The dead letters that failed last."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._heap: list[tuple[float, int, Letter]] = []
        self._taken = 0

    def take(self, letter: Letter) -> None:
        """Keep it, in place of the one that failed first where there are too many."""
        self._taken += 1  # no two entries are alike, so that letters are never compared
        entry = (letter.failure.failed_at, self._taken, letter)
        if self._limit is None or len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def __iter__(self) -> Iterator[Letter]:
        return (letter for _, _, letter in sorted(self._heap))

    @property
    def left_out(self) -> int:
        """How many were not kept."""
        return self._taken - len(self._heap)


class _TableRows:
    """A table under the summary."""

    def __init__(self, limit: int) -> None:
        self._newest = _Newest(limit)

    def begin(self, topic: str) -> None:
        """Nothing is printed before everything was read."""

    def take(self, letter: Letter) -> None:
        """See `_Newest`."""
        self._newest.take(letter)

    def end(self, topic: str, letters: DeadLetters, summary: _Summary) -> None:
        """Print everything."""
        for line in summary.lines(topic, letters):
            click.echo(line)
        if rows := [_cells(letter) for letter in self._newest]:
            click.echo()
            print_table(_HEADINGS, rows)
        if rows and self._newest.left_out:
            click.echo(f"\n{self._newest.left_out} that failed before are not shown: --limit shows more")


_HEADINGS = ("failed", "dead letter", "record", "key", "handler", "attempts", "error", "value", "")


def _cells(letter: Letter) -> tuple[str, ...]:
    original, failure = letter.original, letter.failure
    return (
        moment_as_text(failure.failed_at),
        f"{letter.at.partition}/{letter.at.offset}",
        f"{original.topic}/{original.partition}/{original.offset}",
        cut(bytes_as_text(original.key)),
        as_text(failure.handler),
        str(failure.attempts),
        cut(as_text(f"{failure.error}: {failure.message}")),
        cut(bytes_as_text(original.value)),
        "done" if letter.done else "",
    )


class _JsonRows:
    """One JSON object, written as it is read unless only the newest are wanted."""

    def __init__(self, limit: int | None) -> None:
        self._newest = None if limit is None else _Newest(limit)
        self._written = 0

    def begin(self, topic: str) -> None:
        """Begin the object."""
        click.echo(f'{{"topic": {json.dumps(topic)}, "dead_letters": [', nl=False)

    def take(self, letter: Letter) -> None:
        """Write it, or keep it."""
        if self._newest is None:
            self._write(letter)
        else:
            self._newest.take(letter)

    def _write(self, letter: Letter) -> None:
        click.echo(f"{', ' if self._written else ''}{json.dumps(_object(letter))}", nl=False)
        self._written += 1

    def end(self, topic: str, letters: DeadLetters, summary: _Summary) -> None:  # noqa: ARG002 - one of two of one shape
        """End the object."""
        for letter in self._newest or ():
            self._write(letter)
        told = {
            "selected": summary.total,
            "dead_letters": letters.read,
            "replayed": summary.replayed,
            "other_records": letters.strange,
            "first_failed_at": summary.first_failed_at,
            "last_failed_at": summary.last_failed_at,
            **summary.counts,
        }
        click.echo(f'], "summary": {json.dumps(told)}}}')


def _object(letter: Letter) -> dict[str, Any]:
    original, failure = letter.original, letter.failure
    return {
        "partition": letter.at.partition,
        "offset": letter.at.offset,
        "replayed": letter.done,
        "record": {
            "topic": original.topic,
            "partition": original.partition,
            "offset": original.offset,
            "timestamp": original.timestamp,
            "key": as_json_value(original.key),
            "value": as_json_value(original.value),
            "headers": [[name, as_json_value(value)] for name, value in original.headers],
        },
        **failure._asdict(),
    }
