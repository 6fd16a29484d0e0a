"""From a live app to a backfill and back on a real broker, with a simulated run."""

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from aioshard import App, spark
from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.core.finished_offsets import Run
from aioshard.errors import (
    CommitError,
    DataLossError,
    GroupBusyError,
    GroupMovedError,
    NotVerifiedError,
    PlanError,
)
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from aioshard.spark.plans import Plan, ends_of
from tests.spark.apps import AppModule, write_app
from tests.support.brokers import SharedKafka
from tests.support.cluster import DEADLINE

SESSION = 2.0
"""Seconds after which a member that is gone is forgotten."""


class Run7:
    """A run over history of one topic with two partitions, in a directory."""

    def __init__(self, kafka: SharedKafka, topic: str, group: str, app: AppModule, directory: Path) -> None:
        self.kafka = kafka
        self.topic = topic
        self.group = group
        self.app = app
        self.directory = directory
        self.messages: list[str] = []

    async def produce(self, count: int, partition: int | None = None) -> None:
        """Appends records, by turns to both partitions."""
        await self.kafka.produce(self.topic, [(None, b"")] * count, partition)

    async def plan(self, **options: Any) -> Plan:
        return await spark.plan(self.app.target, directory=self.directory, tell=self.messages.append, **options)

    def verify(self, **found: Any) -> None:
        """Pretends that the run was drained, and found to be whole."""
        plan = spark.RunDirectory(self.directory).plan()
        content = {"plan": plan.digest, "ok": True, "halted": [], "ends": ends_of(plan.ranges)} | found
        (self.directory / "verified.json").write_text(json.dumps(content))

    async def hand_over(self, wait: float | None = 0.0, **options: Any) -> spark.Handover:
        self.messages.clear()
        return await spark.handover(self.directory, wait=wait, tell=self.messages.append, **options)

    async def commit(self, offsets: dict[int, tuple[int, str]]) -> None:
        """Commits from outside."""
        due = {TopicPartition(self.topic, number): Committed(*what) for number, what in offsets.items()}
        async with KafkaAdmin(Settings(bootstrap_servers=self.kafka.bootstrap)) as brokers:
            await brokers.commit_without_member(self.group, due)

    async def commits(self) -> dict[int, Committed | None]:
        """Return the commits of the group, with their metadata."""
        partitions = [TopicPartition(self.topic, number) for number in range(2)]
        async with KafkaAdmin(Settings(bootstrap_servers=self.kafka.bootstrap)) as brokers:
            found = await brokers.group_commits(self.group, partitions)
        return {at.partition: committed for at, committed in found.items()}

    async def consume(self, count: int) -> list[tuple[int, int]]:
        """Runs the live app until it has processed that number of records; returns them."""
        self.app.seen.clear()
        async with self.app.app:
            await self.app.until_seen(count)
        return sorted(self.app.seen)


@pytest.fixture
async def run(kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run7:
    """Nothing is planned yet; the topic is empty."""
    await kafka.create_topic(topic, partitions=2)
    app = write_app(tmp_path, monkeypatch, kafka, group, topic, session_timeout=SESSION)
    return Run7(kafka, topic, group, app, tmp_path / "run")


@pytest.fixture
async def drained(run: Run7) -> Run7:
    """Planned from 3 and 5 to 10 and 10, and verified."""
    await run.produce(20)
    await run.commit({0: (3, "aioshard/1 first=3,2"), 1: (5, "")})
    await run.plan()
    run.verify()
    return run


# There and back -----------------------------------------------------------------------


async def test_from_live_to_backfill_and_back_every_record_runs_once(run: Run7) -> None:
    """A producer writes all the time."""
    stop = asyncio.Event()

    async def produce() -> None:
        while not stop.is_set():
            await run.produce(4)

    producing = asyncio.create_task(produce(), name="produce")
    try:
        before = await run.consume(10)
        plan = await run.plan()
        run.verify()
        done = await run.hand_over()
        after = await run.consume(10)
    finally:
        stop.set()
        await producing

    in_the_run = [
        (planned.partition, offset) for planned in plan.ranges for offset in range(planned.start, planned.end)
    ]
    everything = before + in_the_run + after
    assert done.state == "handed-over"
    assert in_the_run
    assert len(set(everything)) == len(everything), "something was done twice"
    for partition in (0, 1):
        offsets = sorted(offset for number, offset in everything if number == partition)
        assert offsets == list(range(len(offsets))), "something was left out"
    assert done.offsets == ends_of(plan.ranges)


async def test_the_live_app_resumes_exactly_at_the_ends(drained: Run7) -> None:
    await drained.produce(6)

    done = await drained.hand_over()

    assert done.before == {drained.topic: {"0": 3, "1": 5}}
    assert done.offsets == {drained.topic: {"0": 10, "1": 10}}
    assert await drained.commits() == {0: Committed(10, ""), 1: Committed(10, "")}
    assert await drained.consume(6) == [(number, offset) for number in (0, 1) for offset in (10, 11, 12)]


async def test_the_handover_commits_the_verified_ends(drained: Run7) -> None:
    drained.verify(ends={drained.topic: {"0": 7, "1": 10}})

    assert (await drained.hand_over()).offsets == {drained.topic: {"0": 7, "1": 10}}


async def test_a_run_is_handed_over_once(drained: Run7) -> None:
    first = await drained.hand_over()
    await drained.produce(4)
    await drained.consume(4)

    again = await drained.hand_over()

    assert (first.state, again.state) == ("handed-over", "already")
    assert again.offsets == first.offsets
    assert json.loads(json.dumps(dataclasses.asdict(again)))["before"] == {drained.topic: {"0": 3, "1": 5}}
    assert await drained.kafka.committed(drained.group, drained.topic) == {0: 12, 1: 12}


async def test_a_handover_that_died_after_its_commit_can_be_repeated(drained: Run7) -> None:
    await drained.hand_over()
    (drained.directory / "handover.json").unlink()

    assert (await drained.hand_over()).state == "handed-over"


async def test_an_empty_run_is_handed_over_too(run: Run7) -> None:
    await run.plan()
    run.verify()

    assert (await run.hand_over()).offsets == {run.topic: {"0": 0, "1": 0}}
    assert await run.kafka.committed(run.group, run.topic) == {0: 0, 1: 0}


async def test_committed_ends_survive_a_long_time_without_members(drained: Run7) -> None:
    """Brokers count a retention from when a group lost its last member: it may be over before the hand-over."""
    before = time.time()

    await drained.hand_over()

    expires = [await _expiry(drained, partition) for partition in (0, 1)]
    assert min(expires) > before + 300 * 24 * 3600


async def _expiry(run: Run7, partition: int) -> float:
    """When the broker deletes the newest commit of a partition at the latest, as its own topic has it."""
    wanted = b"".join(_text(name) for name in (run.group, run.topic)) + partition.to_bytes(4, "big")
    newest = [
        record for record in await run.kafka.read("__consumer_offsets") if record.key and record.key[2:] == wanted
    ][-1]
    assert newest.value is not None
    version, expires = int.from_bytes(newest.value[:2], "big"), int.from_bytes(newest.value[-8:], "big")
    assert version == 1, "another version has no time"
    return expires / 1000


def _text(text: str) -> bytes:
    return len(text.encode()).to_bytes(2, "big") + text.encode()


# Verified -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"plan": "sha256:another"}, "verified with another plan"),
        ({"ok": False}, "the verification .* failed"),
        ({"ok": "yes"}, "the verification .* failed"),
        (
            {"ok": False, "halted": ["orders/0/7 (ValueError)", "orders/1/3"]},
            r"2 halted records such as orders/0/7 \(ValueError\)",
        ),
        ({"halted": ["orders/0/7"]}, "halted records"),
        ({"dead_lettered": 3}, "3 of 3 dead letters"),
    ],
    ids=["plan", "failed", "odd", "halted", "halted-only", "dead-letters"],
)
async def test_only_a_verified_run_is_handed_over(drained: Run7, found: dict[str, Any], why: str) -> None:
    drained.verify(**found)

    with pytest.raises(NotVerifiedError, match=why):
        await drained.hand_over(force=True)

    assert await drained.kafka.committed(drained.group, drained.topic) == {0: 3, 1: 5}


async def test_a_run_that_was_not_verified_is_not_handed_over(drained: Run7) -> None:
    (drained.directory / "verified.json").unlink()

    with pytest.raises(NotVerifiedError, match=f"aioshard spark verify {drained.directory}"):
        await drained.hand_over(force=True)


async def test_dead_letters_are_sent_before_the_handover(drained: Run7) -> None:
    drained.verify(dead_lettered=3)
    run_directory = spark.RunDirectory(drained.directory)
    run_directory.write_json("dead-letters.json", {"plan": run_directory.plan().digest, "acknowledged": 2})
    with pytest.raises(NotVerifiedError, match="1 of 3 dead letters"):
        await drained.hand_over()

    run_directory.write_json("dead-letters.json", {"plan": run_directory.plan().digest, "acknowledged": 3})

    assert (await drained.hand_over()).state == "handed-over"


async def test_a_directory_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no plan\.json"):
        await spark.handover(tmp_path)


# Members ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def live_app(run: Run7) -> AsyncIterator[None]:
    """Another app of the group, which consumes another topic: the group has a member, and its offsets stay."""
    other = f"{run.topic}-other"
    await run.kafka.create_topic(other)
    app = App(run.group, bootstrap_servers=run.kafka.bootstrap, auto_offset_reset="earliest", heartbeat_interval=0.2)
    app.consume(other)(run.app.module.handle)
    async with app:
        yield


@contextlib.asynccontextmanager
async def consumer(run: Run7, instance: str | None = None) -> AsyncIterator[None]:
    """A plain consumer of the group, which commits nothing."""
    joined = AIOKafkaConsumer(
        run.topic,
        bootstrap_servers=run.kafka.bootstrap,
        group_id=run.group,
        group_instance_id=instance,
        enable_auto_commit=False,
        session_timeout_ms=round(SESSION * 1000),
        heartbeat_interval_ms=200,
    )
    async with asyncio.timeout(DEADLINE), joined:
        while not joined.assignment():  # noqa: ASYNC110 - it sends no event
            await asyncio.sleep(0.01)
        yield


@contextlib.contextmanager
def newer_member(run: Run7) -> Iterator[None]:
    """A member under the newer group protocol (KIP-848), with its own heartbeat."""
    assigned, ended = threading.Event(), threading.Event()
    member = Consumer(
        {"bootstrap.servers": run.kafka.bootstrap, "group.id": run.group, "group.protocol": "consumer"}
        | {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
    )
    member.subscribe([run.topic], on_assign=lambda *_: assigned.set())

    def poll() -> None:
        while not ended.is_set():
            member.poll(0.05)

    polling = threading.Thread(target=poll, name="newer member")
    polling.start()
    try:
        assert assigned.wait(DEADLINE)
        yield
    finally:
        ended.set()
        polling.join()
        member.close()


_MEMBER_SCRIPT = """
import sys
from confluent_kafka import Consumer
member = Consumer(dict(pair.split("=", 1) for pair in sys.argv[2:]))
member.subscribe([sys.argv[1]], on_assign=lambda *_: print("assigned", flush=True))
while True:
    member.poll(0.1)
"""


async def killed_member(run: Run7, **options: str) -> None:
    """Joins the group in another process, which is then killed."""
    settings = {
        "bootstrap.servers": run.kafka.bootstrap,
        "group.id": run.group,
        "enable.auto.commit": "false",
        "client.id": "victim",
    }
    pairs = [f"{name}={value}" for name, value in (settings | options).items()]
    process = subprocess.Popen(  # noqa: ASYNC220 - it only starts here
        [sys.executable, "-c", _MEMBER_SCRIPT, run.topic, *pairs], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), DEADLINE)
        process.kill()
    assert line == "assigned\n"


async def assert_refused(run: Run7, members: str) -> None:
    before = await run.commits()
    with pytest.raises(GroupBusyError, match="nothing was changed") as refused:
        await run.hand_over(wait=0.0)
    assert await run.commits() == before
    assert not (run.directory / "handover.json").exists()
    assert members in str(refused.value.members)


async def test_a_live_app_keeps_the_group(drained: Run7) -> None:
    async with live_app(drained):
        await assert_refused(drained, "client 'aioshard' at 127.0.0.1")
        with pytest.raises(GroupBusyError, match=r"after [12]"):
            await drained.hand_over(wait=1.0, force=True)
        assert len(drained.messages) == 1
        assert "waiting up to 1 s" in drained.messages[0]

    assert (await drained.hand_over()).state == "handed-over"


async def test_a_kip_848_member_keeps_the_group_and_is_named(drained: Run7) -> None:
    with newer_member(drained):
        await assert_refused(drained, "at 127.0.0.1")

    assert (await drained.hand_over(wait=5.0)).state == "handed-over"


@pytest.mark.chaos
async def test_a_stopped_static_member_is_named_and_waited_for(drained: Run7) -> None:
    """It does not leave the group when it stops."""
    async with consumer(drained, instance="billing-1"):
        await assert_refused(drained, "static member 'billing-1'")
    await assert_refused(drained, "static member 'billing-1'")

    done = await drained.hand_over(wait=None)

    assert 0 < done.waited < SESSION + 2
    assert any("waiting up to 2 s" in sentence and "billing-1" in sentence for sentence in drained.messages)
    assert await drained.kafka.committed(drained.group, drained.topic) == {0: 10, 1: 10}


async def test_a_killed_member_is_named_and_waited_for(drained: Run7) -> None:
    await killed_member(drained, **{"session.timeout.ms": "3000", "heartbeat.interval.ms": "200"})
    await assert_refused(drained, "client 'victim'")

    done = await drained.hand_over(wait=6.0)

    assert done.waited > 0
    assert any("victim" in sentence for sentence in drained.messages)


@pytest.mark.chaos
async def test_a_handover_waits_for_a_killed_kip_848_member(drained: Run7) -> None:
    await _set_session(drained.kafka, drained.group, session=2.0, heartbeat=0.2)
    await killed_member(drained, **{"group.protocol": "consumer"})
    await assert_refused(drained, "client 'victim'")

    done = await drained.hand_over(wait=8.0)

    assert done.waited > 0
    assert any("client 'victim'" in sentence for sentence in drained.messages)


async def _set_session(kafka: SharedKafka, group: str, *, session: float, heartbeat: float) -> None:
    """Under the newer protocol these seconds belong to the broker."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    times = {"session.timeout": session, "heartbeat.interval": heartbeat}
    entries = [
        ConfigEntry(f"consumer.{name}.ms", str(round(seconds * 1000)), incremental_operation=AlterConfigOpType.SET)
        for name, seconds in times.items()
    ]
    resource = ConfigResource(ConfigResource.Type.GROUP, group, incremental_configs=entries)
    (answer,) = admin.incremental_alter_configs([resource]).values()
    async with asyncio.timeout(DEADLINE):
        await asyncio.wrap_future(answer)


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1])
async def test_an_app_starting_concurrently_begins_before_or_after_the_run(drained: Run7, delay: float) -> None:
    """In any order of events, the app never starts at the old offsets after a successful handover."""
    await drained.produce(4)

    async def hand_over() -> bool:
        await asyncio.sleep(delay)
        try:
            await drained.hand_over()
        except (GroupBusyError, GroupMovedError):
            return False
        return True

    handing_over = asyncio.create_task(hand_over(), name="hand over")
    async with drained.app.app:
        handed_over = await handing_over
        await drained.app.until_seen(4 if handed_over else 4 + 7 + 5)

    behind = [(number, offset) for number in (0, 1) for offset in (10, 11)]
    between = [(0, offset) for offset in range(3, 10)] + [(1, offset) for offset in range(5, 10)]
    assert sorted(drained.app.seen) == (behind if handed_over else sorted(behind + between))


# Somebody consumed meanwhile ----------------------------------------------------------


async def test_a_moved_group_is_refused_with_the_moved_partitions(drained: Run7) -> None:
    await drained.commit({0: (6, "")})
    before = await drained.commits()

    with pytest.raises(GroupMovedError, match=f"{drained.topic}/0: then 3, now 6") as refused:
        await drained.hand_over()

    assert len(refused.value.moved) == 1
    assert await drained.commits() == before

    done = await drained.hand_over(force=True)
    assert done.moved == refused.value.moved
    assert done.before == {drained.topic: {"0": 6, "1": 5}}
    assert await drained.kafka.committed(drained.group, drained.topic) == {0: 10, 1: 10}


async def test_records_finished_meanwhile_count_as_movement(drained: Run7) -> None:
    """The committed offset waits for its record while later ones finish."""
    await drained.commit({0: (3, CommitMetadata(first=FirstCommit(3, 2), finished=(Run(5, 8),)).text(3))})

    with pytest.raises(GroupMovedError, match=f"{drained.topic}/0: 3, with other commit metadata"):
        await drained.hand_over()


async def test_a_group_with_its_first_commits_meanwhile_has_moved(run: Run7) -> None:
    await run.produce(20)
    await run.plan()
    run.verify()
    await run.commit({1: (0, "")})

    with pytest.raises(GroupMovedError, match=f"{run.topic}/1: then no commit, now 0"):
        await run.hand_over()


async def test_an_unanswered_commit_is_checked_before_it_is_resent(
    drained: Run7, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stored; another member may have continued from there and must not be rewound."""
    sent = _lose_the_first_answer(monkeypatch, lambda: asyncio.sleep(0))

    assert (await drained.hand_over()).state == "handed-over"
    assert len(sent) == 2


async def test_a_group_that_advanced_after_an_unanswered_commit_is_not_rewound(
    drained: Run7, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = _lose_the_first_answer(monkeypatch, lambda: drained.commit({0: (25, "")}))

    with pytest.raises(GroupMovedError, match="then 3, now 25"):
        await drained.hand_over()

    assert len(sent) == 1
    assert await drained.kafka.committed(drained.group, drained.topic) == {0: 25, 1: 10}


def _lose_the_first_answer(monkeypatch: pytest.MonkeyPatch, then: Callable[[], Any]) -> list[Any]:
    """Has *then* happen after the hand-over's first commit was stored, and its answer get lost; returns its commits."""
    sent: list[Any] = []
    real = KafkaAdmin.commit_without_member

    async def commit(self: KafkaAdmin, group_id: str, offsets: Any) -> None:
        await real(self, group_id, offsets)
        sent.append(offsets)
        if len(sent) == 1:
            monkeypatch.setattr(KafkaAdmin, "commit_without_member", real)
            await then()
            monkeypatch.setattr(KafkaAdmin, "commit_without_member", commit)
            raise CommitError("no answer")

    monkeypatch.setattr(KafkaAdmin, "commit_without_member", commit)
    return sent


# Other programs, other logs -----------------------------------------------------------


async def test_completions_beyond_the_end_stay_stored(run: Run7) -> None:
    await run.produce(20)
    beyond = CommitMetadata(first=FirstCommit(3, 2), finished=(Run(4, 6), Run(7, 9)))
    await run.commit({0: (3, beyond.text(3)), 1: (5, "")})
    await run.plan(end={run.topic: {0: 8, 1: 10}})
    run.verify()

    await run.hand_over()

    commit = (await run.commits())[0]
    assert commit is not None
    assert CommitMetadata.read(commit.metadata, commit.offset) == CommitMetadata(finished=(Run(8, 9),))


async def test_a_recreated_log_is_not_handed_over(drained: Run7) -> None:
    drained.verify(ends={drained.topic: {"0": 11, "1": 10}})

    with pytest.raises(DataLossError, match=f"{drained.topic}/0: the range ends at 11, and the log at 10"):
        await drained.hand_over(force=True)


async def test_retention_past_the_end_of_the_run_is_reported(drained: Run7) -> None:
    await drained.produce(20)
    await drained.kafka.delete_records(drained.topic, before={0: 14})

    await drained.hand_over()

    (said,) = drained.messages
    assert said == (
        f"retention has deleted offsets 10 to 13 of {drained.topic}/0 since the run ended: the live app resumes after "
        "them"
    )
