"""`aioshard publish`: the lines of a file as records of a topic."""

import asyncio
import codecs
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import click
from aiokafka import errors as kafka
from aiokafka.partitioner import DefaultPartitioner

from aioshard.cli import options
from aioshard.cli.progress import Progress
from aioshard.cli.sides import settings_of
from aioshard.errors import AioshardError, TransportError
from aioshard.kafka.connecting import CONNECT_TIMEOUT, silence_client
from aioshard.kafka.options import Compression, producer_options
from aioshard.kafka.sending import RefusedError, SendingClient, connect
from aioshard.kafka.translate import missing_topic, nothing_acknowledged, publish_error, too_large
from aioshard.loops import loop_factory

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["BadLineError", "Compression", "JsonRows", "LineSplitter", "Publisher", "Row", "command"]

Row = tuple[bytes | None, bytes]
"""Key and value of a record."""


class BadLineError(AioshardError):
    """A line of the input is not what it should be; nothing of it was published.

    Attributes:
        line: Counted from 1.
    """

    def __init__(self, name: str, line: int, reason: str) -> None:
        self.line = line
        super().__init__(f"line {line} of {name} {reason}")


class JsonRows:
    """One JSON object per line; the value is the line itself. Blank lines are passed over."""

    def __init__(self, name: str, key_field: str | None) -> None:
        """Make a parser.

        Args:
            name: The input's, for the sentences.
            key_field: The field that the key is taken from: text as it is, anything else as JSON; where it is
                missing or null the record has no key. None gives no record a key.
        """
        self._name = name
        self._key_field = key_field
        self._line = 0

    def feed(self, line: bytes) -> Row | None:
        """Return the record of *line*, or None for a blank line.

        Raises:
            BadLineError: The line cannot be read.
        """
        self._line += 1
        value = line.removeprefix(codecs.BOM_UTF8).strip() if self._line == 1 else line.strip()
        if not value:
            return None
        try:
            row = json.loads(value, parse_constant=_refuse_constant)
            if not isinstance(row, dict):
                self._refuse(f"is JSON, but {_kind(row)}: one JSON object per line was expected")
            return self._key(row), value
        except RecursionError:
            self._refuse("is nested too deeply")
        except UnicodeError:
            self._refuse("is not UTF-8, or its key cannot be written in it")
        except ValueError as error:
            self._refuse(f"is not JSON ({error}): one JSON object per line was expected")

    def _key(self, row: dict[str, Any]) -> bytes | None:
        key = row.get(self._key_field) if self._key_field is not None else None
        if key is None:
            return None
        if isinstance(key, dict | list):
            self._refuse(f"has {_kind(key)} in the field {self._key_field!r}: a key is text or a number")
        return (key if isinstance(key, str) else json.dumps(key)).encode()

    def _refuse(self, reason: str) -> NoReturn:
        raise BadLineError(self._name, self._line, reason) from None


class LineSplitter:
    """Bytes as they come, in whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, data: bytes) -> list[bytes]:
        """The lines that *data* ends, with their line breaks. No data is the end of the input."""
        if not data:
            rest, self._rest = self._rest, b""
            return [rest] if rest else []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line + b"\n" for line in lines]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _kind(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return "a text"
        case bool() | None:
            return json.dumps(value)
        case _:
            return "a number"


_STALLED = 30.0
"""Seconds without an acknowledgement after which we give up. The idempotent producer itself tries for ever."""
_REMEMBERED_KEYS = 100_000

_partition_of = DefaultPartitioner()


class Publisher:
    """Publishes to one topic, idempotently, keyed records where Java's producer would put them.

    Records without a key fill a batch of one partition after the other's. Owned by one event loop.

    Invariants:
        * Records of one partition arrive in the order in which they were given.
        * `acknowledged` counts what the brokers have confirmed, and only that.
    """

    def __init__(self, settings: "Settings", topic: str, *, compression: Compression = "lz4") -> None:
        """Make a publisher; nothing connects yet.

        Raises:
            SettingsError: The brokers are not set, or TLS and SASL settings cannot work.
        """
        self.acknowledged = 0
        """Records that the brokers have confirmed."""
        self._settings = settings
        self._topic = topic
        self._options = producer_options(settings, compression=compression, request_timeout=_STALLED)
        self._producer: SendingClient
        self._partitions: list[int] = []
        self._placed: dict[bytes, int] = {}
        self._keyless = 0
        self._batches: dict[int, Any] = {}
        self._flying: set[asyncio.Future[Any]] = set()
        self._failure: TransportError | None = None

    # Life -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect and look the topic up; a broker that creates topics on use creates it.

        Raises:
            TransportError: No broker answers, one refuses us, or there is no such topic. All within 10 s.
        """
        self._producer = await connect(self._settings, self._options, self._topic)
        try:
            await self._look_up()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; what was not flushed is not waited for."""
        await self._close()

    async def _look_up(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                self._partitions = sorted(await self._producer.partitions_for(self._topic))
        except TimeoutError:
            raise missing_topic(self._topic, CONNECT_TIMEOUT) from None
        except kafka.KafkaError as error:
            raise publish_error(error, self._topic) from error
        self._keyless = random.choice(self._partitions)  # noqa: S311 - spreads load

    async def _close(self) -> None:
        for flying in self._flying:
            flying.cancel()
        await self._producer.tear_down()

    # Records --------------------------------------------------------------------------

    async def publish(self, rows: Iterable[Row]) -> None:
        """Take *rows* and send what fills a batch; `submit` and `flush` send the rest.

        Raises:
            TransportError: The brokers refused records, or confirm nothing any more.
        """
        for key, value in rows:
            partition = self._keyless if key is None else self._partition(key)
            batch = self._batches.get(partition)
            if batch is not None and batch.append(timestamp=None, key=key, value=value) is not None:
                continue
            if batch is not None:
                await self._send(partition)
            batch = self._batches[partition] = self._producer.create_batch()
            # The first record of a batch is taken whatever its size.
            batch.append(timestamp=None, key=key, value=value)
        self._raise_failure()

    async def submit(self) -> None:
        """Send what was given so far, without waiting for acknowledgements.

        Raises:
            TransportError: As `publish`.
        """
        for partition in list(self._batches):
            await self._send(partition)

    async def flush(self) -> None:
        """Send what was given so far and wait until all of it is acknowledged.

        Raises:
            TransportError: As `publish`.
        """
        await self.submit()
        while self._flying:
            landed, _ = await asyncio.wait(self._flying, timeout=_STALLED, return_when=asyncio.FIRST_COMPLETED)
            if not landed:
                raise self._stalled()
        self._raise_failure()

    def _partition(self, key: bytes) -> int:
        partition = self._placed.get(key)
        if partition is None:
            if len(self._placed) >= _REMEMBERED_KEYS:
                self._placed.clear()
            partition = self._placed[key] = _partition_of(key, self._partitions, self._partitions)
        return partition

    async def _send(self, partition: int) -> None:
        self._raise_failure()
        batch = self._batches.pop(partition)
        if partition == self._keyless:
            self._keyless = random.choice(self._partitions)  # noqa: S311 - spreads load
        records: int = batch.record_count()
        try:
            async with asyncio.timeout(_STALLED):
                flying = await self._producer.send_batch(batch, self._topic, partition=partition)
        except (TimeoutError, kafka.KafkaTimeoutError):
            raise self._stalled() from None
        except kafka.KafkaError as error:
            raise self._refused(error) from error
        self._flying.add(flying)
        flying.add_done_callback(lambda landed: self._land(landed, records))

    def _land(self, landed: asyncio.Future[Any], records: int) -> None:
        self._flying.discard(landed)
        if landed.cancelled():
            return
        error = landed.exception()
        if error is None:
            self.acknowledged += records
        elif self._failure is None:
            self._failure = self._refused(error)
            self._failure.__cause__ = error

    # What goes wrong ------------------------------------------------------------------

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stalled(self) -> TransportError:
        return nothing_acknowledged(self._settings.bootstrap_servers, _STALLED)

    def _refused(self, error: BaseException) -> TransportError:
        if isinstance(error, RefusedError) and error.error is kafka.MessageSizeTooLargeError:
            return too_large(self._topic, None)
        return publish_error(error, self._topic)


_CHUNK = 256 * 1024
_LINGER = 0.1
"""Seconds that records wait for company while the input has nothing more."""


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.argument("topic", metavar="TOPIC")
@click.option("--key", "key_field", metavar="FIELD", help="Field that is the record's key; no key where it is missing.")
@options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS")
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip", "lz4", "snappy", "zstd"]),
    default="lz4",
    show_default=True,
    help="How batches are compressed.",
)
@options.as_json("how it ended")
def command(
    file: str,
    topic: str,
    *,
    key_field: str | None,
    bootstrap_servers: str | None,
    compression: Compression,
    as_json: bool,
) -> int:
    """Publish the lines of FILE to TOPIC.

    FILE holds JSON objects, one per line; "-" is standard input. The value of a record is its line. The producer is
    idempotent: what is acknowledged is there once, in the order of the file. Settings for TLS and SASL are taken from
    AIOSHARD_* variables, as for an app.
    """
    silence_client()
    settings = settings_of(bootstrap_servers)
    rows = JsonRows("standard input" if file == "-" else file, key_field)
    publication = _Publication(rows, key_field)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(publication.run(file, Publisher(settings, topic, compression=compression)))
        except (AioshardError, KeyboardInterrupt) as error:
            publication.report(topic, as_json=as_json, error=error)
            raise
    publication.report(topic, as_json=as_json, error=None)
    return 0


class _Publication:
    """One file on its way to one topic."""

    def __init__(self, rows: JsonRows, key_field: str | None) -> None:
        self._rows = rows
        self._key_field = key_field
        self._publisher: Publisher | None = None
        self._read = 0
        self._without_key = 0
        self._began = time.perf_counter()

    @property
    def acknowledged(self) -> int:
        """Records that the brokers have confirmed."""
        return 0 if self._publisher is None else self._publisher.acknowledged

    async def run(self, file: str, publisher: Publisher) -> None:
        """Publish everything; what was read before a bad line is published and acknowledged too."""
        source = sys.stdin.fileno() if file == "-" else os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            async with publisher:
                self._publisher = publisher
                self._began = time.perf_counter()
                async with Progress("publishing", lambda: publisher.acknowledged):
                    try:
                        await self._publish(source, publisher)
                    except (BadLineError, asyncio.CancelledError):
                        await publisher.flush()
                        raise
                    await publisher.flush()
        finally:
            if file != "-":
                os.close(source)

    async def _publish(self, source: int, publisher: Publisher) -> None:
        splitter = LineSplitter()
        ended = False
        while not ended:
            reading = asyncio.create_task(_read(source), name="read input")
            try:
                await asyncio.wait([reading], timeout=_LINGER)
                if not reading.done():
                    await publisher.submit()
                data = await reading
            finally:
                reading.cancel()
            ended = not data
            await publisher.publish(self._parsed(splitter.split(data)))

    def _parsed(self, lines: Iterable[bytes]) -> Iterator[Row]:
        for line in lines:
            row = self._rows.feed(line)
            if row is not None:
                self._read += 1
                self._without_key += row[0] is None
                yield row

    def report(self, topic: str, *, as_json: bool, error: BaseException | None) -> None:
        """Tell how it ended: on standard output when it went well, or as JSON; else what was published anyway."""
        seconds = time.perf_counter() - self._began
        records = self.acknowledged
        if as_json:
            body: dict[str, Any] = {
                "topic": topic,
                "records": records,
                "without_key": self._without_key,
                "seconds": round(seconds, 3),
                "records_per_second": round(records / seconds),
                "error": None if error is None else str(error) or type(error).__name__,
            }
            click.echo(json.dumps(body))
        told = f"{records:,} record(s) were published to {topic!r} in {seconds:.1f} s"
        if error is not None and self._publisher is not None:
            click.echo(f"{told} before it ended", err=True)
        elif error is None and not as_json:
            click.echo(f"{told} ({records / seconds:,.0f} records/s)")
        if records and self._key_field is not None and self._without_key == self._read:
            click.echo(
                f"no record has a value in the field {self._key_field!r}: all were published without a key", err=True
            )


async def _read(source: int) -> bytes:
    """What there is to read, or nothing at the end.

    A thread that nobody waits for does it: an input that never ends must not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[bytes] = loop.create_future()

    def settle(data: bytes, error: OSError | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(data)
        else:
            result.set_exception(error)

    def read() -> None:
        data, failure = b"", None
        try:
            data = os.read(source, _CHUNK)
        except OSError as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, data, failure)

    threading.Thread(target=read, name="aioshard publish input", daemon=True).start()
    return await result
