"""`aioshard group show`, `lag`, `reset`, `configure` and `leave` on a real broker."""

import asyncio
import datetime as dt
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation

from aioshard import App, Record
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.group.transport import MemberTransport
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.engine.live_apps import engine_of
from tests.support.access import allow, create_scram_user
from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker
from tests.support.kafka_properties import Credentials

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
    assert f"group {world.group!r} is empty, with the classic protocol\ncoordinated by broker 1 at " in output
    assert "It has no members." in output
    assert (found["session_timeout"], found["heartbeat_interval"]) == (None, None)
    assert "session timeout" not in output, "each member brings its own"


async def test_members_are_shown_with_their_partitions(world: World) -> None:
    async with world.app(group_instance_id="left-hand", client_id="billing-1", group_protocol="classic"):
        (member,) = (await world.json("show"))["members"]
        output = (await world.run("show")).output

    assert (member["instance_id"], member["client_id"], member["protocol"]) == ("left-hand", "billing-1", "classic")
    assert member["partitions"] == [[world.topic, 0], [world.topic, 1]]
    assert f"left-hand    billing-1  127.0.0.1  {world.topic}/0 {world.topic}/1" in output
    assert "is stable, with the classic protocol and assignor 'cooperative-fair'\n" in output


async def test_a_group_of_the_consumer_protocol_is_shown_with_its_times(world: World) -> None:
    await world.run("configure", "--heartbeat-interval", "0.4")
    async with world.app(group_protocol="consumer"):
        found = await world.json("show")
        lines = (await world.run("show")).output.splitlines()

    assert found["protocol"] == "consumer"
    assert found["session_timeout"] == {"seconds": 6.0, "from": "brokers"}
    assert found["heartbeat_interval"] == {"seconds": 0.4, "from": "group"}
    assert lines[0].startswith(f"group {world.group!r} is stable, with the consumer protocol (KIP-848) and assignor ")
    assert lines[2] == "session timeout 6 s (default of the brokers), heartbeat interval 0.4 s (set for the group)"


async def test_members_that_have_not_migrated_are_counted(world: World) -> None:
    async with world.app(assignor="range"):
        before = (await world.run("show")).output
        async with world.app(group_protocol="consumer"):
            found = await world.json("show")
            output = (await world.run("show")).output
    assert sorted(member["protocol"] for member in found["members"]) == ["classic", "consumer"]
    lines = output.splitlines()
    assert (
        lines[3] == "the classic protocol is still in use by 1 of 2 members, each with the session timeout of its app"
    )
    assert lines[4].split()[-1] == "protocol"
    assert sorted(line.split()[-1] for line in lines[5:7]) == ["classic", "consumer"]
    assert "still in use" not in before
    assert "partitions  protocol" not in before


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
    [{"session_timeout": 6, "heartbeat_interval": 0.2}, {"group_protocol": "consumer"}],
    ids=["classic", "consumer"],
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


# configure


def time(seconds: float, origin: str, least: float, most: float) -> dict[str, Any]:
    return {"seconds": seconds, "from": origin, "least": least, "most": most}


async def test_times_are_set_shown_and_reset_before_the_group_exists(world: World) -> None:
    before = await world.json("configure")
    assert before == {
        "group": world.group,
        "protocol": None,
        "changed": False,
        "session_timeout": time(6.0, "brokers", 0.5, 60.0),
        "heartbeat_interval": time(0.5, "brokers", 0.1, 15.0),
    }

    both = await world.json("configure", "--session-timeout", "30", "--heartbeat-interval", "2.5")
    assert both["changed"]
    assert both["session_timeout"] == time(30.0, "group", 0.5, 60.0)
    assert both["heartbeat_interval"] == time(2.5, "group", 0.1, 15.0)
    one = await world.run("configure", "--session-timeout", "31.5")
    assert one.output.splitlines() == [
        f"times of group {world.group!r} under the consumer protocol (KIP-848):",
        "time                in force  source             brokers accept",
        "session timeout     31.5 s    set for the group  0.5 to 60 s",
        "heartbeat interval  2.5 s     set for the group  0.1 to 15 s",
        f"Session timeout set for group {world.group!r}.",
        "The group does not exist yet: its first member under group_protocol='consumer' will get these times.",
    ]
    assert (await world.json("configure"))["session_timeout"]["seconds"] == 31.5

    removed = await world.run("configure", "--reset")
    assert f"The brokers' defaults apply to group {world.group!r} now." in removed.output
    assert await world.json("configure") == before
    assert (await world.json("configure", "--reset"))["changed"], "also if there is nothing to remove"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ("--session-timeout", "61"),
            (
                "a session timeout of 61 s is outside 0.5 to 60 s (group.consumer.min.session.timeout.ms and "
                "group.consumer.max.session.timeout.ms); choose a value within the limits"
            ),
        ),
        (
            ("--session-timeout", "0.4", "--heartbeat-interval", "0.09"),
            (
                "a session timeout of 0.4 s is outside 0.5 to 60 s (group.consumer.min.session.timeout.ms and "
                "group.consumer.max.session.timeout.ms), and a heartbeat interval of 0.09 s is outside 0.1 to 15 s "
                "(group.consumer.min.heartbeat.interval.ms and group.consumer.max.heartbeat.interval.ms); choose"
            ),
        ),
        (("--session-timeout", "9e6"), "a session timeout of 9e+06 s is outside 0.5 to 60 s"),
        (("--session-timeout", "1"), "a session timeout of 1 s is less than 3 times a heartbeat interval of 0.5 s"),
        (("--heartbeat-interval", "3"), "a session timeout of 6 s is less than 3 times a heartbeat interval of 3 s"),
    ],
)
async def test_times_outside_the_limits_are_refused_and_change_nothing(
    world: World, options: tuple[str, ...], why: str
) -> None:
    before = await world.json("configure")
    ended = await world.run("configure", *options, code=2)
    assert why in " ".join(ended.errors.split())
    assert await world.json("configure") == before


async def test_a_live_member_gets_the_times_of_its_group(world: World) -> None:
    await world.run("configure", "--session-timeout", "9", "--heartbeat-interval", "0.3")
    async with world.app(group_protocol="consumer") as app, asyncio.timeout(20):
        transport = engine_of(app).client.get()
        assert isinstance(transport, MemberTransport)
        while transport.inherits_within != 9.3:  # noqa: ASYNC110 - the thread of the member tells nobody
            await asyncio.sleep(0.02)
        changed = await world.json("configure", "--session-timeout", "10")
        assert changed["protocol"] == "consumer"
        assert changed["session_timeout"]["seconds"] == 10.0
        assert "yet" not in (await world.run("configure")).output


async def test_times_of_a_classic_group_are_said_to_have_no_effect(world: World) -> None:
    async with world.app(group_protocol="classic"):
        ended = await world.run("configure", "--session-timeout", "30")
        assert "They have no effect yet: the group uses the classic protocol" in ended.output
        assert (await world.json("configure"))["protocol"] == "classic"


async def log_in(kafka: SharedKafka, monkeypatch: pytest.MonkeyPatch) -> Credentials:
    """Lets the commands run as a user that may do nothing until an ACL allows it; returns the user."""
    user = Credentials(f"user-{uuid.uuid4().hex[:8]}", "secret")
    await create_scram_user(kafka, user)
    for name, value in {
        "BOOTSTRAP_SERVERS": kafka.secure_bootstrap,
        "SECURITY_PROTOCOL": "SASL_SSL",
        "SSL_CAFILE": str(kafka.certificates.ca_file),
        "SASL_MECHANISM": "SCRAM-SHA-512",
        "SASL_USERNAME": user.username,
        "SASL_PASSWORD": user.password,
    }.items():
        monkeypatch.setenv(f"AIOSHARD_{name}", value)
    return user


async def test_a_group_is_shown_without_its_times_if_they_may_not_be_seen(
    world: World, aioshard: Aioshard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.app(group_protocol="consumer"):
        user = await log_in(world.kafka, monkeypatch)
        await allow(world.kafka, user, "group", world.group, AclOperation.READ)
        await allow(world.kafka, user, "topic", world.topic, AclOperation.DESCRIBE)
        ended = await aioshard("group", "show", world.group)
        as_json = await aioshard("group", "show", world.group, "--json")

    assert ended.code == 0, ended
    lines = ended.output.splitlines()
    assert "with the consumer protocol (KIP-848)" in lines[0]
    assert lines[2] == "session timeout and heartbeat interval unknown: grant DESCRIBE_CONFIGS on the group to see them"
    assert json.loads(as_json.output)["session_timeout"] is None


async def test_without_permission_the_missing_one_is_named(
    world: World, aioshard: Aioshard, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await log_in(world.kafka, monkeypatch)

    async def configure(*options: str) -> Any:
        return await aioshard("group", "configure", world.group, *options)

    unseen = await configure()
    assert unseen.code == 1
    assert f"to see the settings of group {world.group!r}: grant DESCRIBE_CONFIGS on it" in unseen.errors

    await allow(world.kafka, user, "group", world.group, AclOperation.DESCRIBE_CONFIGS)
    seen = await configure()
    assert seen.output.splitlines()[2] == "session timeout     6 s       default of the brokers  -"
    refused = await configure("--session-timeout", "30")
    assert refused.code == 1
    assert f"to change the settings of group {world.group!r}: grant ALTER_CONFIGS on it" in refused.errors
    assert not (await world.brokers.group_times(world.group)).session_timeout.is_own

    await allow(world.kafka, user, "group", world.group, AclOperation.ALTER_CONFIGS)
    assert (await configure("--session-timeout", "30")).code == 0
    assert (await world.brokers.group_times(world.group)).session_timeout == (30.0, True)
    outside = await configure("--session-timeout", "61")
    assert outside.code == 2
    assert "grant DESCRIBE_CONFIGS on the cluster to see the limits" in outside.errors


@pytest.mark.parametrize("own_kafka", [{"group.version": 0}], indirect=True)
async def test_brokers_without_the_consumer_protocol_are_said_to_have_none(
    own_kafka: KafkaBroker, aioshard: Aioshard
) -> None:
    for options in ((), ("--session-timeout", "30"), ("--reset",)):
        ended = await aioshard("group", "configure", "billing", *options, "--bootstrap-servers", own_kafka.bootstrap)
        assert ended.code == 1
        assert "the brokers accept no members of the consumer protocol (KIP-848)" in ended.errors
    async with KafkaAdmin(Settings(bootstrap_servers=own_kafka.bootstrap)) as brokers:
        assert not (await brokers.group_times("billing")).session_timeout.is_own


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
