"""`aioshard publish`: lines become records, with errors for the ones that cannot."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from confluent_kafka.admin import AclOperation

from aioshard import Settings
from aioshard.cli.publish import BadLineError, JsonLines
from aioshard.errors import AuthorizationError, ConnectError, TransportError
from aioshard.kafka.embedded import EmbeddedBroker
from aioshard.kafka.publisher import Publisher
from aioshard.ports import Message
from tests.support.access import allow, create_scram_user
from tests.support.brokers import SharedKafka
from tests.support.kafka_properties import Credentials
from tests.support.paths import PROJECT

DEADLINE = 60.0
NOWHERE = "127.0.0.1:1"
"""An address where nobody listens."""


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as started:
        yield started


class Publishing:
    """An `aioshard publish` that has ended, or is about to."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""
        self.errors = ""

    def type(self, text: bytes) -> None:
        """Write to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)

    async def ends(self) -> int:
        async with asyncio.timeout(DEADLINE):
            output, errors = await self.process.communicate(b"")
        self.output, self.errors = output.decode(), errors.decode()
        assert self.process.returncode is not None
        return self.process.returncode


Start = Callable[..., Awaitable[Publishing]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts `aioshard publish` in its own directory; the process ends with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def started(*arguments: str, **environment: str) -> Publishing:
            inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIOSHARD_")}
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "aioshard", "publish", *arguments),
                cwd=tmp_path,
                env={**inherited, **environment, "PYTHONPATH": str(PROJECT)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            stack.push_async_callback(_end, process)
            return Publishing(process)

        yield started


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


async def read(broker: EmbeddedBroker, topic: str, records: int) -> list[Any]:
    """The first *records* records, by partition and offset."""
    found: list[Any] = []
    reader = AIOKafkaConsumer(
        topic, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest", fetch_max_wait_ms=20
    )
    async with asyncio.timeout(DEADLINE), reader:
        while len(found) < records:
            found.append(await reader.getone())
    return sorted(found, key=lambda record: (record.partition, record.offset))


# Published records


async def test_json_lines_are_published_as_they_are(
    broker: EmbeddedBroker, start: Start, tmp_path: Path, topic: str
) -> None:
    await broker.create_topic(topic, partitions=1)
    lines = ['{"id": 1, "name": "a"}', '{"id": 2.50, "name": null}', '{"name": "Å"}', '  {"id": true}  ']
    (tmp_path / "rows.jsonl").write_text("\n\n".join(lines))

    publishing = await start("rows.jsonl", topic, "--key", "id", "--bootstrap-servers", broker.bootstrap_servers)

    assert await publishing.ends() == 0
    assert [(record.key, record.value.decode()) for record in await read(broker, topic, 4) if record.key] == [
        (b"1", lines[0]),
        (b"2.5", lines[1]),
        (b"true", lines[3].strip()),
    ]
    assert f"Published 4 records to '{topic}'" in publishing.output
    assert "records/s" in publishing.output


async def test_a_windows_file_is_published_with_a_summary(
    broker: EmbeddedBroker, start: Start, tmp_path: Path, topic: str
) -> None:
    """With the mark of UTF-8 in front, two characters that end a line, and any extension."""
    await broker.create_topic(topic, partitions=1)
    (tmp_path / "rows.TXT").write_bytes(b'\xef\xbb\xbf{"id": "a"}\r\n\r\n{"text": "none"}\r\n{"id": ""}')

    publishing = await start(
        "rows.TXT", topic, "--key", "id", "--json", AIOSHARD_BOOTSTRAP_SERVERS=broker.bootstrap_servers
    )

    assert await publishing.ends() == 0
    records = [(record.key, record.value) for record in await read(broker, topic, 3)]
    assert records == [(b"a", b'{"id": "a"}'), (None, b'{"text": "none"}'), (b"", b'{"id": ""}')]
    ending = json.loads(publishing.output)
    assert ending.keys() == {"topic", "records", "without_key", "seconds", "records_per_second", "error"}
    assert (ending["topic"], ending["records"], ending["without_key"], ending["error"]) == (topic, 3, 1, None)


async def test_standard_input_is_published_while_it_is_open(broker: EmbeddedBroker, start: Start, topic: str) -> None:
    """Lines of a slow source are published before its next line arrives."""
    await broker.create_topic(topic, partitions=1)
    publishing = await start("-", topic, "--bootstrap-servers", broker.bootstrap_servers)

    for number in range(3):
        publishing.type(b'{"n": %d}\n' % number)
        assert len(await read(broker, topic, number + 1)) == number + 1

    assert await publishing.ends() == 0


async def test_an_interrupt_reports_the_published_records(broker: EmbeddedBroker, start: Start, topic: str) -> None:
    """Also when the input neither ends nor says anything."""
    await broker.create_topic(topic, partitions=1)
    publishing = await start("-", topic, "--bootstrap-servers", broker.bootstrap_servers)
    publishing.type(b'{"n": 1}\n{"n": 2}\n{"unfinished"')
    await read(broker, topic, 2)

    publishing.process.send_signal(signal.SIGINT)

    async with asyncio.timeout(DEADLINE):
        await publishing.process.wait()
    assert await publishing.ends() == 130
    assert f"Published 2 records to '{topic}'" in publishing.errors
    assert "Traceback" not in publishing.errors


async def test_each_key_keeps_its_order_and_its_partition(broker: EmbeddedBroker, topic: str) -> None:
    """Several batches of each partition, at the places where other producers put the keys."""
    await broker.create_topic(topic, partitions=3)
    rows = [(b"k%d" % (number % 20), b"%06d" % number * 20) for number in range(6000)]

    async with Publisher(Settings(**broker.settings)) as publisher:
        await publisher.publish(Message(topic, value, key) for key, value in rows)

    assert publisher.acknowledged == 6000
    found = await read(broker, topic, 6000)
    for key in {key for key, _ in rows}:
        assert [record.value for record in found if record.key == key] == [value for own, value in rows if own == key]
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        for key in {key for key, _ in rows}:
            elsewhere = (await producer.send_and_wait(topic, b"", key=key)).partition
            assert {record.partition for record in found if record.key == key} == {elsewhere}


async def test_records_without_a_key_fill_all_partitions(broker: EmbeddedBroker, topic: str) -> None:
    await broker.create_topic(topic, partitions=3)

    async with Publisher(Settings(**broker.settings)) as publisher:
        await publisher.publish(Message(topic, b"x" * 1000) for _ in range(4000))

    async with AIOKafkaConsumer(bootstrap_servers=broker.bootstrap_servers) as reader:
        ends = await reader.end_offsets([TopicPartition(topic, number) for number in range(3)])
    assert sum(ends.values()) == 4000
    assert min(ends.values()) > 0


# On a real broker


async def test_a_secured_broker_is_reached_with_the_settings_of_an_app(
    kafka: SharedKafka, start: Start, tmp_path: Path, topic: str
) -> None:
    user = Credentials(f"user-of-{topic}"[:60], "secret")
    await create_scram_user(kafka, user)
    await kafka.create_topic(topic, partitions=2)
    (tmp_path / "rows.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    settings = {
        "AIOSHARD_BOOTSTRAP_SERVERS": kafka.secure_bootstrap,
        "AIOSHARD_SECURITY_PROTOCOL": "SASL_SSL",
        "AIOSHARD_SSL_CAFILE": str(kafka.certificates.ca_file),
        "AIOSHARD_SASL_MECHANISM": "SCRAM-SHA-512",
        "AIOSHARD_SASL_USERNAME": user.username,
        "AIOSHARD_SASL_PASSWORD": user.password,
    }

    refused = await start("rows.jsonl", topic, "--key", "id", **settings)
    assert await refused.ends() == 1
    assert f"Error: the brokers do not allow this user to write to topic '{topic}'" in refused.errors

    await allow(kafka, user, "topic", topic, AclOperation.WRITE, AclOperation.DESCRIBE)
    allowed = await start("rows.jsonl", topic, "--key", "id", **settings)
    assert await allowed.ends() == 0
    assert sorted((record.key, record.value) for record in await kafka.read(topic)) == [
        (b"a", b'{"id": "a"}'),
        (b"b", b'{"id": "b"}'),
    ]

    stranger = await start("rows.jsonl", topic, **{**settings, "AIOSHARD_SASL_PASSWORD": "wrong"})
    assert await stranger.ends() == 1
    assert f"refused user '{user.username}'" in stranger.errors
    assert "wrong" not in stranger.errors


async def test_a_read_only_topic_is_named(kafka: SharedKafka, topic: str) -> None:
    """The refusal comes with the first batch; until then the topic looks like any other."""
    user = Credentials(f"user-of-{topic}"[:60], "secret")
    await create_scram_user(kafka, user)
    await kafka.create_topic(topic)
    await allow(kafka, user, "topic", topic, AclOperation.READ, AclOperation.DESCRIBE)
    await allow(kafka, user, "topic", f"{topic}-other", AclOperation.WRITE)
    settings = Settings(
        bootstrap_servers=kafka.secure_bootstrap,
        security_protocol="SASL_SSL",
        ssl_cafile=str(kafka.certificates.ca_file),
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username=user.username,
        sasl_password=user.password,
    )

    async with Publisher(settings) as publisher:
        with pytest.raises(AuthorizationError, match=f"write to topic '{topic}'"):
            await publisher.publish([Message(topic, b"v", b"k")])

    assert publisher.acknowledged == 0


# Errors


@pytest.mark.parametrize("arguments", [["--bootstrap-servers", NOWHERE], ["--bootstrap-servers", "kafka.invalid:9092"]])
async def test_a_wrong_broker_is_named_within_10_seconds(start: Start, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    publishing = await start("rows.jsonl", "t", *arguments)

    async with asyncio.timeout(10):
        assert await publishing.ends() == 1

    assert publishing.errors.startswith(f"Error: none of bootstrap_servers={arguments[1]} could be reached")
    assert len(publishing.errors.splitlines()) == 1


async def test_a_server_that_accepts_and_never_responds_is_named_in_time() -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read()

    silent = await asyncio.start_server(listen, "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()[:2]
    async with silent, asyncio.timeout(10):
        with pytest.raises(ConnectError, match="no answer within 3 s"):
            async with Publisher(Settings(bootstrap_servers=f"{host}:{port}")) as publisher:
                await publisher.publish([Message("t", b"v")])


async def test_a_missing_address_error_says_how_to_set_it(start: Start, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    publishing = await start("rows.jsonl", "t")

    assert await publishing.ends() == 2
    assert "AIOSHARD_BOOTSTRAP_SERVERS=localhost:9092" in publishing.errors


async def test_a_bad_line_ends_with_1_after_publishing_the_lines_before(
    broker: EmbeddedBroker, start: Start, tmp_path: Path, topic: str
) -> None:
    await broker.create_topic(topic, partitions=1)
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n\n{"id": 2}\n{"id": 3\n{"id": 4}\n')

    publishing = await start("rows.jsonl", topic, "--json", "--bootstrap-servers", broker.bootstrap_servers)

    assert await publishing.ends() == 1
    assert f"Published 2 records to '{topic}'" in publishing.errors
    assert "Error: line 4 of rows.jsonl is not JSON" in publishing.errors
    ending = json.loads(publishing.output)
    assert ending["records"] == 2
    assert "line 4 of rows.jsonl" in ending["error"]
    async with AIOKafkaConsumer(bootstrap_servers=broker.bootstrap_servers) as reader:
        assert await reader.end_offsets([TopicPartition(topic, 0)]) == {TopicPartition(topic, 0): 2}


async def test_a_key_field_missing_in_every_record_is_reported(
    broker: EmbeddedBroker, start: Start, tmp_path: Path, topic: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n')

    publishing = await start("rows.jsonl", topic, "--key", "ident", "--bootstrap-servers", broker.bootstrap_servers)

    assert await publishing.ends() == 0
    assert "No record has the field 'ident': all were published without a key" in publishing.errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.jsonl", "t"], "'missing.jsonl' does not exist"),
        (["rows.txt"], "Missing argument 'TOPIC'"),
    ],
)
async def test_wrong_options_end_the_command_with_2(
    start: Start, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    (tmp_path / "rows.txt").write_text("{}\n")

    publishing = await start(*arguments, AIOSHARD_BOOTSTRAP_SERVERS=NOWHERE)

    assert await publishing.ends() == 2
    assert sentence in publishing.errors


async def test_a_broker_that_dies_ends_the_command(
    broker: EmbeddedBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioshard.kafka.producer._PATIENCE", 0.5)
    async with Publisher(Settings(**broker.settings)) as publisher:
        await publisher.publish([Message(topic, b"v", b"k")])
        os.kill(broker.pid, signal.SIGKILL)
        await broker.ended()

        with pytest.raises(TransportError, match=r"acknowledged nothing for 0\.5 s"):
            await publisher.publish([Message(topic, b"v", b"k")])

    assert publisher.acknowledged == 1


# Lines


def parsed(lines: JsonLines, *pieces: bytes) -> list[tuple[bytes | None, bytes | None]]:
    return [(message.key, message.value) for piece in (*pieces, b"") for message in lines.feed(piece)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_are_whole_however_the_bytes_are_split(size: int) -> None:
    text = b'{"a": 1}\n\n{"b": 2}\r\n{"c": 3}'
    pieces = [text[at : at + size] for at in range(0, len(text), size)]

    assert parsed(JsonLines("rows", "t", None), *pieces) == [
        (None, b'{"a": 1}'),
        (None, b'{"b": 2}'),
        (None, b'{"c": 3}'),
    ]


@pytest.mark.parametrize(
    ("value", "key"),
    [('"text"', b"text"), ("7", b"7"), ('"\\u00e5"', "å".encode()), ("null", None), ("false", b"false")],
)
def test_keys_are_read_from_json_fields(value: str, key: bytes | None) -> None:
    assert parsed(JsonLines("rows", "t", "id"), f'{{"id": {value}}}'.encode()) == [(key, f'{{"id": {value}}}'.encode())]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{}\n{}}\n", "line 2 of rows is not JSON"),
        (b"{}\n\n[1]\n", "line 3 of rows is not a JSON object"),
        (b"null\n", "line 1 of rows is not a JSON object"),
        (b'{"n": "\xff"}\n', "line 1 of rows is not JSON ('utf-8' codec can't decode"),
        (b'{"id": "\\ud800"}\n', "line 1 of rows is not JSON ('utf-8' codec can't encode"),
        (b"[" * 100_000, "line 1 of rows is not JSON (it is nested too deeply)"),
    ],
)
def test_bad_json_is_reported_with_its_line(text: bytes, sentence: str) -> None:
    with pytest.raises(BadLineError) as caught:
        parsed(JsonLines("rows", "t", "id"), text)
    assert str(caught.value).startswith(sentence)


def test_rows_before_a_bad_line_are_published() -> None:
    lines = JsonLines("rows", "t", "id")

    assert list(lines.feed(b'{"id": 1}\n')) == [Message("t", b'{"id": 1}', b"1")]
    with pytest.raises(BadLineError):
        list(lines.feed(b"1\n"))
