"""`aioshard dlt`: the dead letters of a topic."""

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import functools
import heapq
import json
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.groups import InOrder
from aioshard.cli.progress import Progress
from aioshard.cli.selection import Selection, filters
from aioshard.cli.sides import SideTopic, opened, run, settings_of, topic_argument
from aioshard.cli.tables import as_json_value, as_text, bytes_as_text, cut, moment_as_text, print_table
from aioshard.core.offsets import OffsetTracker
from aioshard.core.recourse import DeadLetter
from aioshard.core.sharding import identity
from aioshard.engine.handler import HandlerSpec, records_of
from aioshard.engine.tasks import finish
from aioshard.errors import AioshardError, AuthorizationError, BatchError, MessageTooLargeError, TransportError
from aioshard.kafka.administration import Administration
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Committed, Message, Producer, record_size
from aioshard.records import Record
from aioshard.serde import side_records
from aioshard.serde.side_records import Coordinates, DeadLetterRecord, Failure, read_dead_letter
from aioshard.settings import Settings
from aioshard.telemetry import logs
from aioshard.testing import InMemoryBroker, InMemorySideTopics
from aioshard.testing.transport import InMemoryTransport

if TYPE_CHECKING:
    from aioshard.app import App

__all__ = [
    "LONGEST_NOTE",
    "DeadLetters",
    "Destination",
    "Letter",
    "NoteTooLongError",
    "Outcome",
    "Replayed",
    "SwallowedError",
    "ThroughHandlers",
    "Timestamps",
    "ToTopic",
    "WaitsBehindError",
    "command",
    "note_group",
    "replay",
    "show",
]

LONGEST_NOTE = 4000
"""Characters of the text; brokers store 4,096 bytes (`offset.metadata.max.bytes`)."""

_MARK = "aioshard-dlt/1 "
_MOST_BYTES = 1 << 24
"""What the text of a note may grow to, unpacked; ours stay far below."""


def note_group(topic: str) -> str:
    """The group whose committed offsets say what of a dead-letter topic is done."""
    return f"aioshard-dlt.{topic}"


class NoteTooLongError(Exception):
    """What is done is so scattered that it does not fit in a note."""


class Replayed:
    """What of one partition is done, and what is not; fed with its dead letters in offset order.

    Example:
        >>> replayed = Replayed(None)
        >>> for offset in (3, 5, 6, 9):
        ...     replayed.meet(offset)
        >>> replayed.finish(6)
        >>> replayed.below(position=12), replayed.is_done(6), replayed.is_done(5)
        (3, True, False)
        >>> replayed.finish(3)
        >>> again = Replayed(replayed.note(position=12))
        >>> [offset for offset in (3, 5, 6, 9) if again.is_done(offset)]
        [3, 6]
    """

    def __init__(self, note: Committed | None) -> None:
        """Make what a note says.

        Args:
            note: None where there is none. A text that is not ours, as after a reset of the group's offsets by hand,
                is left out; the offset counts.
        """
        self.start = 0 if note is None else note.offset
        """Everything below it is done, as of the last note; reading may begin here."""
        self._done = set() if note is None else _unpacked(note)
        self._tracker: OffsetTracker[None] = OffsetTracker(self.start)

    def is_done(self, offset: int) -> bool:
        """Whether the dead letter at *offset* was noted or has been finished."""
        return offset < self.start or offset in self._done

    def meet(self, offset: int) -> None:
        """Take note that there is a dead letter at *offset*; offsets come in order."""
        if not self.is_done(offset):
            self._tracker.track([offset], [None], offset + 1)

    def finish(self, offset: int) -> None:
        """Take note that the dead letter at *offset*, which was met, is done."""
        self._tracker.complete(offset)
        self._done.add(offset)

    def below(self, position: int) -> int:
        """The offset below which everything is done.

        Args:
            position: Up to where the partition was read.
        """
        return self._tracker.committable if len(self._tracker) else max(position, self._tracker.position)

    def note(self, position: int, *, soon: Iterable[int] = ()) -> Committed:
        """What is to be committed.

        Args:
            position: Up to where the partition was read.
            soon: Offsets to count as done as well: does it fit once they are?

        Raises:
            NoteTooLongError: It does not fit.
        """
        below = self.start = self.below(position)
        self._done = {offset for offset in self._done if offset >= below}
        text = _packed(below, {*self._done, *(offset for offset in soon if offset >= below)})
        if len(text) > LONGEST_NOTE:
            raise NoteTooLongError
        return Committed(below, text)


def _packed(base: int, offsets: set[int]) -> str:
    if not offsets:
        return ""
    bits = bytearray((max(offsets) - base) // 8 + 1)
    for offset in offsets:
        bits[(offset - base) // 8] |= 1 << (offset - base) % 8
    return _MARK + base64.b85encode(zlib.compress(bytes(bits), 9)).decode()


def _unpacked(note: Committed) -> set[int]:
    if not note.metadata.startswith(_MARK):
        return set()
    unpacking = zlib.decompressobj()
    try:
        bits = unpacking.decompress(base64.b85decode(note.metadata.removeprefix(_MARK)), _MOST_BYTES)
    except (ValueError, binascii.Error, zlib.error):
        return set()
    return {note.offset + at * 8 + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1}


_FOR_GOOD = 10 * 365 * 86_400.0
"""Seconds that a note is kept. Without saying so, a broker forgets those of a group that nobody is in after a week."""


class Letter(NamedTuple):
    """A dead letter that a command is about."""

    at: Coordinates
    """Where it is in the dead-letter topic."""
    original: Record
    failure: Failure
    done: bool
    """Whether it is noted as sent back or processed."""


class Outcome:
    """What became of dead letters; whoever processes them adds to it."""

    def __init__(self) -> None:
        self.done: list[Letter] = []
        self.failed: dict[Coordinates, str] = {}
        """Why not, by the coordinates of the record."""


class Destination(Protocol):
    """Where dead letters are sent to, or processed."""

    verb: str
    """What becomes of them there, as in "were sent back"."""
    most_records: int
    """How many it takes at once; what it was given when the command is killed, the next run gives it again."""
    most_bytes: int

    async def check(self, letters: Sequence[Letter]) -> None:
        """Refuse what cannot arrive, before any of it is sent.

        Raises:
            AioshardError: Some of it cannot.
        """

    async def process(self, letters: Sequence[Letter], outcome: Outcome) -> None:
        """Send or process dead letters; *outcome* gets each as it is known, also when this raises or is cancelled.

        Raises:
            AioshardError: It cannot go on.
        """


class DeadLetters:
    """Reads the dead letters of an open topic. Owned by one command.

    Invariants:
        * `position` of a partition is one past the last record that was given out, or passed over.
    """

    def __init__(self, side: SideTopic, selection: Selection) -> None:
        """Make a reading.

        Args:
            side: The open topic.
            selection: Which of its dead letters are given out.
        """
        self.read = 0
        """Dead letters that were met."""
        self.strange = 0
        """Records that are no dead letters."""
        self.notes: dict[int, Replayed] = {number: Replayed(None) for number in side.partitions}
        self._side = side
        self._selection = selection
        self._positions = {number: bounds.start for number, bounds in side.reader.ranges.items()}
        self._begin = dict(self._positions)
        self._group = note_group(side.name)

    async def look_up_notes(self) -> None:
        """Ask the brokers what is noted.

        Raises:
            AuthorizationError: We may not read with the group of the notes.
        """
        side = self._side
        found = await side.administration.committed(self._group, side.name, side.partitions)
        for number, bounds in side.reader.ranges.items():
            noted = found.get(number)
            if noted is not None and noted.offset > bounds.end:
                click.echo(
                    f"What is noted of {side.name}/{number} is about offsets up to {noted.offset}, past its end "
                    f"{bounds.end}: the topic was created anew, so that is left out",
                    err=True,
                )
                noted = None
            self.notes[number] = Replayed(noted)

    async def letters(self, *, from_notes: bool = False) -> AsyncIterator[Letter]:
        """Those selected, in offset order for each partition of the dead-letter topic.

        Args:
            from_notes: Whether to leave out what is below the offset up to which everything is done.
        """
        if from_notes:
            self._begin = {number: max(at, self.notes[number].start) for number, at in self._begin.items()}
            self._positions = dict(self._begin)
        async for records in self._side.reader.read(self._begin):
            for record in records:
                letter = self._take_in(record)
                if letter is not None:
                    yield letter
        # Whatever is behind the last record, such as the marker of a transaction, is no dead letter.
        self._positions = {number: bounds.end for number, bounds in self._side.reader.ranges.items()}

    def _take_in(self, record: Record) -> Letter | None:
        letter = read_dead_letter(record)
        self._positions[record.partition] = record.offset + 1
        if letter is None:
            self.strange += 1
            return None
        self.read += 1
        noted = self.notes[record.partition]
        noted.meet(record.offset)
        if not self._selection.takes(*letter):
            return None
        return Letter(Coordinates.of(record), *letter, noted.is_done(record.offset))

    @property
    def share(self) -> str:
        """How much of the topic was read, in per cent."""
        total = sum(bounds.end - self._begin[number] for number, bounds in self._side.reader.ranges.items())
        passed = sum(at - self._begin[number] for number, at in self._positions.items())
        return f"{100 * passed // total} % read" if total > 0 else ""

    def position(self, partition: int) -> int:
        """Up to where a partition was read."""
        return self._positions[partition]

    def check_notes(self, letters: Iterable[Letter]) -> None:
        """Refuse dead letters that cannot be noted once they are done.

        Raises:
            TransportError: What is done would be too scattered.
        """
        soon: dict[int, list[int]] = defaultdict(list)
        for letter in letters:
            soon[letter.at.partition].append(letter.at.offset)
        for partition, offsets in soon.items():
            try:
                self.notes[partition].note(self.position(partition), soon=offsets)
            except NoteTooLongError:
                raise TransportError(
                    f"which dead letters of {self._side.name}/{partition} are done would not fit in what a broker "
                    f"stores for a group ({LONGEST_NOTE} characters), so a later run would send some of them again: "
                    "first replay what is older without filters"
                ) from None

    async def note(self, done: Iterable[Letter]) -> None:
        """Have the brokers keep that dead letters are done.

        Raises:
            TransportError: They did not.
        """
        touched = set()
        for letter in done:
            noted = self.notes[letter.at.partition]
            if not noted.is_done(letter.at.offset):
                noted.finish(letter.at.offset)
                touched.add(letter.at.partition)
        if not touched:
            return
        side = self._side
        due = {number: self.notes[number].note(self.position(number)) for number in touched}
        await side.administration.commit(self._group, side.name, due, retention=_FOR_GOOD)


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


Timestamps = Literal["original", "now"]

_DECIDES_ON_AGE = ("cleanup.policy", "retention.ms", "message.timestamp.type")


class ToTopic:
    """Publishes dead letters as the records that they were; implements `Destination`. Used by one command.

    Invariants:
        * A dead letter is done when the brokers have acknowledged its record, and not before.
    """

    verb = "sent back"
    most_records = 1000
    most_bytes = 32 * 1024 * 1024

    def __init__(self, administration: Administration, producer: Producer, timestamps: Timestamps | None) -> None:
        """Make a destination.

        Args:
            administration: Tells which topics there are, and how long they keep records.
            producer: Idempotent; whoever gives it closes it.
            timestamps: None is the original ones, unless the topic would delete records of that age at once.
        """
        self._administration = administration
        self._producer = producer
        self._timestamps = timestamps
        self._partitions: dict[str, frozenset[int]] = {}
        self._retention: dict[str, float | None] = {}

    async def check(self, letters: Sequence[Letter]) -> None:
        """Refuse what cannot arrive, before any of it is sent.

        Raises:
            TransportError: A topic does not exist, or would delete records of that age before anybody reads them.
        """
        by_topic: dict[str, list[Letter]] = defaultdict(list)
        for letter in letters:
            by_topic[letter.original.topic].append(letter)
        for topic, own in by_topic.items():
            if topic not in self._partitions:
                self._partitions[topic] = await self._administration.partitions(topic)
                self._retention[topic] = await self._kept_for(topic) if self._timestamps is None else None
            self._check_age(topic, own)

    async def _kept_for(self, topic: str) -> float | None:
        """Seconds after which the topic deletes a record, counted from its timestamp; None is never."""
        try:
            settings = await self._administration.topic_settings(topic, _DECIDES_ON_AGE)
        except TransportError as error:
            click.echo(
                f"Whether topic {topic!r} keeps records of this age is not known: {error}. What is older than its "
                "retention.ms would be deleted unread; --timestamp now sends with the time of now",
                err=True,
            )
            return None
        retention = float(settings.get("retention.ms", "-1")) / 1000
        by_age = "delete" in settings.get("cleanup.policy", "delete") and retention >= 0
        return retention if by_age and settings.get("message.timestamp.type") != "LogAppendTime" else None

    def _check_age(self, topic: str, letters: Sequence[Letter]) -> None:
        retention = self._retention[topic]
        if retention is None:
            return
        oldest = time.time() - retention
        old = [letter for letter in letters if letter.original.timestamp < oldest]
        if old:
            raise TransportError(
                f"topic {topic!r} deletes records {retention:,.0f} s after their timestamp (retention.ms), and "
                f"{len(old)} of these dead letters are older, such as {old[0].at}: they could be gone before anybody "
                "reads them. --timestamp now sends them with the time of now, which handlers then see; --timestamp "
                "original sends them as they are"
            )

    async def process(self, letters: Sequence[Letter], outcome: Outcome) -> None:
        """Send dead letters that were checked, and wait until each is acknowledged.

        Args:
            letters: No two of the same record. Those of one partition are stored in this order.
            outcome: Gets each as it is known.

        Raises:
            TransportError: Some were not acknowledged, for a reason that passes, or that holds for the others too.
        """
        answers = await asyncio.gather(*(self._send(letter, outcome) for letter in letters), return_exceptions=True)
        for letter, answer in zip(letters, answers, strict=True):
            if answer is None:
                continue
            if not _is_about_one(answer):
                raise answer
            outcome.failed[Coordinates.of(letter.original)] = str(answer)

    async def _send(self, letter: Letter, outcome: Outcome) -> None:
        original = letter.original
        # Where it was before, because a producer of another kind may place the key elsewhere than ours would.
        partition = original.partition if original.partition in self._partitions[original.topic] else None
        timestamp = None if self._timestamps == "now" or original.timestamp < 0 else original.timestamp
        dead = DeadLetterRecord(original, letter.failure)
        await self._producer.publish(side_records.replay(dead, letter.at, partition=partition, timestamp=timestamp))
        outcome.done.append(letter)


def _is_about_one(error: BaseException) -> bool:
    """Whether an error says something of one record, and nothing of the others."""
    if isinstance(error, MessageTooLargeError):
        return True
    return isinstance(error, TransportError) and not error.retriable and not isinstance(error, AuthorizationError)


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
    from aioshard.cli.dlt import ThroughHandlers  # noqa: PLC0415 - imports the test kit

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


@click.group(cls=InOrder)
def command() -> None:
    """Show and replay dead letters."""


command.add_command(show)
command.add_command(replay)


T = TypeVar("T")

_CAUGHT = "aioshard.failed-in-place"
"""Topic that failed records would be sent to. None is: they are dead letters already."""
_LOOKS = 1.0
"""Seconds after which it is asked whether the app still runs."""


class WaitsBehindError(AioshardError):
    """An older dead letter of the same key has failed: this one comes after it."""

    def __init__(self) -> None:
        super().__init__("it waits behind an older dead letter of its key, which failed")


class SwallowedError(AioshardError):
    """A run was cancelled and returned all the same: nobody knows what it did."""

    def __init__(self) -> None:
        super().__init__("its handler was cancelled by its time-out, and returned instead of ending")


class ThroughHandlers:
    """Runs an app on dead letters as if they had just been read; implements `Destination`. Used by one command.

    The app is the real one, with its retries, time-outs, batches, limits and resources; what its handlers publish is
    published. Only what it reads comes from here, and what becomes of a record whose attempts are used up: it stays
    the dead letter that it is.

    Invariants:
        * Those of one shard key run in the order of their offsets; behind one that failed, none runs.
    """

    verb = "processed"
    most_records = 10_000
    most_bytes = 64 * 1024 * 1024

    def __init__(self, app: App) -> None:
        """Make a destination.

        Args:
            app: Its handlers and settings are as they were again afterwards.
        """
        self._app = app
        self._blocked: set[tuple[str, Hashable]] = set()
        """Handler and shard key of what failed, in any part."""

    async def check(self, letters: Sequence[Letter]) -> None:
        """See `Destination.check`.

        Raises:
            UsageError: A dead letter belongs to no handler of the app.
        """
        for letter in letters:
            topic = letter.original.topic
            if not any(registration.takes(topic) for registration in self._app.handlers):
                raise click.UsageError(
                    f"the app has no handler for topic {topic!r}, which the dead letter {letter.at} came from: leave "
                    "such dead letters out with --topic or --handler"
                )

    async def process(self, letters: Sequence[Letter], outcome: Outcome) -> None:
        """See `Destination.process`.

        Raises:
            AioshardError: The app could not start, or cannot go on.
        """
        run = _Run(letters, outcome, self._blocked)
        app = self._app
        broker = _filled(letters)
        transport = functools.partial(InMemoryTransport, broker, app.group_id, isolation_level="read_committed")
        with _from_the_earliest(app):
            async with app.started(
                transport,
                lambda: KafkaProducer(app.settings),
                lambda: InMemorySideTopics(broker),
                adapt=run.guarded,
            ):
                while not await run.ended(_LOOKS):
                    if app.statistics().state == "failed":
                        raise AioshardError(f"the app cannot go on: {app.statistics().trouble or 'see the log'}")


def _filled(letters: Sequence[Letter]) -> InMemoryBroker:
    """A broker that has the records at their own offsets, and nothing else."""
    broker = InMemoryBroker(partitions=1)
    partitions: dict[str, int] = {}
    for letter in letters:
        topic, partition = letter.original.topic, letter.original.partition
        partitions[topic] = max(partitions.get(topic, 1), partition + 1)
    for topic, count in partitions.items():
        broker.create_topic(topic, count)
    for letter in letters:
        broker.restore(letter.original)
    return broker


class _Run:
    """One run of the app over some dead letters: what has become of each."""

    def __init__(self, letters: Sequence[Letter], outcome: Outcome, blocked: set[tuple[str, Hashable]]) -> None:
        self._letters = {Coordinates.of(letter.original): letter for letter in letters}
        self._outcome = outcome
        self._blocked = blocked
        self._left = set(self._letters)
        self._all_ended = asyncio.Event()
        self.specs: list[HandlerSpec] = []

    async def ended(self, timeout: float) -> bool:
        """Whether every dead letter has succeeded or failed; waits for *timeout* seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._all_ended.wait()
        return not self._left

    async def attempt(self, spec: HandlerSpec, records: Sequence[Record], run: Callable[[], Awaitable[object]]) -> None:
        """One attempt of a handler at some records."""
        if any(
            (spec.name, key) in self._blocked
            for record in records
            if (key := identity(spec.shard_key, record)) is not None
        ):
            raise WaitsBehindError
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a worker is one
        try:
            await run()
        except BatchError as error:
            self._succeeded(set(map(Coordinates.of, records)), besides=set(map(Coordinates.of, error.errors)))
            raise
        if task.cancelling():
            raise SwallowedError
        self._succeeded(map(Coordinates.of, records))

    def _succeeded(self, records: Iterable[Coordinates], besides: Collection[Coordinates] = ()) -> None:
        known = set(records)
        # A handler that names what it was not given has failed altogether.
        if known.issuperset(besides):
            for at in known.difference(besides):
                self._end(at)

    def guarded(self, spec: HandlerSpec) -> HandlerSpec:
        """The same handler, its attempts watched; those records at which they are used up come to `failed`."""
        given_up: Any = spec.retry.give_up_on  # one class is taken as well as several
        retry = dataclasses.replace(
            spec.retry, give_up_on=(*(given_up if isinstance(given_up, tuple) else (given_up,)), WaitsBehindError)
        )

        def wrap(attempt: Callable[[T], Awaitable[object]]) -> Callable[[T], Awaitable[object]]:
            return lambda given: self.attempt(spec, records_of(given), functools.partial(attempt, given))

        self.specs.append(spec)
        policy = DeadLetter(_CAUGHT, budget=None)
        return spec.through(wrap)._replace(retry=retry, on_failure=policy, letters=self.failed)

    async def failed(self, message: Message) -> int:
        """The attempts at a record are used up; *message* would be its dead letter."""
        read = read_dead_letter(Record(message.topic, 0, 0, message.key, message.value, message.headers, 0.0))
        assert read is not None  # noqa: S101 - it has just been made
        record, failure = read
        at = Coordinates.of(record)
        if failure.error == WaitsBehindError.__name__:
            why = failure.message
        else:
            why = f"{failure.error}: {failure.message} ({failure.attempts} attempt(s))"
        for spec in self.specs:
            if spec.takes(record.topic) and (key := identity(spec.shard_key, record)) is not None:
                self._blocked.add((spec.name, key))
        self._outcome.failed[at] = why
        self._end(at)
        return 0

    def _end(self, at: Coordinates) -> None:
        if at not in self._left:
            return
        self._left.discard(at)
        if at not in self._outcome.failed:
            self._outcome.done.append(self._letters[at])
        if not self._left:
            self._all_ended.set()


@contextlib.contextmanager
def _from_the_earliest(app: App) -> Iterator[None]:
    """Let an app begin at the earliest record; its journal is for what it consumes."""
    before = {name: getattr(app.settings, name) for name in ("auto_offset_reset", "journal")}
    app.configure(auto_offset_reset="earliest", journal=None)
    try:
        yield
    finally:
        app.configure(**before)
