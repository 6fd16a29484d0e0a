"""`aioshard dlt`: dead letters are shown and republished once."""

import contextlib
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiokafka
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from aioshard import Settings
from aioshard.dead_letters.progress import progress_group, sending_group
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.embedded import EmbeddedBroker
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Committed
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import Failure, SchemaRef, dead_letter, park
from tests.support.brokers import SharedKafka

Aioshard = Callable[..., Awaitable[Any]]
Publish = Callable[..., Awaitable[list[tuple[int, int]]]]

FAILED_AT = 1_700_000_000.0


def record(number: int, *, topic: str = "orders", key: bytes | None = b"alice", **fields: Any) -> Record:
    defaults: dict[str, Any] = {"value": b"%d" % number, "headers": (("trace", b"7"),), "timestamp": 1.6e9 + number}
    return Record(topic, fields.pop("partition", 0), number, key, **{**defaults, **fields})


def failure(number: int = 0, **fields: Any) -> Failure:
    made = Failure("billing", "on_order", 5, "ValueError", "no such customer", FAILED_AT + number)
    return made._replace(**fields)


@pytest.fixture
async def dead_letter_topic(kafka: SharedKafka, topic: str, publish: Publish) -> str:
    """A dead-letter topic with two partitions and seven records, one of them not a dead letter.

    Without the retention of 7 days, which deletes a dead letter as soon as its *record* is a week old.
    """
    await kafka.create_topic(topic, 2, {"retention.ms": "-1"})
    written = [
        (0, record(1), failure(1)),
        (0, record(2, key=b"bob", value=None), failure(2, error="TimeoutError", message="30 s\x1b[31m\n")),
        (0, record(3, topic="refunds", partition=3), failure(3, handler="on_refund", group="accounts")),
        (1, record(4, key=None), failure(4)),
        (1, record(5, key=b"\xff\x00", value=b"\xfe"), failure(5, error="TimeoutError")),
        (1, record(6, value=b"x" * 500), failure(6)),
    ]
    for partition, original, why in written:
        schema = SchemaRef(7, "orders-value") if original.offset == 1 else None
        await publish(dead_letter(topic, original, why, schema)._replace(partition=partition))
    await publish(park(topic, record(7, partition=1), failure(7), generation=4, due=1.0))
    return topic


# Showing


async def test_dead_letters_are_counted_and_listed_in_failure_order(
    aioshard: Aioshard, kafka: SharedKafka, dead_letter_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")

    ended = await aioshard("dlt", "show", dead_letter_topic, "--bootstrap-servers", kafka.bootstrap)

    assert (ended.code, ended.errors) == (0, "")
    lines = ended.output.splitlines()
    assert lines[:6] == [
        f"6 dead letters in {dead_letter_topic}, 0 of them already replayed",
        f"1 other record in {dead_letter_topic}",
        "  failed: 2023-11-14 22:13:21+00:00 to 2023-11-14 22:13:26+00:00",
        "  errors: ValueError 4, TimeoutError 2",
        "  handlers: on_order 5, on_refund 1",
        "  topics: orders 5, refunds 1",
    ]
    assert lines[7].split() == ["failed", "dead", "letter", "record", "key", "handler", "attempts", "error", "value"]
    assert [line.split()[2:5] for line in lines[8:]] == [
        ["0/0", "orders/0/1", "alice"],
        ["0/1", "orders/0/2", "bob"],
        ["0/2", "refunds/3/3", "alice"],
        ["1/0", "orders/0/4", "-"],
        ["1/1", "orders/0/5", "0xff00"],
        ["1/2", "orders/0/6", "alice"],
    ]
    assert lines[9].endswith(r"TimeoutError: 30 s\x1b[31m\n    -")
    assert lines[13].endswith("x" * 59 + "…")


async def test_json_has_every_field_of_the_dead_letters(
    aioshard: Aioshard, kafka: SharedKafka, dead_letter_topic: str
) -> None:
    ended = await aioshard("dlt", "show", dead_letter_topic, "--json", "--bootstrap-servers", kafka.bootstrap)

    report = json.loads(ended.output)
    assert report["topic"] == dead_letter_topic
    assert report["summary"] == {
        "selected": 6,
        "dead_letters": 6,
        "replayed": 0,
        "other_records": 1,
        "first_failed_at": FAILED_AT + 1,
        "last_failed_at": FAILED_AT + 6,
        "errors": {"ValueError": 4, "TimeoutError": 2},
        "handlers": {"on_order": 5, "on_refund": 1},
        "topics": {"orders": 5, "refunds": 1},
    }
    by_offset = {entry["record"]["offset"]: entry for entry in report["dead_letters"]}
    assert by_offset[2] == {
        "partition": 0,
        "offset": 1,
        "replayed": False,
        "record": {
            "topic": "orders",
            "partition": 0,
            "offset": 2,
            "timestamp": 1.6e9 + 2,
            "key": "bob",
            "value": None,
            "headers": [["trace", "7"]],
        },
        "group": "billing",
        "handler": "on_order",
        "attempts": 5,
        "error": "TimeoutError",
        "message": "30 s\x1b[31m\n",
        "failed_at": FAILED_AT + 2,
        "schema_id": None,
        "subject": None,
    }
    assert (by_offset[1]["schema_id"], by_offset[1]["subject"]) == ("7", "orders-value")
    assert by_offset[1]["record"]["headers"] == [["trace", "7"]]
    assert by_offset[5]["record"]["key"] == {"base64": "/wA="}
    assert by_offset[6]["record"]["value"] == "x" * 500


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        (["--partition", "1"], {4, 5, 6}),
        (["--handler", "on_refund"], {3}),
        (["--group", "accounts"], {3}),
        (["--error", "TimeoutError"], {2, 5}),
        (["--topic", "orders", "--key", "alice"], {1, 6}),
        (["--key", "0xff00"], {5}),
        (["--record", "orders/0/2", "--record", "refunds/3/3"], {2, 3}),
        (["--since", "2023-11-14T22:13:25+00:00"], {5, 6}),
        (["--until", "2023-11-14T22:13:22Z"], {1}),
        (["--since", "-1h"], set()),
        (["--error", "TimeoutError", "--handler", "on_refund"], set()),
        (["--limit", "2"], {5, 6}),
        (["--limit", "0"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_filters_select_dead_letters(
    aioshard: Aioshard, kafka: SharedKafka, dead_letter_topic: str, options: list[str], offsets: set[int]
) -> None:
    ended = await aioshard("dlt", "show", dead_letter_topic, *options, "--json", "--bootstrap-servers", kafka.bootstrap)

    assert ended.code == 0
    assert {entry["record"]["offset"] for entry in json.loads(ended.output)["dead_letters"]} == offsets


async def test_a_shortened_table_says_so(aioshard: Aioshard, kafka: SharedKafka, dead_letter_topic: str) -> None:
    ended = await aioshard("dlt", "show", dead_letter_topic, "--limit", "2", "--bootstrap-servers", kafka.bootstrap)

    assert ended.output.endswith("\n4 older ones are not shown: --limit shows more\n")


async def test_filters_that_match_nothing_are_pointed_out(
    aioshard: Aioshard, kafka: SharedKafka, dead_letter_topic: str
) -> None:
    ended = await aioshard(
        "dlt", "show", dead_letter_topic, "--error", "KeyError", "--bootstrap-servers", kafka.bootstrap
    )

    assert ended.code == 0
    assert ended.output.splitlines()[1].startswith("None matches")


async def test_an_empty_topic_is_not_an_error(aioshard: Aioshard, kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, 3)

    ended = await aioshard("dlt", "show", topic, "--bootstrap-servers", kafka.bootstrap)

    assert ended == (0, f"0 dead letters in {topic}, 0 of them already replayed\n", "")


# Refusals


async def test_a_missing_topic_is_a_clear_error_and_is_not_created(
    aioshard: Aioshard, kafka: SharedKafka, topic: str
) -> None:
    for _ in range(2):
        ended = await aioshard("dlt", "show", topic, "--bootstrap-servers", kafka.bootstrap)

        assert ended == (1, "", f"Error: topic {topic!r} does not exist: create it, or check its name\n")


async def test_a_missing_partition_is_refused(aioshard: Aioshard, kafka: SharedKafka, dead_letter_topic: str) -> None:
    ended = await aioshard("dlt", "show", dead_letter_topic, "--partition", "2", "--bootstrap-servers", kafka.bootstrap)

    assert ended.code == 2
    assert f"topic {dead_letter_topic!r} has no partition 2: it has 0 to 1" in ended.errors


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["no topic!"], "'no topic!' is not a topic name"),
        (["t", "--since", "yesterday"], "'yesterday' was found; expected a time such as 2026-01-31T12:00"),
        (["t", "--record", "orders/0"], "'orders/0' was found; expected TOPIC/PARTITION/OFFSET"),
        (["t"], "bootstrap_servers is not set"),
    ],
)
async def test_contradictory_options_are_refused(aioshard: Aioshard, options: list[str], sentence: str) -> None:
    ended = await aioshard("dlt", "show", *options)

    assert ended.code == 2
    assert sentence in " ".join(ended.errors.split())


async def test_unreachable_brokers_are_a_clear_error(aioshard: Aioshard) -> None:
    ended = await aioshard("dlt", "show", "t", "--bootstrap-servers", "127.0.0.1:1")

    assert ended.code == 1
    assert "none of bootstrap_servers=127.0.0.1:1 could be reached" in ended.errors


# Sending back


class Replay:
    """A dead-letter topic and the topic that its records come from."""

    def __init__(self, kafka: SharedKafka, aioshard: Aioshard, publish: Publish, source: str) -> None:
        self.kafka = kafka
        self.source = source
        self.topic = f"{source}.dlt"
        self.publish = publish
        self._aioshard = aioshard

    def record(self, number: int, **fields: Any) -> Record:
        return record(number, topic=self.source, **fields)

    async def write(self, *records: Record, partition: int = 0, **why: Any) -> list[int]:
        """Writes dead letters into one partition and returns their offsets."""
        messages = [
            dead_letter(self.topic, record, failure(record.offset, **why))._replace(partition=partition)
            for record in records
        ]
        return [offset for _, offset in await self.publish(*messages)]

    async def run(self, *options: str, **expected: int) -> Any:
        """`aioshard dlt replay`, which must end with this code."""
        ended = await self._aioshard(
            "dlt", "replay", self.topic, "--yes", *options, "--bootstrap-servers", self.kafka.bootstrap
        )
        assert ended.code == expected.get("code", 0), ended
        return ended

    async def shown(self) -> dict[int, bool]:
        """Whether the dead letter of each record is done, as `dlt show` says."""
        ended = await self._aioshard("dlt", "show", self.topic, "--json", "--bootstrap-servers", self.kafka.bootstrap)
        return {entry["record"]["offset"]: entry["replayed"] for entry in json.loads(ended.output)["dead_letters"]}

    async def arrived(self) -> list[bytes | None]:
        """The values in the source topic, by partition and offset."""
        return [record.value for record in await self.kafka.read(self.source)]


@pytest.fixture
async def replay(kafka: SharedKafka, aioshard: Aioshard, publish: Publish, topic: str) -> Replay:
    made = Replay(kafka, aioshard, publish, topic)
    forever = {"retention.ms": "-1"}
    await kafka.create_topic(made.source, 4, forever)
    await kafka.create_topic(made.topic, 2, forever)
    return made


async def test_a_dead_letter_is_republished_as_its_original_record(replay: Replay, kafka: SharedKafka) -> None:
    """To its partition too: another producer may have placed the key where ours would not."""
    original = replay.record(41, partition=2, headers=(("trace", b"7"), ("trace", None)), value=None)
    (offset,) = await replay.write(original)

    ended = await replay.run("--timestamp", "original")

    assert ended.output == f"1 dead letter was sent back: {replay.source} 1\n"
    (back,) = await kafka.read(replay.source)
    mark = ("aioshard.replayed", f"{replay.topic}/0/{offset}".encode())
    assert back == original._replace(offset=0, headers=(*original.headers, mark))


async def test_republished_dead_letters_are_not_sent_again(replay: Replay) -> None:
    await replay.write(replay.record(1), replay.record(2))
    await replay.run()
    await replay.write(replay.record(3))

    ended = await replay.run()

    assert ended.output == f"1 dead letter was sent back: {replay.source} 1\n"
    assert await replay.arrived() == [b"1", b"2", b"3"]
    assert await replay.shown() == {1: True, 2: True, 3: True}


async def test_dead_letters_sent_with_a_filter_are_not_sent_again_without_it(replay: Replay) -> None:
    """Also where it is scattered among others, and the run before was one with filters too."""
    await replay.write(*(replay.record(number) for number in (1, 3)))
    await replay.write(*(replay.record(number) for number in (2, 4, 6)), error="TimeoutError")
    await replay.write(replay.record(5, key=b"bob"), replay.record(7, key=b"bob"), partition=1)

    await replay.run("--error", "TimeoutError", "--until", "2023-11-14T22:13:26Z")
    assert await replay.shown() == {1: False, 3: False, 2: True, 4: True, 6: False, 5: False, 7: False}
    await replay.run("--key", "bob")
    assert await replay.shown() == {1: False, 3: False, 2: True, 4: True, 6: False, 5: True, 7: True}
    ended = await replay.run()

    assert ended.output == f"3 dead letters were sent back: {replay.source} 3\n"
    assert sorted(filter(None, await replay.arrived())) == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]


async def test_the_remaining_dead_letters_are_shown_and_counted(
    replay: Replay, aioshard: Aioshard, kafka: SharedKafka
) -> None:
    await replay.write(*(replay.record(number) for number in (1, 2, 3)))
    await replay.write(replay.record(4), error="TimeoutError")
    await replay.run("--error", "ValueError", "--limit", "2")
    show = ["dlt", "show", replay.topic, "--due", "--json", "--bootstrap-servers", kafka.bootstrap]

    report = json.loads((await aioshard(*show)).output)
    page = json.loads((await aioshard(*show, "--page", "newest")).output)

    assert [letter["record"]["offset"] for letter in report["dead_letters"]] == [3, 4]
    assert [letter["record"]["offset"] for letter in page["dead_letters"]] == [4, 3]
    summary = report["summary"]
    assert (summary["selected"], summary["dead_letters"], summary["replayed"]) == (2, 4, 0)
    assert summary["errors"] == {"ValueError": 1, "TimeoutError": 1}


async def test_lines_of_the_audit_log_have_a_time(replay: Replay) -> None:
    """They are all that remains if standard error is kept in a file."""
    await replay.write(replay.record(1))

    ended = await replay.run()

    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ .*send topic=", ended.errors, re.MULTILINE)
    assert ended.errors.count("send topic=") == 1


async def test_an_open_transaction_of_a_killed_run_delays_nothing(replay: Replay, kafka: SharedKafka) -> None:
    """It was killed between its offsets and the end of the transaction; brokers would wait for 10 minutes."""
    await replay.write(replay.record(1), replay.record(2))
    group = sending_group(replay.topic)
    killed = AIOKafkaProducer(
        bootstrap_servers=kafka.bootstrap, transactional_id=f"{group}:all", transaction_timeout_ms=600_000
    )
    await killed.start()
    try:
        await killed.begin_transaction()
        offsets = {aiokafka.TopicPartition(replay.topic, 0): aiokafka.OffsetAndMetadata(2, "")}
        await killed.send_offsets_to_transaction(offsets, group)

        assert await replay.shown() == {1: False, 2: False}
        await replay.run()
    finally:
        with contextlib.suppress(KafkaError):
            await killed.stop()

    assert await replay.arrived() == [b"1", b"2"]
    assert await replay.shown() == {1: True, 2: True}


async def test_again_resends_replayed_dead_letters(replay: Replay) -> None:
    await replay.write(replay.record(1), replay.record(2))
    await replay.run()

    await replay.run("--again", "--record", f"{replay.source}/0/2")

    assert await replay.arrived() == [b"1", b"2", b"2"]


async def test_a_run_without_work_says_why(replay: Replay) -> None:
    """A wrong filter and finished work look the same otherwise."""
    await replay.write(replay.record(1), replay.record(2))
    await replay.write(replay.record(3), error="TimeoutError")
    await replay.run("--limit", "1")

    finished = await replay.run("--record", f"{replay.source}/0/1")
    unmatched = await replay.run("--error", "KeyError")
    preview = await replay.run("--error", "ValueError", "--dry-run", "--json")
    refused = await replay.run("--record", f"{replay.source}/0/1", "--value", "x", code=2)

    assert "--again" in finished.output
    assert "None of the 3 dead letters" in unmatched.output
    assert "--again" not in unmatched.output
    counts = json.loads(preview.output)
    assert (counts["selected"], counts["replayed"], counts["beyond_limit"]) == (1, 1, 0)
    assert "--again" in refused.errors


async def test_a_limited_run_says_how_many_are_left(replay: Replay) -> None:
    await replay.write(*(replay.record(number) for number in range(5)))

    ended = await replay.run("--limit", "2")
    preview = await replay.run("--limit", "2", "--dry-run", "--json")

    assert "3 more are due" in ended.output
    assert json.loads(preview.output)["beyond_limit"] == 1


async def test_records_are_republished_in_order(replay: Replay) -> None:
    """In any order of their dead letters, as after a change of the number of partitions."""
    await replay.write(replay.record(8), replay.record(6), replay.record(9))
    await replay.write(replay.record(5), replay.record(7), partition=1)

    await replay.run()

    assert await replay.arrived() == [b"5", b"6", b"7", b"8", b"9"]


async def test_a_record_with_two_dead_letters_is_republished_once(replay: Replay) -> None:
    """A process that is killed after a dead letter and before the commit writes it again."""
    await replay.write(replay.record(1), replay.record(2), replay.record(1))
    await replay.write(replay.record(2), partition=1)

    ended = await replay.run()

    assert ended.output == f"2 dead letters were sent back: {replay.source} 2\n"
    assert await replay.arrived() == [b"1", b"2"]
    assert (await replay.run()).output.startswith("0 dead letters were sent back\n")


async def test_a_limited_run_is_continued_by_the_next(replay: Replay) -> None:
    await replay.write(*(replay.record(number) for number in range(5)))

    for expected in ([b"0", b"1"], [b"0", b"1", b"2", b"3"], [b"0", b"1", b"2", b"3", b"4"]):
        await replay.run("--limit", "2")
        assert await replay.arrived() == expected


async def test_many_dead_letters_are_republished_in_order(replay: Replay) -> None:
    """More than are sent in one batch."""
    numbers = list(range(2500))
    messages = [dead_letter(replay.topic, replay.record(number), failure()) for number in numbers]
    await replay.publish(*messages)

    ended = await replay.run("--json")

    assert json.loads(ended.output) == {
        "topic": replay.topic,
        "done": {replay.source: 2500},
        "failed": [],
        "error": None,
        "edited": 0,
        "left": 0,
        "stopped": False,
    }
    assert await replay.arrived() == [b"%d" % number for number in numbers]


# Records that cannot be republished


async def test_a_record_its_topic_rejects_is_named_and_the_others_are_sent(
    replay: Replay, kafka: SharedKafka, aioshard: Aioshard, publish: Publish
) -> None:
    small = Replay(kafka, aioshard, publish, f"{replay.source}-small")
    await kafka.create_topic(small.source, 1, {"max.message.bytes": "2000", "retention.ms": "-1"})
    small.topic = replay.topic
    (_, offset, _) = await small.write(small.record(1), small.record(2, value=b"x" * 5000), small.record(3))

    ended = await small.run(code=3)

    assert ended.output == f"2 dead letters were sent back: {small.source} 2\n"
    assert f"Failed: {small.source}/0/2 (dead letter {small.topic}/0/{offset}): a message of" in ended.errors
    assert await small.arrived() == [b"1", b"3"]
    assert await small.shown() == {1: True, 2: False, 3: True}


async def test_a_deleted_topic_is_a_clear_error_and_nothing_is_sent(replay: Replay) -> None:
    await replay.write(replay.record(1), record(2, topic=f"{replay.source}-gone"))

    ended = await replay.run(code=1)

    assert f"Error: topic '{replay.source}-gone' does not exist" in ended.errors
    assert await replay.arrived() == []
    await replay.run("--topic", replay.source)
    assert await replay.arrived() == [b"1"]


async def test_a_record_of_a_deleted_partition_is_sent_by_its_key(replay: Replay) -> None:
    await replay.write(replay.record(1, partition=9))

    await replay.run()

    assert await replay.arrived() == [b"1"]


async def test_retention_does_not_delete_republished_records(replay: Replay, kafka: SharedKafka) -> None:
    """Its record is older than the topic keeps records, so it gets the current time."""
    short = f"{replay.source}-short"
    await kafka.create_topic(short, 1, {"retention.ms": "3600000"})
    await replay.write(record(1, topic=short))

    await replay.run()

    (back,) = await kafka.read(short)
    assert back.timestamp == pytest.approx(time.time(), abs=60)


async def test_the_embedded_broker_stores_replay_progress(aioshard: Aioshard, topic: str) -> None:
    async with EmbeddedBroker() as broker:
        await broker.create_topic(topic, 1)
        await broker.create_topic(f"{topic}.dlt", 1)
        producer = KafkaProducer(Settings(bootstrap_servers=broker.bootstrap_servers))
        await producer.publish(dead_letter(f"{topic}.dlt", record(1, topic=topic), failure()))
        await producer.close()
        command = ["dlt", "replay", f"{topic}.dlt", "--yes", "--bootstrap-servers", broker.bootstrap_servers]

        ended = await aioshard(*command)
        again = await aioshard(*command)

    assert ended.output == f"1 dead letter was sent back: {topic} 1\n"
    assert again.output.startswith("0 dead letters were sent back\n")


async def test_progress_of_a_recreated_topic_is_ignored(replay: Replay, kafka: SharedKafka) -> None:
    """A broker drops them with the topic; this one is made to have kept them."""
    await replay.write(replay.record(1))
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as administration:
        await administration.commit_without_member(
            progress_group(replay.topic), {TopicPartition(replay.topic, 0): Committed(500, "")}
        )

    await replay.run()

    assert await replay.arrived() == [b"1"]
