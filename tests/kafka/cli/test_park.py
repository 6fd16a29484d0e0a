"""`aioshard park`: parked keys are listed, released and dropped."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioshard.core.parking import NEVER
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    ReleaseRequest,
    Removed,
    StorageKey,
    dead_letter,
    park,
    read_parked,
    release,
    tombstone,
)
from tests.support.brokers import SharedKafka

Aioshard = Callable[..., Awaitable[Any]]
Publish = Callable[..., Awaitable[list[tuple[int, int]]]]

FAILED_AT = 1_700_000_000.0
FAILURE = Failure("billing", "on_order", 5, "ValueError", "no such customer", FAILED_AT)


class ParkTopic:
    """A side topic, and the command on it."""

    def __init__(self, kafka: SharedKafka, aioshard: Aioshard, publish: Publish, topic: str) -> None:
        self.kafka = kafka
        self.topic = topic
        self.publish = publish
        self._aioshard = aioshard

    async def park(self, offset: int, key: bytes | None, *, partition: int = 0, **fields: Any) -> None:
        """Parks a record of "orders"."""
        why = FAILURE._replace(**fields.pop("why", {}))
        record = Record(fields.pop("topic", "orders"), partition, offset, key, b"value", (("trace", b"7"),), 1.6e9)
        await self.publish(park(self.topic, record, why, **{"generation": 4, "due": FAILED_AT + 60, **fields}))

    async def run(self, command: str, *options: str, code: int = 0) -> Any:
        ended = await self._aioshard("park", command, self.topic, *options, "--bootstrap-servers", self.kafka.bootstrap)
        assert ended.code == code, ended
        return ended

    async def listed(self, *options: str) -> Any:
        return json.loads((await self.run("list", "--json", *options)).output)["parked"]

    async def written(self) -> list[Any]:
        """Return the records that the command wrote: everything after the fixture's."""
        records = [record for record in await self.kafka.read(self.topic) if not record.headers]
        return [read_parked(record) for record in records]


@pytest.fixture
async def parked(kafka: SharedKafka, aioshard: Aioshard, publish: Publish, topic: str) -> ParkTopic:
    """Two keys in partition 0, two records without a key in partition 1; and records that were already removed."""
    made = ParkTopic(kafka, aioshard, publish, topic)
    await kafka.create_topic(topic, 2, {"cleanup.policy": "compact"})
    await made.park(7, b"alice", why={"failed_at": FAILED_AT + 7})
    await made.park(9, b"alice", why={"failed_at": FAILED_AT + 7})
    await made.park(8, b"bob", why={"error": "TimeoutError", "handler": "on_refund", "group": "accounts"})
    await made.park(3, None, partition=1, why={"failed_at": FAILED_AT + 3})
    await made.park(4, None, partition=1, due=NEVER, why={"failed_at": FAILED_AT + 4})
    await made.park(5, b"alice", why={"failed_at": FAILED_AT + 5})
    return made


def storage_key(offset: int, generation: int = 4) -> StorageKey:
    """Return the key of a stored record of partition 0."""
    return StorageKey(Coordinates("orders", 0, offset), generation)


ALICE, BOB = Coordinates("orders", 0, 5), Coordinates("orders", 0, 8)


# Listing


async def test_keys_are_listed_with_the_records_behind_the_first(
    parked: ParkTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")

    ended = await parked.run("list")

    lines = ended.output.splitlines()
    assert lines[0] == f"6 parked records of 4 keys in {parked.topic}"
    assert [line.split("  ") and line.split()[:3] for line in lines[3:]] == [
        ["bob", "orders/0/8", "1"],
        ["-", "orders/1/3", "1"],
        ["-", "orders/1/4", "1"],
        ["alice", "orders/0/5", "3"],
    ]
    assert "2023-11-14 22:13:20+00:00  2023-11-14 22:14:20+00:00  0        on_refund  TimeoutError: no" in lines[3]
    assert "  when released  " in lines[5]


async def test_json_has_every_field_of_a_key(parked: ParkTopic) -> None:
    assert await parked.listed("--key", "alice") == [
        {
            "key": "alice",
            "topic": "orders",
            "partition": 0,
            "offsets": [5, 7, 9],
            "due": FAILED_AT + 60,
            "retries": 0,
            "release_requested": False,
            **FAILURE._replace(failed_at=FAILED_AT + 5)._asdict(),
        }
    ]


async def test_the_latest_copy_counts_and_removed_records_are_not_listed(parked: ParkTopic) -> None:
    await parked.park(5, b"alice", due=FAILED_AT + 900, retries=3, why={"error": "KeyError"})
    await parked.publish(*(tombstone(parked.topic, StorageKey(gone, 4)) for gone in (BOB, Coordinates("orders", 0, 7))))

    listed = {row["key"]: row for row in await parked.listed("--partition", "0")}

    assert listed.keys() == {"alice"}
    assert listed["alice"]["offsets"] == [5, 9]
    assert (listed["alice"]["due"], listed["alice"]["retries"]) == (FAILED_AT + 900, 3)
    assert listed["alice"]["error"] == "KeyError"


async def test_a_release_request_is_shown_until_it_is_answered(parked: ParkTopic) -> None:
    await parked.publish(release(parked.topic, Coordinates("orders", 0, 9)))
    assert [row["release_requested"] for row in await parked.listed("--key", "alice")] == [True]

    await parked.publish(release(parked.topic, Coordinates("orders", 0, 9), answered=True))

    assert [row["release_requested"] for row in await parked.listed("--key", "alice")] == [False]


@pytest.mark.parametrize(
    ("options", "firsts"),
    [
        (["--handler", "on_refund"], [8]),
        (["--group", "billing", "--partition", "0"], [5]),
        (["--record", "orders/0/9"], [5]),
        (["--record", "orders/1/4"], [4]),
        (["--topic", "refunds"], []),
        (["--until", "2023-11-14T22:13:24Z"], [8, 3]),
        (["--limit", "1"], [8]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0] if value else "", str) else "",
)
async def test_filters_select_keys(parked: ParkTopic, options: list[str], firsts: list[int]) -> None:
    assert [row["offsets"][0] for row in await parked.listed(*options)] == firsts


async def test_a_shortened_list_says_so(parked: ParkTopic, publish: Publish) -> None:
    await publish(dead_letter(parked.topic, Record("orders", 0, 1, b"k", b"", (), 1.6e9), FAILURE))

    ended = await parked.run("list", "--limit", "1", "--key", "alice")
    assert ended.output.splitlines()[0] == f"3 of 6 parked records of 1 key in {parked.topic}"
    ended = await parked.run("list", "--limit", "3")
    assert ended.output.endswith("\n1 more key not shown: --limit shows more\n")


async def test_a_key_in_several_partitions_and_topics_is_listed_for_each(parked: ParkTopic) -> None:
    await parked.park(11, b"alice", partition=1)
    await parked.park(11, b"alice", topic="refunds")

    listed = await parked.listed("--key", "alice")

    assert [(row["topic"], row["partition"], row["offsets"]) for row in listed] == [
        ("orders", 1, [11]),
        ("refunds", 0, [11]),
        ("orders", 0, [5, 7, 9]),
    ]


# Releasing


async def test_a_release_is_requested_once_per_key(parked: ParkTopic) -> None:
    ended = await parked.run("release", "--key", "alice")

    assert ended.output == (
        "Requested the release of 1 key with 3 parked records; the members of 'billing' will retry them\n"
    )
    assert await parked.written() == [ReleaseRequest(ALICE)]


async def test_a_record_selects_its_key(parked: ParkTopic) -> None:
    ended = await parked.run("release", "--record", "orders/0/9", "--json")

    report = json.loads(ended.output)
    assert report == {"topic": parked.topic, "keys": 1, "records": 3, "requested": ["orders/0/5"]}
    assert await parked.written() == [ReleaseRequest(ALICE)]


async def test_all_keys_can_be_released(parked: ParkTopic) -> None:
    ended = await parked.run("release", "--all")

    assert "release of 4 keys with 6 parked records" in ended.output
    assert "the members of 'accounts', 'billing' will retry them" in ended.output
    assert await parked.written() == [
        ReleaseRequest(BOB),
        ReleaseRequest(ALICE),
        ReleaseRequest(Coordinates("orders", 1, 3)),
        ReleaseRequest(Coordinates("orders", 1, 4)),
    ]


# Giving up


async def test_without_yes_nothing_is_dropped(parked: ParkTopic) -> None:
    ended = await parked.run("drop", "--key", "alice")

    assert ended.output == (
        "Would drop 3 parked records: orders/0/5, orders/0/7, orders/0/9\nNothing was dropped: --yes drops, for good.\n"
    )
    assert await parked.written() == []


async def test_a_key_is_dropped_with_all_its_records(parked: ParkTopic) -> None:
    ended = await parked.run("drop", "--key", "alice", "--yes")

    assert ended.output == "Dropped 3 parked records\n"
    assert await parked.written() == [Removed(StorageKey(Coordinates("orders", 0, offset), 4)) for offset in (5, 7, 9)]
    assert await parked.listed("--key", "alice") == []


async def test_releases_and_drops_are_in_the_audit_log(parked: ParkTopic, caplog: pytest.LogCaptureFixture) -> None:
    await parked.run("release", "--key", "bob")
    await parked.run("drop", "--record", "orders/0/5", "--record", "orders/0/7", "--yes")
    await parked.run("drop", "--key", "bob")

    audited = [found.getMessage() for found in caplog.records if found.name == "aioshard.web.audit"]
    assert [line.partition(" by user ")[0] for line in audited] == [
        f'release topic="{parked.topic}" records="orders/0/8"',
        f'drop topic="{parked.topic}" records="orders/0/5,orders/0/7"',
    ]


async def test_values_and_headers_select_parked_records(parked: ParkTopic) -> None:
    await parked.publish(
        park(
            parked.topic,
            Record("orders", 0, 20, b"carol", b"needle", (("tenant", b"acme"),), 1.6e9),
            FAILURE,
            generation=4,
            due=FAILED_AT,
        )
    )

    assert [row["key"] for row in await parked.listed("--text", "needle")] == ["carol"]
    assert [row["key"] for row in await parked.listed("--header", "tenant=acme")] == ["carol"]


async def test_a_record_is_dropped_alone(parked: ParkTopic) -> None:
    """For a record that never succeeds: the ones behind it resume."""
    await parked.run("drop", "--record", "orders/0/5", "--yes")

    assert await parked.written() == [Removed(StorageKey(ALICE, 4))]
    assert [row["offsets"] for row in await parked.listed("--key", "alice")] == [[7, 9]]


async def test_a_record_parked_by_two_members_is_listed_once(parked: ParkTopic) -> None:
    """As after one of them was slow to notice that the partition was taken away from it."""
    await parked.park(5, b"alice", generation=5, due=FAILED_AT + 900)
    listed = await parked.listed("--key", "alice")
    assert [(row["offsets"], row["due"]) for row in listed] == [([5, 7, 9], FAILED_AT + 900)]

    await parked.run("drop", "--record", "orders/0/5", "--yes")

    assert await parked.written() == [Removed(storage_key(5)), Removed(storage_key(5, generation=5))]
    assert [row["offsets"] for row in await parked.listed("--key", "alice")] == [[7, 9]]


async def test_a_removal_by_a_stale_member_affects_only_its_own_copy(parked: ParkTopic) -> None:
    await parked.park(5, b"alice", generation=5)

    await parked.publish(tombstone(parked.topic, storage_key(5)))

    assert [row["offsets"] for row in await parked.listed("--key", "alice")] == [[5, 7, 9]]


async def test_thousands_of_records_are_dropped(parked: ParkTopic, publish: Publish) -> None:
    records = [Record("orders", 0, 100 + number, b"%d" % number, b"", (), 1.6e9) for number in range(1500)]
    await publish(*(park(parked.topic, record, FAILURE, generation=4, due=1.0) for record in records))

    ended = await parked.run("drop", "--all", "--yes", "--json")

    assert len(json.loads(ended.output)["records"]) == 1506
    assert await parked.listed() == []


# Refusals


@pytest.mark.parametrize("command", ["release", "drop"])
async def test_an_unparked_record_is_named(parked: ParkTopic, command: str) -> None:
    ended = await parked.run(command, "--key", "carol", code=3)

    assert ended.errors == (
        f"Error: no parked record in {parked.topic} matches; `aioshard park list` shows all of them\n"
    )


@pytest.mark.parametrize("command", ["release", "drop"])
async def test_all_on_an_empty_topic_is_not_an_error(
    aioshard: Aioshard, kafka: SharedKafka, topic: str, command: str
) -> None:
    await kafka.create_topic(topic, 1)

    ended = await aioshard("park", command, topic, "--all", "--bootstrap-servers", kafka.bootstrap)

    assert (ended.code, ended.errors) == (0, "")


@pytest.mark.parametrize("command", ["release", "drop"])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "select records with --key, --record or another filter"),
        (["--partition", "1"], "select records with --key, --record or another filter"),
        (["--all", "--key", "alice"], "--all and a filter were both given"),
        (["--record", "alice"], "'alice' was found; expected TOPIC/PARTITION/OFFSET"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_contradictory_selections_are_refused(
    aioshard: Aioshard, command: str, options: list[str], sentence: str
) -> None:
    ended = await aioshard("park", command, "t", *options, "--bootstrap-servers", "127.0.0.1:1")

    assert ended.code == 2
    assert sentence in " ".join(ended.errors.split())


async def test_foreign_records_in_the_park_topic_are_tolerated(parked: ParkTopic, publish: Publish) -> None:
    await publish(Message(parked.topic, b"1", b"release/orders/0/x"), Message(parked.topic, b"", b"orders/7/5@3"))

    ended = await parked.run("list")

    assert ended.code == 0
