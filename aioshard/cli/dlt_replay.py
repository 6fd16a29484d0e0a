"""`aioshard dlt replay`: dead letters go back to their topics, or through their handlers here."""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import click

from aioshard.cli import options
from aioshard.cli.letters import DeadLetters, Destination, Letter, Outcome
from aioshard.cli.progress import Progress
from aioshard.cli.selection import Selection, filters
from aioshard.cli.sides import SideTopic, opened, run, settings_of, topic_argument
from aioshard.cli.to_topic import Timestamps, ToTopic
from aioshard.engine.tasks import finish
from aioshard.errors import AioshardError
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import record_size
from aioshard.serde.side_records import Coordinates
from aioshard.settings import Settings
from aioshard.telemetry import logs

if TYPE_CHECKING:
    from aioshard.app import App

__all__ = ["replay"]

_FAILED = 3
_SHOWN = 20
"""Failures that are told in full."""


@click.command()
@topic_argument
@filters
@click.option(
    "--to-topic", is_flag=True, help="Send each back to the topic and partition that it came from; the default."
)
@click.option(
    "--app",
    "target",
    metavar="MODULE:APP",
    help="Instead of sending them: run the handlers of this app on them, in this process.",
)
@click.option("--limit", type=click.IntRange(1), help="Only so many.")
@click.option("--again", is_flag=True, help="Also those that were sent back or processed before.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--timestamp",
    "timestamps",
    type=click.Choice(["original", "now"]),
    help="Time of what is sent; by default the original one, and what the topic would delete at once is refused.",
)
@options.app_dir
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="error",
    show_default=True,
    help="With --app; warning shows the traceback of each failure.",
)
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS, or the setting of the app")
@options.as_json("how it ended")
def replay(
    topic: str,
    *,
    selection: Selection,
    to_topic: bool,
    target: str | None,
    limit: int | None,
    again: bool,
    dry_run: bool,
    timestamps: Timestamps | None,
    app_dir: str,
    log_level: str,
    bootstrap_servers: str | None,
    as_json: bool,
) -> int:
    """Send the dead letters of TOPIC back, or process them here.

    What is done is noted with the brokers, as committed offsets of the group aioshard-dlt.TOPIC, so that a second run
    leaves it out. A record that is sent back comes behind newer ones of its key, and to every group that reads its
    topic. Exits with 3 when some failed.
    """
    make_destination: MakeDestination
    if target is None:
        settings = settings_of(bootstrap_servers)
        make_destination = functools.partial(_to_topic, settings, timestamps)
    else:
        if to_topic or timestamps is not None:
            raise click.UsageError("--app sends nothing: leave out --to-topic and --timestamp")
        app = _load(target, app_dir, bootstrap_servers, log_level)
        if selection.group not in {None, app.group_id}:
            raise click.UsageError(
                f"--group {selection.group} was given, and the handlers of --app {target} belong to {app.group_id!r}"
            )
        selection = selection._replace(group=app.group_id)
        settings = app.settings
        make_destination = functools.partial(_through_handlers, app)
    replaying = _Replaying(topic, selection, limit=limit, again=again, dry_run=dry_run)
    try:
        run(replaying.run(settings, make_destination))
    except (AioshardError, KeyboardInterrupt) as error:
        replaying.report(error, as_json=as_json)
        raise
    replaying.report(None, as_json=as_json)
    return _FAILED if replaying.failed else 0


def _load(target: str, app_dir: str, bootstrap_servers: str | None, log_level: str) -> "App":
    from aioshard.cli.loading import load_app  # noqa: PLC0415 - imported on use

    logs.configure(log_level)
    app = load_app(target, app_dir)
    if bootstrap_servers is not None:
        app.configure(bootstrap_servers=bootstrap_servers)
    app.settings.require_bootstrap_servers()
    return app


MakeDestination = Callable[[SideTopic], AbstractAsyncContextManager[Destination]]


@contextlib.asynccontextmanager
async def _to_topic(settings: Settings, timestamps: Timestamps | None, side: SideTopic) -> AsyncIterator[Destination]:
    producer = KafkaProducer(settings)
    try:
        yield ToTopic(side.administration, producer, timestamps)
    finally:
        await producer.close()


@contextlib.asynccontextmanager
async def _through_handlers(app: "App", _: SideTopic) -> AsyncIterator[Destination]:
    from aioshard.cli.in_place import ThroughHandlers  # noqa: PLC0415 - imports the test kit

    yield ThroughHandlers(app)


class _Replaying:
    """One run over the dead letters of a topic."""

    def __init__(self, topic: str, selection: Selection, *, limit: int | None, again: bool, dry_run: bool) -> None:
        self.failed: list[tuple[Letter, str]] = []
        self._topic = topic
        self._selection = selection
        self._limit = limit
        self._again = again
        self._dry_run = dry_run
        self._verb = ""
        self._done: Counter[str] = Counter()
        """Of each topic; in a dry run, what would be done."""
        self._done_before = 0
        self._duplicates = 0
        self._taken: dict[Coordinates, bool] = {}
        """The records that this run came upon, and whether they are done."""
        self._chunk: dict[Coordinates, list[Letter]] = {}
        """What comes next: usually one dead letter for each record."""

    async def run(self, settings: Settings, make_destination: MakeDestination) -> None:
        """Read the topic and have the destination do with its dead letters what it does."""
        async with opened(settings, self._topic, self._selection.partitions) as side:
            letters = DeadLetters(side, self._selection)
            await letters.look_up_notes()
            async with make_destination(side) as destination:
                self._verb = destination.verb
                async with Progress(f"replaying {self._topic}", self._done.total, note=lambda: letters.share):
                    await self._replay(letters, destination)

    async def _replay(self, letters: DeadLetters, destination: Destination) -> None:
        size = 0
        async for letter in letters.letters(from_notes=not self._again):
            if not self._take(letter):
                continue
            size += record_size(letter.original.key, letter.original.value, letter.original.headers)
            if len(self._taken) == self._limit:
                break
            if len(self._chunk) >= destination.most_records or size >= destination.most_bytes:
                await self._process(letters, destination)
                size = 0
        await self._process(letters, destination)

    def _take(self, letter: Letter) -> bool:
        """Put a dead letter where it belongs; returns whether its record is a new one."""
        if letter.done and not self._again:
            self._done_before += 1
            return False
        coordinates = Coordinates.of(letter.original)
        if coordinates not in self._taken:
            self._taken[coordinates] = False
            self._chunk[coordinates] = [letter]
            return True
        # The same record again: its handler failed, and the process ended before that was committed.
        self._duplicates += 1
        if coordinates in self._chunk or self._taken[coordinates]:
            self._chunk.setdefault(coordinates, []).append(letter)
        return False

    async def _process(self, letters: DeadLetters, destination: Destination) -> None:
        """Have what is collected done, and note what is."""
        chunk = dict(self._chunk)
        self._chunk.clear()
        due = sorted((one[0] for at, one in chunk.items() if not self._taken[at]), key=lambda one: one.original[:3])
        await destination.check(due)
        if self._dry_run:
            self._done.update(letter.original.topic for letter in due)
            return
        letters.check_notes(letter for same in chunk.values() for letter in same)
        outcome = Outcome()
        try:
            if due:
                await destination.process(due, outcome)
        finally:
            for letter in outcome.done:
                self._taken[Coordinates.of(letter.original)] = True
                self._done[letter.original.topic] += 1
            self.failed += [(letter, outcome.failed[at]) for letter in due if (at := _at(letter)) in outcome.failed]
            done = [letter for at, same in chunk.items() if self._taken[at] for letter in same]
            # Also when it is interrupted just now: what was sent and is not noted would be sent again.
            await finish(letters.note(done), "note what is done")

    # The end --------------------------------------------------------------------------

    def report(self, error: BaseException | None, *, as_json: bool) -> None:
        """Tell what was done; on standard error when it did not come to its end."""
        if as_json:
            click.echo(json.dumps(self._as_json(error)))
        elif self._verb:
            for line in self._told():
                click.echo(line, err=error is not None)
        for letter, why in self.failed[:_SHOWN]:
            click.echo(f"Failed: {_at(letter)} (dead letter {letter.at}): {why}", err=True)
        if len(self.failed) > _SHOWN:
            click.echo(f"Failed: {len(self.failed) - _SHOWN} more; --json names them all", err=True)

    def _told(self) -> Iterator[str]:
        of_topics = (
            f": {', '.join(f'{topic} {count}' for topic, count in self._done.most_common())}" if self._done else ""
        )
        would = "would be" if self._dry_run else "were"
        yield f"{self._done.total()} dead letter(s) {would} {self._verb}{of_topics}"
        if self._duplicates:
            yield f"{self._duplicates} more are of the same records: each record counts once"
        if self._done_before:
            yield f"{self._done_before} are done since an earlier run and were left out; --again takes them too"

    def _as_json(self, error: BaseException | None) -> dict[str, Any]:
        return {
            "topic": self._topic,
            "dry_run": self._dry_run,
            "done": dict(self._done),
            "duplicates": self._duplicates,
            "done_before": self._done_before,
            "failed": [
                {"record": str(_at(letter)), "dead_letter": str(letter.at), "error": why} for letter, why in self.failed
            ],
            "error": None if error is None else str(error) or type(error).__name__,
        }


def _at(letter: Letter) -> Coordinates:
    return Coordinates.of(letter.original)
