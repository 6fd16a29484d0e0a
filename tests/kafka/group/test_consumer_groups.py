"""Members of the consumer protocol in real groups, each in a thread: who owns what, and what ends it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioshard.kafka.group.member import Assigned, Ended, Event, Lost, Revoked, Troubled
from aioshard.records import TopicPartition
from tests.kafka.group.engines import Engine
from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker
from tests.support.paths import PROJECT

pytestmark = pytest.mark.kafka

SESSION = 6.0
"""The session timeout of groups at the brokers of these tests."""
PARTITIONS = 4

Join = Callable[..., Engine]


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    """Makes members, and lets those that are left leave."""
    engines: list[Engine] = []

    def make(bootstrap: str, group: str, **options: Any) -> Engine:
        engine = Engine(bootstrap, group, **options)
        engines.append(engine)
        return engine

    yield make
    await asyncio.gather(*(engine.driver.close(5.0, "the test is over", for_good=True) for engine in engines))


class Process:
    """A member in another process."""

    def __init__(self, log: Path, arguments: dict[str, Any]) -> None:
        self._log = log
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.kafka.group.engines", json.dumps(arguments)],
                cwd=PROJECT,
                env=os.environ | {"PYTHONPATH": str(PROJECT)},
                stdout=out,
                stderr=out,
            )

    @property
    def counts(self) -> list[str]:
        """Its output: the number of its partitions, again and again."""
        return self._log.read_text().splitlines()

    async def until_it_owns(self, count: int) -> None:
        async with asyncio.timeout(30.0):
            while self.counts[-1:] != [str(count)]:  # noqa: ASYNC110 - processes tell nobody
                await asyncio.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts members in other processes, which are killed in the end."""
    processes: list[Process] = []

    def make(bootstrap: str, group: str, **options: Any) -> Process:
        arguments = {"bootstrap": bootstrap, "group": group} | options
        process = Process(tmp_path / f"{len(processes)}.log", arguments)
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.kill()


@pytest.fixture
async def topic(kafka: SharedKafka, topic: str) -> str:
    """A topic of this test with some partitions."""
    await kafka.create_topic(topic, PARTITIONS)
    return topic


def all_of(topic: str, partitions: int = PARTITIONS) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(topic, number) for number in range(partitions))


async def until_shared(topic: str, *engines: Engine) -> None:
    """Waits until members own all partitions, each of them some."""

    def shared() -> bool:
        owned = [engine.owned for engine in engines]
        return all(owned) and frozenset().union(*owned) == all_of(topic)

    await engines[0].until(shared)


async def test_members_share_and_take_over_at_a_leave(kafka: SharedKafka, topic: str, group: str, join: Join) -> None:
    one = join(kafka.bootstrap, group, topics=[topic])
    await until_shared(topic, one)
    two = join(kafka.bootstrap, group, topics=[topic])
    await until_shared(topic, one, two)
    assert not one.owned & two.owned
    assert one.saw(Revoked)
    assert not one.saw(Lost)

    await two.driver.close(5.0, "closing")

    assert not two.driver.is_alive
    assert isinstance(two.events[-1], Ended)
    assert two.events[-1].code == 0
    await one.until(lambda: one.owned == all_of(topic), SESSION - 1)
    assert not one.saw(Troubled)


async def test_a_killed_member_is_replaced_after_its_session(
    kafka: SharedKafka, topic: str, group: str, join: Join, start: Callable[..., Process]
) -> None:
    process = start(kafka.bootstrap, group, topics=[topic])
    await process.until_it_owns(PARTITIONS)
    one = join(kafka.bootstrap, group, topics=[topic])
    await one.until(lambda: len(one.owned) == PARTITIONS / 2)
    process.kill()
    await one.until(lambda: one.owned == all_of(topic))
    assert not one.saw(Lost)


async def test_a_frozen_process_owns_nothing_when_it_runs_again(
    kafka: SharedKafka, topic: str, group: str, join: Join, start: Callable[..., Process]
) -> None:
    process = start(kafka.bootstrap, group, topics=[topic])
    await process.until_it_owns(PARTITIONS)
    one = join(kafka.bootstrap, group, topics=[topic])
    await process.until_it_owns(PARTITIONS // 2)
    process.send(signal.SIGSTOP)
    await one.until(lambda: one.owned == all_of(topic))
    before = len(process.counts)
    process.send(signal.SIGCONT)
    await one.until(lambda: len(process.counts) > before)
    assert process.counts[before] == "0"
    await process.until_it_owns(PARTITIONS // 2)


async def test_unreleased_partitions_are_lost_at_the_rebalance_timeout(
    kafka: SharedKafka, topic: str, group: str, join: Join
) -> None:
    one = join(kafka.bootstrap, group, topics=[topic], rebalance_timeout=2.0)
    await until_shared(topic, one)
    one.holds = True
    two = join(kafka.bootstrap, group, topics=[topic])
    overlap = 0
    while not one.saw(Lost):
        overlap += bool(one.owned & two.owned)
        await asyncio.sleep(0.01)
    assert not overlap
    (lost,) = one.saw(Lost)
    assert lost.partitions == all_of(topic)
    assert lost.life == one.saw(Revoked)[0].life
    one.driver.released(lost.life, one.saw(Revoked)[0].partitions)
    one.holds = False
    await until_shared(topic, one, two)
    assert not one.owned & two.owned


async def test_a_static_member_gets_its_partitions_back(kafka: SharedKafka, topic: str, group: str, join: Join) -> None:
    other = join(kafka.bootstrap, group, topics=[topic], instance_id="other")
    one = join(kafka.bootstrap, group, topics=[topic], instance_id="one")
    await until_shared(topic, other, one)
    before = one.owned
    await one.driver.close(5.0, "restarting")
    again = join(kafka.bootstrap, group, topics=[topic], instance_id="one")
    await again.until(lambda: again.owned == before, SESSION - 1)
    assert other.owned == all_of(topic) - before
    assert again.driver.ownership.member_id != one.driver.ownership.member_id
    await again.driver.close(5.0, "scaling down", for_good=True)
    await other.until(lambda: other.owned == all_of(topic), SESSION - 1)


async def test_a_killed_static_member_is_replaced_by_its_next_process(
    kafka: SharedKafka, topic: str, group: str, join: Join, start: Callable[..., Process]
) -> None:
    process = start(kafka.bootstrap, group, topics=[topic], instance_id="one")
    await process.until_it_owns(PARTITIONS)
    process.kill()
    again = join(kafka.bootstrap, group, topics=[topic], instance_id="one")
    await again.until(lambda: again.owned == all_of(topic))
    assert {event.code for event in again.saw(Troubled)} == {111}


async def test_a_blocked_event_loop_keeps_its_membership(
    kafka: SharedKafka, topic: str, group: str, join: Join
) -> None:
    one = join(kafka.bootstrap, group, topics=[topic])
    await until_shared(topic, one)
    time.sleep(1.5 * SESSION)  # noqa: ASYNC251 - that is the test
    assert one.owned == all_of(topic)
    await asyncio.sleep(0)
    assert not one.saw(Lost)


async def test_an_event_loop_that_is_blocked_for_too_long_has_lost_everything_when_it_runs(
    kafka: SharedKafka, topic: str, group: str, join: Join
) -> None:
    one = join(kafka.bootstrap, group, topics=[topic], rebalance_timeout=2.0)
    await until_shared(topic, one)
    life = one.driver.ownership.life
    time.sleep(3.5)  # noqa: ASYNC251 - that is the test
    assert not one.owned
    await one.until(lambda: one.owned == all_of(topic))
    (lost,) = one.saw(Lost)
    assert (lost.life, lost.partitions) == (life, all_of(topic))
    assert one.driver.ownership.life > life


async def test_a_new_topic_of_a_pattern_is_assigned(kafka: SharedKafka, topic: str, group: str, join: Join) -> None:
    one = join(kafka.bootstrap, group, patterns=[f"{topic}.*", "nothing-else"])
    await until_shared(topic, one)
    await kafka.create_topic(f"{topic}.new", 1)
    await one.until(lambda: one.owned == all_of(topic) | all_of(f"{topic}.new", 1))


async def test_a_changed_subscription_is_followed(kafka: SharedKafka, topic: str, group: str, join: Join) -> None:
    second = f"{topic}-second"
    await kafka.create_topic(second, 1)
    one = join(kafka.bootstrap, group, topics=[topic])
    await until_shared(topic, one)
    one.driver.subscribe([second])
    await one.until(lambda: one.owned == all_of(second, 1))
    assert one.saw(Revoked)[0].partitions == all_of(topic)


async def test_an_invalid_pattern_ends_the_member_with_the_text_of_the_broker(
    kafka: SharedKafka, group: str, join: Join
) -> None:
    one = join(kafka.bootstrap, group, patterns=["("])
    await one.until(lambda: one.saw(Ended))
    assert one.saw(Ended)[0].code == 128
    assert one.saw(Ended)[0].message


async def test_a_requested_heartbeat_brings_the_newest_epoch(
    kafka: SharedKafka, topic: str, group: str, join: Join
) -> None:
    one = join(kafka.bootstrap, group, topics=[topic])
    await until_shared(topic, one)
    two = join(kafka.bootstrap, group, topics=["another-topic"])
    await two.until(lambda: two.saw(Assigned))
    epoch = two.driver.ownership.epoch
    one.driver.commit_refused(one.driver.ownership, 113)
    await one.until(lambda: one.driver.ownership.epoch >= epoch)


@pytest.mark.timeout(180)
async def test_members_outlive_their_broker(breakable_kafka: KafkaBroker, group: str, join: Join) -> None:
    await breakable_kafka.create_topic(group, PARTITIONS)
    engines = [join(breakable_kafka.bootstrap, group, topics=[group]) for _ in range(2)]
    await until_shared(group, *engines)
    await breakable_kafka.kill()
    await engines[0].until(lambda: engines[0].saw(Troubled))
    await breakable_kafka.start()
    await until_shared(group, *engines)
    one, two = engines
    assert not one.owned & two.owned


async def test_a_member_without_brokers_ends_within_its_deadline(group: str) -> None:
    engine = Engine("127.0.0.1:1", group, topics=["orders"], session=3.0)
    await engine.until(lambda: engine.saw(Troubled))
    began = time.monotonic()
    await engine.driver.close(0.2, "closing")
    assert time.monotonic() - began < 5.0
    assert not engine.driver.is_alive
    assert len(engine.saw(Ended)) == 1


@pytest.mark.parametrize("timeout", [0.0, 5.0])
async def test_a_leave_is_sent_whatever_the_deadline(
    kafka: SharedKafka, topic: str, group: str, join: Join, timeout: float
) -> None:
    one = join(kafka.bootstrap, group, topics=[topic])
    await until_shared(topic, one)
    await one.driver.close(timeout, "closing")
    assert one.owned == frozenset()
    two = join(kafka.bootstrap, group, topics=[topic])
    await two.until(lambda: two.owned == all_of(topic), SESSION - 1)


async def test_close_ends_also_when_it_is_cancelled(kafka: SharedKafka, topic: str, group: str, join: Join) -> None:
    one = join(kafka.bootstrap, group, topics=[topic])
    await until_shared(topic, one)
    closing = asyncio.create_task(one.driver.close(5.0, "closing"))
    await asyncio.sleep(0)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    await one.until(lambda: not one.driver.is_alive)
    events: list[Event] = one.saw(Lost)
    assert len(events) == 1
