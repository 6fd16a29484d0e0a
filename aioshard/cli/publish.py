"""`aioshard publish`: the lines of a file as records of a topic."""

import asyncio
import codecs
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Iterator

import click

from aioshard.cli import options
from aioshard.cli.brokers import run, settings_of
from aioshard.cli.output import print_result, progress
from aioshard.errors import AioshardError
from aioshard.kafka.publisher import Publisher
from aioshard.ports import Message
from aioshard.records import counted

_CHUNK = 256 * 1024


class BadLineError(AioshardError):
    """A line of the input is not valid; it was not published."""


@dataclasses.dataclass(slots=True)
class JsonLines:
    """Reads messages from one JSON object per line; the value is the line itself. Skips blank lines."""

    name: str
    """Name of the input, for error messages."""
    topic: str
    """Topic of the messages."""
    key_field: str | None
    """The field with the key: text as it is, anything else as JSON. A message without it, or with null, has no key.
    With None, no message has a key."""
    read: int = 0
    """Number of messages."""
    without_key: int = 0
    line: int = 0
    """Number of the latest line."""
    rest: bytes = b""
    """The beginning of the next line."""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages whose lines *data* completes. Empty *data* is the end of the input.

        Raises:
            BadLineError: A line is not valid.
        """
        *lines, self.rest = (self.rest + data).split(b"\n") if data else (self.rest, b"")
        for line in lines:
            self.line += 1
            if value := line.removeprefix(codecs.BOM_UTF8).strip():
                key = self._key(value)
                self.read += 1
                self.without_key += key is None
                yield Message(self.topic, value, key)

    def _key(self, value: bytes) -> bytes | None:
        try:
            row = json.loads(value)
            if not isinstance(row, dict):
                raise BadLineError(f"line {self.line} of {self.name} is not a JSON object")
            key = None if self.key_field is None else row.get(self.key_field)
            if key is None:
                return None
            text = key if isinstance(key, str) else json.dumps(key)
            return text.encode()
        except ValueError as error:
            raise self._not_json(str(error)) from None
        except RecursionError:
            raise self._not_json("it is nested too deeply") from None

    def _not_json(self, why: str) -> BadLineError:
        return BadLineError(f"line {self.line} of {self.name} is not JSON ({why}): expected one JSON object per line")


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@options.topic_argument
@click.option("--key", "key_field", metavar="FIELD", help="Field with the record's key; without it, the key is null.")
@options.bootstrap_servers()
@options.as_json("the result")
def command(file: str, topic: str, *, key_field: str | None, bootstrap_servers: str | None, as_json: bool) -> None:
    """Publish the lines of FILE to TOPIC.

    FILE contains JSON objects, one per line; "-" is standard input. The value of a record is its line. The producer is
    idempotent: acknowledged records are stored once, in the order of the file. TLS and SASL settings come from
    AIOSHARD_* variables, as for an app.
    """
    lines = JsonLines("standard input" if file == "-" else file, topic, key_field)
    publisher = Publisher(settings_of(bootstrap_servers))
    began = time.perf_counter()
    cause = None
    try:
        run(_publish(file, lines, publisher))
    except (AioshardError, KeyboardInterrupt) as error:
        cause = str(error) or type(error).__name__
        raise
    finally:
        seconds = time.perf_counter() - began
        records = publisher.acknowledged
        result = {
            "topic": topic,
            "records": records,
            "without_key": lines.without_key,
            "seconds": round(seconds, 3),
            "records_per_second": round(records / seconds),
            "error": cause,
        }
        line = (
            f"Published {counted(records, 'record')} to {topic!r} in {seconds:.1f} s "
            f"({records / seconds:,.0f} records/s)"
        )
        print_result(result, [line] if cause is None else [], as_json=as_json)
        if cause is not None and records:
            click.echo(f"Published {counted(records, 'record')} to {topic!r} before the error", err=True)
        if records and key_field is not None and lines.without_key == lines.read:
            click.echo(f"No record has the field {key_field!r}: all were published without a key", err=True)


async def _publish(file: str, lines: JsonLines, publisher: Publisher) -> None:
    """Publish everything, or the records before an invalid line or an interrupt."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    source = sys.stdin.fileno() if file == "-" else os.open(file, flags)
    async with publisher, progress("publishing", lambda: publisher.acknowledged):
        data = b"\n"
        while data:
            data = await _read(source)
            messages: list[Message] = []
            try:
                for message in lines.feed(data):
                    messages.append(message)  # noqa: PERF402 - those before an invalid line are published too
            finally:
                await publisher.publish(messages)


async def _read(source: int) -> bytes:
    """Return the available input; empty at its end.

    Reads in a daemon thread: an input that never ends must not keep the process alive.
    """
    result: concurrent.futures.Future[bytes] = concurrent.futures.Future()

    def read() -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the command was interrupted
            try:
                result.set_result(os.read(source, _CHUNK))
            except OSError as error:
                result.set_exception(error)

    threading.Thread(target=read, name="aioshard publish input", daemon=True).start()
    return await asyncio.wrap_future(result)
