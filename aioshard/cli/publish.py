"""`aioshard publish`: the lines of a file as records of a topic."""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.progress import Progress
from aioshard.cli.publishing import Compression, Publisher
from aioshard.cli.rows import BadLineError, JsonRows, LineSplitter, Row
from aioshard.cli.sides import settings_of
from aioshard.errors import AioshardError
from aioshard.kafka.connecting import silence_client
from aioshard.loops import loop_factory

__all__ = ["command"]

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
