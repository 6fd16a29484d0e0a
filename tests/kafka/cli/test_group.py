"""`aioshard group show`, `lag`, `reset` and `leave` on a real broker."""

import asyncio
import datetime as dt
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.support.brokers import SharedKafka

Aioshard = Callable[..., Awaitable[Any]]
Publish = Callable[..., Awaitable[list[tuple[int, int]]]]

LONG_AGO = 1_600_000_000.0


class World:
    """A topic of two partitions with ten and five records, one a second since `LONG_AGO`; a group; and the command."""

    def __init__(self, kafka: SharedKafka, aioshard: Aioshard, brokers: KafkaAdmin, topic: str, group: str) -> None:
        self.kafka = kafka
        self.brokers = brokers
        self.topic = topic
        self.group = group
        self.one, self.two = TopicPartition(topic, 0), TopicPartition(topic, 1)
        self._aioshard = aioshard

    async def run(self, command: str, *options: str, code: int = 0) -> Any:
        brokers = ("--bootstrap-servers", self.kafka.bootstrap)
        ended = await self._aioshard("group", command, self.group, *options, *brokers)
        assert ended.code == code, ended
        return ended

    async def json(self, command: str, *options: str) -> Any:
        return json.loads((await self.run(command, "--json", *options)).output)

    async def commit(self, at: TopicPartition, offset: int, **metadata: Any) -> None:
        text = CommitMetadata(**metadata).text(offset)
        await self.brokers.commit_without_member(self.group, {at: Committed(offset, text)})

    async def committed(self) -> dict[int, Committed]:
        return {at.partition: found for at, found in (await self.brokers.all_commits(self.group)).items()}

    def app(self, **options: Any) -> App:
        app = App(self.group, bootstrap_servers=self.kafka.bootstrap, auto_offset_reset="earliest", **options)

        @app.consume(self.topic)
        async def handle(record: Record) -> None: ...

        return app


@pytest.fixture
async def world(
    kafka: SharedKafka, aioshard: Aioshard, publish: Publish, topic: str, group: str
) -> AsyncIterator[World]:
    await kafka.create_topic(topic, 2, {"retention.ms": "-1"})
    await publish(*(Message(topic, b"", partition=0, timestamp=LONG_AGO + number) for number in range(10)))
    await publish(*(Message(topic, b"", partition=1, timestamp=LONG_AGO + number) for number in range(5)))
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers:
        yield World(kafka, aioshard, brokers, topic, group)


# show


async def test_a_group_without_members_is_shown_with_its_stored_metadata(world: World) -> None:
    await world.commit(world.one, 3, finished=(Run(5, 8),))
    await world.commit(world.two, 1)

    found = await world.json("show")

    assert (found["state"], found["protocol"], found["members"]) == ("empty", "classic", [])
    assert found["coordinator"]["port"] > 0
    assert found["partitions"] == [
        {
            "topic": world.topic,
            "partition": partition,
            "committed": committed,
            "log_start": 0,
            "end": end,
            "lag": end - committed,
            "member": None,
            "finished_beyond": finished,
            "foreign": None,
            "ignored": [],
        }
        for partition, committed, end, finished in (
            (0, 3, 10, [[5, 8]]),
            (1, 1, 5, []),
        )
    ]
    output = (await world.run("show")).output
    assert "is empty, protocol classic" in output
    assert "It has no members." in output


async def test_members_are_shown_with_their_partitions(world: World) -> None:
    async with world.app(group_instance_id="left-hand", client_id="billing-1"):
        (member,) = (await world.json("show"))["members"]
        output = (await world.run("show")).output

    assert (member["instance_id"], member["client_id"]) == ("left-hand", "billing-1")
    assert member["partitions"] == [[world.topic, 0], [world.topic, 1]]
    assert f"left-hand    billing-1  127.0.0.1  {world.topic}/0 {world.topic}/1" in output


async def test_an_unknown_group_is_reported_without_error(world: World) -> None:
    """Mostly its name is misspelt, and then a lag of 0 would say that all is well."""
    assert (await world.json("show"))["state"] == "dead"
    for command in ("show", "lag"):
        assert f"unknown group {world.group!r}: " in (await world.run(command)).output, command


# lag


async def test_lag_is_shown_with_its_cause(world: World) -> None:
    await world.commit(world.one, 3, finished=(Run(5, 8),))
    await world.commit(world.two, 5)

    found = await world.json("lag", "--topic", world.topic)

    assert found["lag"] == 7
    assert found["cause"].startswith("the group has no members")
    assert [partition["lag"] for partition in found["partitions"]] == [7, 0]
    assert [partition["cause"] for partition in found["partitions"]] == ["the group has no members", None]
    assert found["tail"] == {"partitions": 1, "seconds": None}
    measured = await world.run("lag", "--over", "0.1")
    assert "90% of the lag is in 1 of 2 partitions." in measured.output, "it does not shrink"
    lines = (await world.run("lag")).output.splitlines()
    assert f"group {world.group!r} is empty with 0 members, and 7 offsets behind; coordinated by broker " in lines[0]
    assert lines[1].startswith("the group has no members")
    where = [f"{world.topic}/0", "3", "10", "7", "3"]
    assert lines[2] == "90% of the lag is in 1 of 2 partitions."
    assert lines[4].split() == [*where, "-", "the", "group", "has", "no", "members"]


async def test_a_hanging_record_is_the_cause_of_lag(world: World) -> None:
    """A member that hangs: it is there, the group is stable, and one partition does not move."""
    hangs, released = asyncio.Event(), asyncio.Event()
    app = App(world.group, bootstrap_servers=world.kafka.bootstrap, auto_offset_reset="earliest", commit_interval=0.1)

    @app.consume(world.topic, shard_by="record")
    async def handle(record: Record) -> None:
        if record.partition == 0 and record.offset == 3:
            hangs.set()
            await released.wait()

    async with app:
        await asyncio.wait_for(hangs.wait(), 30.0)
        async with asyncio.timeout(30.0):
            while (found := await world.json("lag"))["partitions"][0]["finished_beyond"] != [[4, 10]]:  # noqa: ASYNC110 - brokers tell nobody
                await asyncio.sleep(0.05)
        released.set()

    assert (found["state"], found["members"], found["cause"]) == ("stable", 1, None)
    stuck, finished = found["partitions"]
    assert (stuck["committed"], stuck["lag"]) == (3, 7)
    assert stuck["cause"].startswith("record 3 is not finished, 6 beyond it are")
    assert finished["cause"] is None


# reset


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("earliest", {0: 0, 1: 0}),
        ("latest", {0: 10, 1: 5}),
        ("4", {0: 4, 1: 4}),
        (dt.datetime.fromtimestamp(LONG_AGO + 7, dt.UTC).isoformat(), {0: 7, 1: 5}),
    ],
)
async def test_a_group_is_reset_only_with_yes_and_without_stored_completions(
    world: World, to: str, expected: dict[int, int]
) -> None:
    await world.commit(world.one, 3, finished=(Run(5, 8),))
    await world.commit(world.two, 3)
    before = await world.committed()

    dry = await world.run("reset", "--to", to)

    assert "Nothing was changed: --yes resets." in dry.output
    assert await world.committed() == before
    report = await world.json("reset", "--to", to, "--yes")
    assert {
        partition["partition"]: (partition["committed"], partition["to"]) for partition in report["partitions"]
    } == {number: (3, offset) for number, offset in expected.items()}
    assert await world.committed() == {number: Committed(offset, "") for number, offset in expected.items()}
    assert "Nothing to change" in (await world.run("reset", "--to", to, "--yes")).output


async def test_only_the_named_partitions_are_reset(world: World) -> None:
    await world.run("reset", "--to", "2", "--topic", world.topic, "--partition", "1", "--yes")
    assert await world.committed() == {1: Committed(2, "")}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--to", "latest"), "has no commits: name the --topic"),
        (("--to", "11", "--topic", "TOPIC"), "is outside TOPIC/0: its log is from 0 to 10"),
        (("--to", "1", "--partition", "1"), "--partition needs exactly one --topic"),
        (("--to", "1", "--topic", "TOPIC", "--partition", "7"), "TOPIC/7 does not exist"),
        (("--to", "yesterday", "--topic", "TOPIC"), "expected 'earliest', 'latest', an offset"),
    ],
)
async def test_impossible_targets_are_refused(world: World, options: tuple[str, ...], why: str) -> None:
    given = (option.replace("TOPIC", world.topic) for option in options)
    ended = await world.run("reset", *given, "--yes", code=2)
    assert why.replace("TOPIC", world.topic) in " ".join(ended.errors.split())
    assert await world.committed() == {}


@pytest.mark.parametrize(
    "options",
    [{"session_timeout": 6, "heartbeat_interval": 0.2}, {"client": "confluent", "group_protocol": "consumer"}],
    ids=["classic", "KIP-848"],
)
async def test_a_group_with_members_cannot_be_reset(world: World, options: dict[str, Any]) -> None:
    app = world.app(**options)
    async with app:
        async with asyncio.timeout(20):
            while sum(committed.offset for committed in (await world.committed()).values()) < 15:  # noqa: ASYNC110 - the broker tells nobody
                await asyncio.sleep(0.05)
        before = await world.committed()

        refused = await world.run("reset", "--to", "earliest", "--yes", code=4)

        assert "has members" in refused.errors
        assert {n: committed.offset for n, committed in (await world.committed()).items()} == {
            n: committed.offset for n, committed in before.items()
        }


# leave


async def test_a_stopped_static_member_can_be_removed(world: World) -> None:
    async with world.app(group_instance_id="left-hand", session_timeout=30):
        pass
    assert [member["instance_id"] for member in (await world.json("show"))["members"]] == ["left-hand"]

    ended = await world.run("leave", "left-hand")

    assert ended.output == f"'left-hand' has left group {world.group!r}.\n"
    assert (await world.json("show"))["members"] == []
    assert "has no static member 'left-hand'" in (await world.run("leave", "left-hand", code=1)).errors


async def test_json_names_the_removed_member(world: World) -> None:
    async with world.app(group_instance_id="left-hand", session_timeout=30):
        pass
    assert await world.json("leave", "left-hand") == {"group": world.group, "left": "left-hand"}
    assert (await world.json("show"))["members"] == []


# Manually assigned partitions


async def test_a_group_with_manual_assignment_is_empty_and_shows_its_commits(world: World) -> None:
    async with world.app(assign={world.topic: [0]}, commit_interval=0.1) as app:
        async with asyncio.timeout(20):
            while (await world.committed()).get(0, Committed(0, "")).offset != 10:  # noqa: ASYNC110 - brokers tell nobody
                await asyncio.sleep(0.05)
        shown = await world.json("show")
        assert (shown["state"], shown["members"]) == ("empty", [])
        lags = {partition["partition"]: partition for partition in (await world.json("lag"))["partitions"]}
        assert lags[0]["lag"] == 0

        await world.run("reset", "--to", "earliest", "--yes")  # nothing tells the brokers that the app runs
        assert (await world.committed())[0].offset == 0
        await app.seek(world.topic, 0, 5)
        assert (await world.committed())[0].offset >= 5
