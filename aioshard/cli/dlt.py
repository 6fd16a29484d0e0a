"""`aioshard dlt`: dead letters, shown and replayed."""

import asyncio
import dataclasses
import functools
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.brokers import opened, run, settings_of
from aioshard.cli.loading import load_app
from aioshard.cli.output import (
    UNHEALTHY,
    as_json_value,
    as_text,
    bytes_as_text,
    cut,
    moment_as_text,
    part_as_text,
    print_json,
    print_result,
    progress,
    table,
)
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import beyond, holds, joined
from aioshard.core.offsets import OffsetTracker
from aioshard.core.sharding import identity
from aioshard.engine.control import halted_of
from aioshard.engine.epoch import Delivery
from aioshard.engine.handler import Completed
from aioshard.engine.tasks import finish
from aioshard.errors import (
    AioshardError,
    AuthorizationError,
    HaltedError,
    TransportError,
)
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.memory.broker import InMemoryBroker
from aioshard.kafka.memory.side_topics import InMemorySideTopics
from aioshard.kafka.memory.transport import InMemoryTransport
from aioshard.kafka.producer import KafkaProducer
from aioshard.kafka.side_topics import TopicReader
from aioshard.ports import Committed, Producer, record_size
from aioshard.records import Record, TopicPartition, counted
from aioshard.serde import side_records
from aioshard.serde.side_records import Coordinates, DeadLetterRecord, Failure, read_dead_letter
from aioshard.settings import Settings
from aioshard.telemetry import logs

Finished = Callable[["Letter", str | None], None]
"""Called for each dead letter: with None if it was replayed, otherwise with the reason why not."""

_SHARES = 100
"""A partition with a halted record may hold one share of the bounds of the buffer."""
_SHOWN = 20
"""Maximum number of failures that are printed."""


def progress_group(topic: str) -> str:
    """Return the group whose committed offsets store which dead letters of a topic are done."""
    return f"aioshard-dlt.{topic}"


class Letter(NamedTuple):
    """A selected dead letter."""

    at: Coordinates
    """Its position in the dead-letter topic."""
    original: Record
    failure: Failure
    done: bool
    """Whether it was replayed before."""

    @property
    def source(self) -> Coordinates:
        """The position of the original record."""
        return Coordinates.of(self.original)


# Reading, and the stored progress ------------------------------------------------------


class ReplayedOffsets:
    """Tracks which dead letters of one partition are done; fed with their offsets in order.

    Stored like an app's progress: an offset below which all are done, and the finished offsets above it.

    Example:
        >>> replayed = ReplayedOffsets(None)
        >>> for offset in (3, 5, 6, 9):
        ...     replayed.add(offset)
        >>> replayed.finish(6)
        >>> replayed.finish(3)
        >>> again = ReplayedOffsets(replayed.commit())
        >>> [offset for offset in (3, 5, 6, 9) if again.is_done(offset)]
        [3, 6]
    """

    def __init__(self, committed: Committed | None) -> None:
        self.start, metadata = committed or Committed(0, "")
        """All offsets below are done, as of the last commit."""
        self.fits = True
        """Whether the last commit contains all finished offsets; brokers store a limited number."""
        self._finished = CommitMetadata.read(metadata, self.start).finished
        """Finished offsets as of the last commit."""
        self._tracker = OffsetTracker[int](self.start)

    def is_done(self, offset: int) -> bool:
        """Return whether the dead letter at *offset* is done."""
        if offset < self._tracker.position:
            return offset not in self._tracker.incomplete
        return holds(self._finished, offset)

    def add(self, offset: int) -> None:
        """Add the next dead letter."""
        if offset >= self._tracker.position:
            due = [] if self.is_done(offset) else [offset]
            self._tracker.track(due, due, offset + 1)

    def finish(self, offset: int) -> None:
        """Mark a dead letter as done; nothing happens if it already is."""
        self._tracker.incomplete.pop(offset, None)

    def commit(self) -> Committed:
        """Return what to commit."""
        self.start = self._tracker.committable
        self._finished = tuple(joined([*self._tracker.finished(), *beyond(self._finished, self._tracker.position)]))
        text = CommitMetadata(finished=self._finished).text(self.start)
        self.fits = CommitMetadata.read(text, self.start).finished == self._finished
        return Committed(self.start, text)


class DeadLetters:
    """Reads the dead letters of an open topic, and stores which ones were replayed. Owned by one command."""

    def __init__(self, administration: KafkaAdmin, reader: TopicReader, selection: options.Selection) -> None:
        self.read = 0
        """Number of dead letters read."""
        self.others = 0
        """Number of other records."""
        self._administration = administration
        self._reader = reader
        self._selection = selection
        self._replayed = {number: ReplayedOffsets(None) for number in reader.ranges}

    async def fetch_progress(self) -> None:
        """Fetch the progress of earlier replays. Progress beyond the end belongs to a deleted topic.

        Raises:
            AuthorizationError: This user may not read with the group of the progress.
        """
        topic = self._reader.topic
        ranges = self._reader.ranges
        commits = await self._administration.group_commits(
            progress_group(topic), [TopicPartition(topic, number) for number in ranges]
        )
        for (_, number), committed in commits.items():
            if committed is not None and committed.offset <= ranges[number].end:
                self._replayed[number] = ReplayedOffsets(committed)

    async def letters(self, *, skip_done: bool = False) -> AsyncIterator[Letter]:
        """Yield the selected dead letters, in offset order for each partition of their topic.

        Args:
            skip_done: Whether to leave out those that are done.
        """
        start = {number: replayed.start if skip_done else 0 for number, replayed in self._replayed.items()}
        async for records in self._reader.read(start):
            for record in records:
                if (dead_letter := read_dead_letter(record)) is None:
                    self.others += 1
                    continue
                self.read += 1
                replayed = self._replayed[record.partition]
                replayed.add(record.offset)
                done = replayed.is_done(record.offset)
                if not (skip_done and done) and self._selection.takes(*dead_letter):
                    yield Letter(Coordinates.of(record), *dead_letter, done)

    async def store_progress(self, done: Sequence[Letter]) -> None:
        """Store in the brokers that dead letters are done.

        Raises:
            TransportError: The progress was not stored, or has too many offsets for the brokers to store.
        """
        if not done:
            return
        topic = self._reader.topic
        partitions = {letter.at.partition for letter in done}
        for letter in done:
            self._replayed[letter.at.partition].finish(letter.at.offset)
        offsets = {TopicPartition(topic, number): self._replayed[number].commit() for number in partitions}
        await self._administration.commit_without_member(progress_group(topic), offsets, retry=True)
        for number in partitions:
            if not self._replayed[number].fits:
                raise TransportError(
                    f"the finished dead letters of {topic}/{number} are too scattered: brokers cannot store all "
                    "their offsets, and the next run will replay the latest ones again. Replay older ones without "
                    "filters first"
                )


# show ---------------------------------------------------------------------------------


@click.group(cls=options.OrderedGroup)
def command() -> None:
    """Show and replay dead letters."""


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
def show(
    topic: str, *, selection: options.Selection, limit: int | None, bootstrap_servers: str | None, as_json: bool
) -> None:
    """Show the dead letters of TOPIC.

    Reads from the start of TOPIC to its current end, and commits nothing. Keys, values and messages are printed as
    they are in the topic, cut to a line; --json prints all of them.
    """
    most = options.ROWS if limit is None and not as_json else limit
    newest, summary, others = run(_show(settings_of(bootstrap_servers), topic, selection, most))
    content = {
        "topic": topic,
        "dead_letters": [_object(letter) for letter in newest],
        "summary": summary | {"other_records": others},
    }
    print_result(content, _lines_of(topic, newest, summary, others), as_json=as_json)


def _lines_of(topic: str, newest: Sequence[Letter], summary: dict[str, Any], others: int) -> Iterator[str]:
    selected = part_as_text(summary["selected"], summary["dead_letters"], "dead letter")
    done = "" if summary["replayed"] is None else f", {summary['replayed']} of them already replayed"
    yield f"{selected} in {topic}{done}"
    if others:
        yield f"{counted(others, 'other record')} in {topic}"
    if summary["selected"]:
        first, last = (moment_as_text(summary[name]) for name in ("first_failed_at", "last_failed_at"))
        yield f"  failed: {first} to {last}"
    for name in ("errors", "handlers", "topics"):
        if counts := summary[name]:
            listed = [f"{as_text(value)} {count}" for value, count in counts.most_common()]
            yield f"  {name}: {', '.join(listed)}"
    if newest:
        yield from ["", *table(_HEADINGS, map(_cells, newest))]
        if len(newest) < summary["selected"]:
            yield f"\n{summary['selected'] - len(newest)} older ones are not shown: --limit shows more"


async def _show(
    settings: Settings, topic: str, selection: options.Selection, limit: int | None
) -> tuple[list[Letter], dict[str, Any], int]:
    """Return the newest dead letters, figures about all selected ones, and the number of other records."""
    errors = Counter[str]()
    handlers = Counter[str]()
    topics = Counter[str]()
    newest: list[tuple[float, int, Letter]] = []
    failed_at: list[float] = []
    replayed = 0
    progress_known = True
    async with opened(settings, topic, selection.partitions) as (administration, reader):
        dead_letters = DeadLetters(administration, reader, selection)
        try:
            await dead_letters.fetch_progress()
        except AuthorizationError as error:
            progress_known = False
            click.echo(f"Cannot show which dead letters were replayed: {error}", err=True)
        async with progress(f"reading {topic}", lambda: dead_letters.read):
            async for letter in dead_letters.letters():
                replayed += letter.done
                errors[letter.failure.error] += 1
                handlers[letter.failure.handler] += 1
                topics[letter.original.topic] += 1
                failed_at.append(letter.failure.failed_at)
                heapq.heappush(newest, (letter.failure.failed_at, len(failed_at), letter))
                if limit is not None and len(newest) > limit:
                    heapq.heappop(newest)
    summary: dict[str, Any] = {
        "selected": len(failed_at),
        "dead_letters": dead_letters.read,
        "replayed": replayed if progress_known else None,
        "first_failed_at": min(failed_at, default=None),
        "last_failed_at": max(failed_at, default=None),
        "errors": errors,
        "handlers": handlers,
        "topics": topics,
    }
    return [letter for _, _, letter in sorted(newest)], summary, dead_letters.others


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


def _object(letter: Letter) -> dict[str, Any]:
    original = letter.original
    return {
        "partition": letter.at.partition,
        "offset": letter.at.offset,
        "replayed": letter.done,
        "record": {
            **letter.source._asdict(),
            "timestamp": original.timestamp,
            "key": as_json_value(original.key),
            "value": as_json_value(original.value),
            "headers": [[name, as_json_value(value)] for name, value in original.headers],
        },
        **letter.failure._asdict(),
    }


# replay -------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class ToTopic:
    """Publishes dead letters as the original records. Used by one command.

    Invariants:
        * A dead letter is done only when the brokers have acknowledged its record.
    """

    verb = "sent back"
    """For messages: dead letters were …"""
    most_records = 1000
    """Maximum number to replay together; if the command is killed, the next run replays them again."""
    most_bytes = 32 * 1024 * 1024

    administration: KafkaAdmin
    """Describes the topics."""
    producer: Producer
    """Idempotent; closed by the caller."""
    keep_time: bool
    """Whether records keep their timestamps."""

    async def process(self, letters: Sequence[Letter], finished: Finished) -> None:
        """Send dead letters, those of one partition in this order, until each is acknowledged.

        Raises:
            TransportError: A topic does not exist, or some were not acknowledged, for a transient reason or one that
                concerns all.
        """
        partitions = {
            topic: await self.administration.partitions(topic)
            for topic in {letter.original.topic for letter in letters}
        }

        async def send(letter: Letter) -> None:
            original = letter.original
            # To the original partition: another partitioner may have been used for the key.
            partition = original.partition if original.partition in partitions[original.topic] else None
            timestamp = original.timestamp if self.keep_time and original.timestamp >= 0 else None
            dead = DeadLetterRecord(original, letter.failure)
            await self.producer.publish(side_records.replay(dead, letter.at, partition=partition, timestamp=timestamp))
            finished(letter, None)

        answers = await asyncio.gather(*map(send, letters), return_exceptions=True)
        for letter, answer in zip(letters, answers, strict=True):
            if answer is None:
                continue
            if getattr(answer, "retriable", True) or isinstance(answer, AuthorizationError):
                raise answer
            finished(letter, str(answer))


class ThroughHandlers:
    """Runs the app's handlers on dead letters in this process. Used by one command.

    The app is the real one, with its retries, timeouts, batches, limits and resources, and its messages are
    published. Only its input comes from here, and a record that fails again stays a dead letter.

    Invariants:
        * Dead letters of one shard key run in offset order; after a failure, the later ones do not run.
    """

    verb = "processed"
    most_records = 10_000
    most_bytes = 64 * 1024 * 1024

    def __init__(self, app: App) -> None:
        """Create a destination; *app* starts at the earliest record from now on, and without a journal."""
        # A failed record must not keep the others of its partition from being read.
        app.configure(
            auto_offset_reset="earliest",
            journal=None,
            max_buffered_records=_SHARES * self.most_records,
            max_buffered_bytes=_SHARES * self.most_bytes,
        )
        self._app = app
        self._blocked: set[object] = set()
        """Handlers and shard keys of failed records."""

    async def process(self, letters: Sequence[Letter], finished: Finished) -> None:
        """Process dead letters of different records.

        Raises:
            UsageError: The app has no handler for a dead letter.
            AioshardError: The app cannot start or continue.
        """
        keys = {letter.source: self._key(letter.original) for letter in letters}
        remaining = {letter.source: letter for letter in letters}
        runnable = [letter.original for letter in letters if keys[letter.source] not in self._blocked]

        def completed(delivery: Delivery) -> None:
            finished(remaining.pop(Coordinates.of(delivery.record)), None)

        if runnable:
            failed = {Coordinates.of(delivery.record): delivery for delivery in await self._run(runnable, completed)}
            for source, delivery in sorted(failed.items()):
                self._blocked.add(keys[source])
                finished(remaining.pop(source), f"{delivery.failure} ({counted(delivery.failures, 'attempt')})")
        for letter in remaining.values():
            finished(letter, "an older dead letter of its key failed")

    async def _run(self, records: Sequence[Record], completed: Completed) -> Sequence[Delivery]:
        """Run the handlers on records, and return those that failed; the later ones of their keys do not run."""
        app = self._app
        broker = InMemoryBroker(partitions=max(record.partition for record in records) + 1)
        broker.restore(records)
        async with app.started(
            functools.partial(InMemoryTransport, broker, app.group_id, isolation_level="read_committed"),
            lambda: KafkaProducer(app.settings),
            lambda: InMemorySideTopics(broker),
            adapt=lambda handler: handler.for_history()._replace(on_failure="halt", shards=None),
            observe=lambda _: completed,
        ):
            try:
                await app.serve(until_caught_up=True)
            except HaltedError:
                return halted_of(app.running_engine())
            return []

    def _key(self, record: Record) -> object:
        """Return the handler and the shard key of a record; the record itself if it has none."""
        for handler in self._app.handlers:
            if handler.takes(record.topic):
                key = identity(handler.shard_key, record)
                return Coordinates.of(record) if key is None else (handler.name, key)
        raise click.UsageError(
            f"the app has no handler for topic {record.topic!r}: exclude its dead letters with --topic or --handler"
        )


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
    selection: options.Selection,
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
        if selection.group not in {None, app.group_id}:
            raise click.UsageError(
                f"--group {selection.group} was given, but the handlers of --app {target} belong to {app.group_id!r}"
            )
        selection = selection._replace(group=app.group_id)
    replaying = _Replaying(topic=topic, selection=selection, limit=limit, again=again)
    try:
        run(replaying.run(settings, app, keep_time=timestamp == "original"))
    except (AioshardError, KeyboardInterrupt) as error:
        replaying.report(error, as_json=as_json)
        raise
    replaying.report(None, as_json=as_json)
    return UNHEALTHY if replaying.failed else 0


@dataclasses.dataclass(slots=True, kw_only=True)
class _Replaying:
    """One run over the dead letters of a topic."""

    topic: str
    selection: options.Selection
    limit: int | None
    again: bool
    destination: ToTopic | ThroughHandlers | None = None
    """Set once the progress of earlier runs is known."""
    done: Counter[str] = dataclasses.field(default_factory=Counter)
    """By topic."""
    failed: list[tuple[Letter, str]] = dataclasses.field(default_factory=list)
    records: dict[Coordinates, bool] = dataclasses.field(default_factory=dict)
    """The records of this run, and whether they are done."""

    async def run(self, settings: Settings, app: App | None, *, keep_time: bool) -> None:
        """Read the topic and replay its dead letters in chunks, through *app* or to their topics."""
        producer = KafkaProducer(settings)  # connects on use
        try:
            async with opened(settings, self.topic, self.selection.partitions) as (administration, reader):
                dead_letters = DeadLetters(administration, reader, self.selection)
                await dead_letters.fetch_progress()
                self.destination = ToTopic(administration, producer, keep_time) if app is None else ThroughHandlers(app)
                async with progress(f"replaying {self.topic}", self.done.total):
                    await self._replay(dead_letters, self.destination)
        finally:
            await producer.close()

    async def _replay(self, dead_letters: DeadLetters, destination: ToTopic | ThroughHandlers) -> None:
        chunk: list[Letter] = []
        size = 0
        async for letter in dead_letters.letters(skip_done=not self.again):
            chunk.append(letter)
            if letter.source in self.records:
                continue  # the app was killed between the dead letter and the commit
            self.records[letter.source] = False
            size += record_size(letter.original.key, letter.original.value, letter.original.headers)
            if len(self.records) == self.limit:
                break
            if len(chunk) >= destination.most_records or size >= destination.most_bytes:
                await self._process(dead_letters, destination, chunk)
                chunk = []
                size = 0
        await self._process(dead_letters, destination, chunk)

    async def _process(
        self, dead_letters: DeadLetters, destination: ToTopic | ThroughHandlers, letters: Sequence[Letter]
    ) -> None:
        """Replay dead letters, the first one of each record, and store which ones are done."""
        due = {letter.source: letter for letter in reversed(letters) if not self.records[letter.source]}
        try:
            if due:
                await destination.process([due[source] for source in sorted(due)], self._finished)
        finally:
            done = [letter for letter in letters if self.records[letter.source]]
            # Even if interrupted: otherwise the next run would replay these again.
            await finish(dead_letters.store_progress(done), "store the progress")

    def _finished(self, letter: Letter, why: str | None) -> None:
        if why is None:
            self.records[letter.source] = True
            self.done[letter.original.topic] += 1
        else:
            self.failed.append((letter, why))

    def report(self, error: BaseException | None, *, as_json: bool) -> None:
        """Print the result; on standard error if the run was cut short."""
        if as_json:
            failed = [
                {"record": str(letter.source), "dead_letter": str(letter.at), "error": why}
                for letter, why in self.failed
            ]
            reason = None if error is None else str(error) or type(error).__name__
            print_json({"topic": self.topic, "done": self.done, "failed": failed, "error": reason})
        elif self.destination is not None:
            total = self.done.total()
            topics = ", ".join(f"{topic} {count}" for topic, count in self.done.most_common())
            auxiliary = "was" if total == 1 else "were"
            result = f"{counted(total, 'dead letter')} {auxiliary} {self.destination.verb}"
            click.echo(f"{result}: {topics}" if topics else result, err=error is not None)
        for letter, why in self.failed[:_SHOWN]:
            click.echo(f"Failed: {letter.source} (dead letter {letter.at}): {why}", err=True)
        if len(self.failed) > _SHOWN:
            click.echo(f"Failed: {len(self.failed) - _SHOWN} more; --json names all of them", err=True)
