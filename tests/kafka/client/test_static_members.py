"""Static members: restarted within the session, and two with one id."""

import asyncio
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.errors import InstanceIdTakenError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.groups import SESSION_TIMEOUT
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka.client.members import Member, generation_of, held, silence, until_assigned
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

Join = Callable[..., Member]

QUICK: dict[str, Any] = {"session_timeout": 60, "heartbeat_interval": 0.5}
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        QUICK,
        pytest.param({"group_protocol": "consumer"}, marks=pytest.mark.chaos),
    ],
    ids=["classic", "consumer"],
)

MEMBER = """
import os
from aioshard import App, Record

app = App(os.environ["GROUP"], auto_offset_reset="earliest", commit_interval=0.1)

@app.consume(os.environ["TOPIC"])
async def handle(record: Record) -> None:
    print(f"processed {record.partition}/{record.offset}", flush=True)
"""


class Process:
    """`aioshard run` with a static member."""

    def __init__(self, directory: Path, name: str, environment: dict[str, str]) -> None:
        self._log = directory / f"{name}.log"
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "aioshard", "run", "member:app"],
                cwd=directory,
                env=os.environ | environment | {"PYTHONPATH": str(PROJECT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def is_assigned(self) -> bool:
        return re.search(r"\bassigned [1-9]", self.log) is not None

    @property
    def code(self) -> int | None:
        return self.popen.poll()

    async def stop(self) -> None:
        self.popen.send_signal(signal.SIGTERM)
        await until(lambda: self.code is not None)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)


Start = Callable[..., Process]


@pytest.fixture
def start(kafka: SharedKafka, tmp_path: Path, topic: str, group: str) -> Iterator[Start]:
    """Starts processes of the test's group, which are ended with the test; arguments are settings."""
    (tmp_path / "member.py").write_text(MEMBER)
    started: list[Process] = []

    def begin(**settings: Any) -> Process:
        given = {"bootstrap_servers": kafka.bootstrap, "fetch_max_wait": 0.05} | settings
        environment = {f"AIOSHARD_{name.upper()}": str(value) for name, value in given.items()}
        process = Process(tmp_path, f"member{len(started)}", environment | {"GROUP": group, "TOPIC": topic})
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


async def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - processes tell nobody
            await asyncio.sleep(0.05)


@OPTIONS
@pytest.mark.timeout(120)
async def test_a_restarted_static_member_gets_its_partitions_without_a_rebalance(
    kafka: SharedKafka, topic: str, group: str, start: Start, options: dict[str, Any]
) -> None:
    await kafka.create_topic(topic, 4)
    if "session_timeout" not in options:
        async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers:
            await brokers.set_group_times(group, {SESSION_TIMEOUT: QUICK["session_timeout"]})
    other = App(
        group,
        bootstrap_servers=kafka.bootstrap,
        auto_offset_reset="earliest",
        group_instance_id="other",
        **options,
    )
    processed: list[TopicPartition] = []

    @other.consume(topic)
    async def handle(record: Record) -> None:
        processed.append(TopicPartition(record.topic, record.partition))

    async with other:
        first = start(group_instance_id="one", **options)
        await until(lambda: len(other.assignment()) == 2 and first.is_assigned())
        theirs = other.assignment()
        rebalances, epochs = (
            other.statistics().rebalances,
            [partition.epoch for partition in other.statistics().partitions],
        )
        mine = [number for number in range(4) if TopicPartition(topic, number) not in theirs]
        await kafka.produce(topic, [(b"", b"")], mine[0])
        await until(lambda: f"processed {mine[0]}/0" in first.log)

        if options.get("group_protocol") == "consumer":
            await first.stop()  # one that was killed keeps its id until its session has timed out, under this protocol
        else:
            first.kill()
        for number in range(4):
            await kafka.produce(topic, [(b"", b"")] * 5, number)
        await until(lambda: len(processed) == 10)
        again = start(group_instance_id="one", **options)
        await until(lambda: all(f"processed {number}/4" in again.log for number in mine))

        assert other.assignment() == theirs
        assert other.statistics().rebalances == rebalances
        assert [partition.epoch for partition in other.statistics().partitions] == epochs
        assert set(processed) == set(theirs)


@OPTIONS
@pytest.mark.timeout(120)
async def test_of_two_members_with_one_instance_id_one_ends_with_an_error(
    kafka: SharedKafka, topic: str, start: Start, options: dict[str, Any]
) -> None:
    await kafka.create_topic(topic, 2)
    first = start(group_instance_id="twin", **options)
    await until(first.is_assigned)
    second = start(group_instance_id="twin", **options)

    await until(lambda: first.code is not None or second.code is not None, 60.0)

    ended, left = (first, second) if first.code is not None else (second, first)
    assert ended.code == 1, ended.log
    assert "another process has joined group" in ended.log.splitlines()[-1]
    assert "with our group_instance_id='twin'" in ended.log.splitlines()[-1]
    await kafka.produce(topic, [(b"", b"")] * 5, 0)
    await kafka.produce(topic, [(b"", b"")] * 5, 1)
    await until(lambda: "processed 0/4" in left.log and "processed 1/4" in left.log)
    assert left.code is None, left.log


# Restarts in one process: the group waits for the session of a static member that has closed, as of one that was killed


async def start_all(members: list[Member], topics: Collection[str], partitions: int) -> None:
    """Start members and wait until they share the partitions. The first one leads the group from then on."""
    leader, *followers = members
    await leader.join(*topics)
    for follower in followers:
        await follower.transport.start(topics, None, follower)
    await until_assigned(*members, partitions=partitions, some_idle=True)


async def restart(old: Member, new: Member, topics: Collection[str]) -> Member:
    """Replace a member by one with the same instance id."""
    await old.transport.close()
    await new.transport.start(topics, None, new)
    await new.poll_until(lambda: bool(new.assignments))
    return new


@pytest.mark.parametrize("assignor", ["sticky", pytest.param("cooperative-fair", marks=pytest.mark.chaos)])
async def test_partitions_added_after_a_restart_of_the_leader_are_assigned(
    kafka: SharedKafka, topic: str, member: Join, assignor: str
) -> None:
    await kafka.create_topic(topic, 2)
    leader, follower, again = (
        member(group_instance_id=name, assignor=assignor, session_timeout=20) for name in ("a", "b", "a")
    )
    await start_all([leader, follower], [topic], partitions=2)
    partitions, generation = held(leader), generation_of(leader.transport)
    events = list(follower.events)

    await restart(leader, again, [topic])
    await follower.poll()
    (after,) = again.assignments
    assert (set(after.partitions), after.membership.generation) == (partitions, generation)
    assert follower.events == events, "the restart caused no rebalance"
    await kafka.add_partitions(topic, 4)

    await until_assigned(again, follower, partitions=4, some_idle=True)


async def test_partitions_added_while_the_leader_restarts_are_assigned(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, 2)
    leader, follower, again = (
        member(group_instance_id=name, metadata_max_age=300, session_timeout=20) for name in ("a", "b", "a")
    )
    await start_all([leader, follower], [topic], partitions=2)

    await leader.transport.close()
    await kafka.add_partitions(topic, 4)
    await again.transport.start([topic], None, again)

    await until_assigned(again, follower, partitions=4, some_idle=True)


@pytest.mark.parametrize("by_pattern", [False, True], ids=["by name", "by pattern"])
async def test_a_topic_created_after_a_restart_of_the_leader_is_read(
    kafka: SharedKafka, topic: str, member: Join, by_pattern: bool
) -> None:
    await kafka.create_topic(topic, 2)
    leader, follower, again = (member(group_instance_id=name, session_timeout=20) for name in "aba")
    topics = [] if by_pattern else [topic, f"{topic}-later"]
    pattern = rf"{topic}.*" if by_pattern else None
    await leader.join(*topics, pattern=pattern)
    await follower.transport.start(topics, pattern, follower)
    await until_assigned(leader, follower, partitions=2, some_idle=True)

    await leader.transport.close()
    await again.transport.start(topics, pattern, again)
    await again.poll_until(lambda: bool(again.assignments))
    await kafka.create_topic(f"{topic}-later", 2)

    await until_assigned(again, follower, partitions=4, some_idle=True)


async def test_static_members_that_restart_together_do_not_rebalance(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    """Each of them may find an id of the leader that it does not know."""
    await kafka.create_topic(topic, 4)
    old = [member(group_instance_id=name, session_timeout=20) for name in "abcd"]
    new = [member(group_instance_id=name, session_timeout=20) for name in "abcd"]
    await start_all(old, [topic], partitions=4)
    before = [consumer.assignments[-1] for consumer in old]

    for consumer in old:
        await consumer.transport.close()
    await asyncio.gather(*(consumer.transport.start([topic], None, consumer) for consumer in new))
    await until_assigned(*new, partitions=4, some_idle=True)
    after = [consumer.assignments for consumer in new]
    assert [[assignment.partitions for assignment in assigned] for assigned in after] == [
        [assignment.partitions] for assignment in before
    ]
    assert {assigned[0].membership.generation for assigned in after} == {before[0].membership.generation}
    await kafka.add_partitions(topic, 8)

    await until_assigned(*new, partitions=8, some_idle=True)


async def test_moving_partitions_are_assigned_when_the_leader_restarts_while_it_releases_them(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, 2)
    leader, other, again = (
        member(group_instance_id=name, assignor="cooperative-fair", session_timeout=20) for name in "aba"
    )

    await die_releasing(leader, other, topic)
    await again.transport.start([topic], None, again)
    await until_assigned(again, other, partitions=2, some_idle=True)

    assert [len(held(consumer)) for consumer in (again, other)] == [1, 1]


async def test_moving_partitions_are_assigned_when_a_dynamic_leader_dies_while_it_releases_them(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    """The group elects another one after the session."""
    await kafka.create_topic(topic, 2)
    leader, other = (member(assignor="cooperative-fair", session_timeout=2) for _ in range(2))

    await die_releasing(leader, other, topic)

    await until_assigned(other, partitions=2, some_idle=True)


async def die_releasing(leader: Member, other: Member, topic: str) -> None:
    """Let another member join, and end the leader while it releases the partitions that move."""
    await leader.join(topic)
    releasing, released = asyncio.Event(), asyncio.Event()

    async def release(_partitions: Collection[TopicPartition], _lost: bool) -> None:
        releasing.set()
        await released.wait()

    leader.at_revoke = release
    await other.join(topic)
    await asyncio.wait_for(releasing.wait(), 30)
    assert held(other) == set()
    await silence(leader.transport)
    released.set()


@pytest.mark.slow
async def test_withheld_partitions_are_assigned_when_the_leader_restarts(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    await kafka.create_topic(topic, 6)
    leader, follower, gone, again = (
        member(group_instance_id=name, assignor="sticky", session_timeout=3, reassignment_delay=600) for name in "abca"
    )
    await start_all([leader, follower, gone], [topic], partitions=6)
    before = len(follower.assignments)
    await gone.transport.close()
    await follower.poll_until(lambda: len(follower.assignments) > before)
    await until_assigned(leader, follower, partitions=4, some_idle=True)
    assert held(leader) | held(follower) < {TopicPartition(topic, number) for number in range(6)}, "two are withheld"

    await restart(leader, again, [topic])

    await until_assigned(again, follower, partitions=6, some_idle=True)


RESUBSCRIBING = pytest.mark.parametrize("assignor", ["sticky", "range"])


def has_joined(one: Member) -> bool:
    return bool(one.assignments)


def static(member: Join, names: str, assignor: str) -> list[Member]:
    """Make a static member of each name."""
    return [member(group_instance_id=name, session_timeout=20, assignor=assignor) for name in names]


@RESUBSCRIBING
async def test_a_follower_that_restarts_with_another_topic_reads_it(
    kafka: SharedKafka, topic: str, member: Join, assignor: str
) -> None:
    await kafka.create_topic(topic, 2)
    await kafka.create_topic(f"{topic}-new", 1)
    leader, follower, again = static(member, "abb", assignor)
    await start_all([leader, follower], [topic], partitions=2)

    await follower.transport.close()
    await again.transport.start([topic, f"{topic}-new"], None, again)

    await again.poll_until(lambda: TopicPartition(f"{topic}-new", 0) in held(again))


@RESUBSCRIBING
async def test_members_that_restart_without_a_topic_get_none_of_its_partitions(
    kafka: SharedKafka, topic: str, member: Join, assignor: str
) -> None:
    await kafka.create_topic(topic, 2)
    await kafka.create_topic(f"{topic}-old", 2)
    *old, again_a, again_b = static(member, "abab", assignor)
    await start_all(old, [topic, f"{topic}-old"], partitions=4)

    for before, again in zip(old, (again_a, again_b), strict=True):
        await before.transport.close()
        await again.transport.start([topic], None, again)
        await again.poll_until(functools.partial(has_joined, again))

    await until(lambda: held(again_a) | held(again_b) == {TopicPartition(topic, 0), TopicPartition(topic, 1)})
    assert {at.topic for consumer in (again_a, again_b) for event in consumer.events for at in event.partitions} == {
        topic
    }


async def test_of_two_members_with_one_instance_id_and_different_topics_one_ends_too(
    kafka: SharedKafka, topic: str, member: Join
) -> None:
    """Each of them makes the group rebalance, so it comes back in another generation."""
    await kafka.create_topic(topic, 1)
    await kafka.create_topic(f"{topic}-new", 1)
    first, second = (member(group_instance_id="twin", session_timeout=20) for _ in range(2))
    await first.join(topic)
    await second.join(topic, f"{topic}-new")

    with pytest.raises(InstanceIdTakenError, match="group_instance_id='twin'"):
        await asyncio.gather(*(consumer.poll_until(lambda: False) for consumer in (first, second)))
