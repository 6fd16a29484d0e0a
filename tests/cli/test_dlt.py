"""`aioshard dlt`: dead letters are shown, sent back once, and deleted from the start."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard.records import Record
from aioshard.serde.side_records import Failure, dead_letter, park
from tests.support.shared_kafka import SharedKafka

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
async def letters(kafka: SharedKafka, topic: str, publish: Publish) -> str:
    """A dead-letter topic with two partitions and seven records, of which one is no dead letter.

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
        await publish(dead_letter(topic, original, why)._replace(partition=partition))
    await publish(park(topic, record(7, partition=1), failure(7), due=1.0))
    return topic


# Showing


async def test_dead_letters_are_counted_and_listed_in_the_order_of_their_failures(
    aioshard: Aioshard, kafka: SharedKafka, letters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")

    ended = await aioshard("dlt", "show", letters, "--bootstrap-servers", kafka.bootstrap)

    assert (ended.code, ended.errors) == (0, "")
    lines = ended.output.splitlines()
    assert lines[:6] == [
        f"6 dead letter(s) in {letters}, 0 of them sent back or processed already",
        f"1 record(s) of {letters} are no dead letters of aioshard",
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


async def test_a_program_is_told_all_that_is_in_them(aioshard: Aioshard, kafka: SharedKafka, letters: str) -> None:
    ended = await aioshard("dlt", "show", letters, "--json", "--bootstrap-servers", kafka.bootstrap)

    told = json.loads(ended.output)
    assert told["topic"] == letters
    assert told["summary"] == {
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
    by_offset = {one["record"]["offset"]: one for one in told["dead_letters"]}
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
    }
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
        (["--since", "1h"], set()),
        (["--error", "TimeoutError", "--handler", "on_refund"], set()),
        (["--limit", "2"], {5, 6}),
        (["--limit", "0"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_filters_choose(
    aioshard: Aioshard, kafka: SharedKafka, letters: str, options: list[str], offsets: set[int]
) -> None:
    ended = await aioshard("dlt", "show", letters, *options, "--json", "--bootstrap-servers", kafka.bootstrap)

    assert ended.code == 0
    assert {one["record"]["offset"] for one in json.loads(ended.output)["dead_letters"]} == offsets


async def test_what_a_table_leaves_out_is_said(aioshard: Aioshard, kafka: SharedKafka, letters: str) -> None:
    ended = await aioshard("dlt", "show", letters, "--limit", "2", "--bootstrap-servers", kafka.bootstrap)

    assert ended.output.endswith("\n4 that failed before are not shown: --limit shows more\n")


async def test_an_empty_topic_is_no_error(aioshard: Aioshard, kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, 3)

    ended = await aioshard("dlt", "show", topic, "--bootstrap-servers", kafka.bootstrap)

    assert ended == (0, f"0 dead letter(s) in {topic}, 0 of them sent back or processed already\n", "")


# What is refused


async def test_a_topic_that_is_missing_is_a_sentence_and_is_not_created(
    aioshard: Aioshard, kafka: SharedKafka, topic: str
) -> None:
    for _ in range(2):
        ended = await aioshard("dlt", "show", topic, "--bootstrap-servers", kafka.bootstrap)

        assert ended == (1, "", f"Error: topic {topic!r} does not exist: create it, or check its name\n")


async def test_a_partition_that_is_missing_is_refused(aioshard: Aioshard, kafka: SharedKafka, letters: str) -> None:
    ended = await aioshard("dlt", "show", letters, "--partition", "2", "--bootstrap-servers", kafka.bootstrap)

    assert ended.code == 2
    assert f"topic {letters!r} has no partition 2: it has 0 to 1" in ended.errors


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["no topic!"], "'no topic!' is no topic name"),
        (["t", "--since", "yesterday"], "'yesterday' was found, a moment was expected: 2026-01-31"),
        (["t", "--record", "orders/0"], "'orders/0' was found, TOPIC/PARTITION/OFFSET was expected"),
        (["t"], "bootstrap_servers is not set"),
    ],
)
async def test_options_that_make_no_sense_are_refused(aioshard: Aioshard, options: list[str], sentence: str) -> None:
    ended = await aioshard("dlt", "show", *options)

    assert ended.code == 2
    assert sentence in " ".join(ended.errors.split())


async def test_brokers_that_are_away_are_a_sentence(aioshard: Aioshard) -> None:
    ended = await aioshard("dlt", "show", "t", "--bootstrap-servers", "127.0.0.1:1")

    assert ended.code == 1
    assert "none of bootstrap_servers=127.0.0.1:1 could be reached" in ended.errors
