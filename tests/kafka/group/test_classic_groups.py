"""Members of classic groups at real brokers: what the model of the coordinator assumes, and other clients beside us."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from aioshard.kafka.group.member import Assigned, Ended, Lost, Revoked
from aioshard.kafka.wire.requests import JOIN_GROUP
from tests.kafka.group.classic_engines import LOOK, ClassicEngine
from tests.kafka.group.librdkafka import Librdkafka
from tests.support.brokers import SharedKafka

pytestmark = pytest.mark.kafka

PARTITIONS = 4
INCREMENTAL = ("cooperative-sticky",)
EAGER = ("sticky",)

Join = Callable[..., ClassicEngine]


@pytest.fixture
async def topic(kafka: SharedKafka, topic: str) -> str:
    """A topic of this test with some partitions."""
    await kafka.create_topic(topic, PARTITIONS)
    return topic


@pytest.fixture
async def join(kafka: SharedKafka, group: str, topic: str) -> AsyncIterator[Join]:
    """Makes members, and lets those that are left leave."""
    engines: list[ClassicEngine] = []

    def make(*assignors: str, **options: Any) -> ClassicEngine:
        engine = ClassicEngine(kafka.bootstrap, group, topic, assignors or INCREMENTAL, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()


async def until_shared(*engines: ClassicEngine, count: int = PARTITIONS) -> None:
    """Waits until members own all partitions, each of them about as many."""
    share = count // len(engines)

    def shared() -> bool:
        owned = [engine.owned for engine in engines]
        return len(frozenset().union(*owned)) == sum(map(len, owned)) == count and min(map(len, owned)) >= share

    await engines[0].until(shared)


@pytest.mark.parametrize("assignors", [INCREMENTAL, EAGER], ids=["incremental", "eager"])
async def test_members_share_the_partitions_and_are_told_of_each_change_once(
    join: Join, assignors: Sequence[str]
) -> None:
    one = join(*assignors)
    await until_shared(one)
    assert one.errors["JoinRequest"] == [79, 0]

    two = join(*assignors)
    await until_shared(one, two)

    (revoked,) = one.saw(Revoked)
    moved = two.owned
    assert revoked.partitions == (moved if assignors is INCREMENTAL else one.owned | moved)
    assert not one.saw(Lost)
    await two.until(lambda: frozenset().union(*(event.partitions for event in two.saw(Assigned))) == moved)
    await two.close()
    await until_shared(one)


async def test_partitions_are_kept_while_another_member_drains_for_longer_than_a_session(join: Join) -> None:
    """Heartbeats are answered with "rebalance in progress" while a join waits. Their commits are accepted too."""
    one = join(session_timeout=1.5)
    eager = join(*INCREMENTAL, *EAGER, session_timeout=1.5)
    await until_shared(one, eager)
    kept, generation = one.owned, one.driver.ownership.epoch
    eager.holds = True
    joins = len(one.errors["JoinRequest"])

    third = join(session_timeout=1.5)
    await eager.until(lambda: eager.saw(Revoked)[-1:] and eager.saw(Revoked)[-1].partitions == eager.owned)
    await asyncio.sleep(3)  # twice the session

    assert len(one.errors["JoinRequest"]) == joins, "the group still waits"
    assert (one.owned, one.driver.ownership.epoch) == (kept, generation)
    assert await one.commit() == 0
    eager.holds = False
    eager.release(eager.saw(Revoked)[-1])
    await until_shared(one, eager, third)
    assert not one.saw(Lost)
    assert not eager.saw(Lost)


async def test_commits_are_accepted_under_the_generation_of_the_assignment_only(join: Join) -> None:
    one = join()
    await until_shared(one)
    generation = one.driver.ownership.epoch

    assert await one.commit() == 0
    assert await one.commit(generation + 1) == 22
    assert await one.commit(generation - 1) == 22


async def test_a_member_leaves_while_its_engine_is_blocked_and_joins_again_afterwards(join: Join) -> None:
    one = join(rebalance_timeout=1.5)
    await until_shared(one)

    while "LeaveRequest" not in one.errors:
        time.sleep(LOOK)  # noqa: ASYNC251 - it blocks the event loop

    assert one.owned == frozenset()
    await until_shared(one)
    (lost,) = one.saw(Lost)
    assert len(lost.partitions) == PARTITIONS
    assert one.errors["LeaveRequest"] == [0]


@pytest.mark.parametrize("version", [5, 9])
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
async def test_a_restarted_static_member_rebalances_nothing_and_a_leader_still_leads(
    kafka: SharedKafka, topic: str, join: Join, leads: bool, version: int
) -> None:
    options: dict[str, Any] = {"versions": {JOIN_GROUP: version}}
    one = join(instance_id="one", **options)
    await until_shared(one)
    two = join(instance_id="two", **options)
    await until_shared(one, two)
    old, other = (one, two) if leads else (two, one)
    generation, had = old.driver.ownership.epoch, old.owned

    await old.close()
    new = join(instance_id="one" if leads else "two", **options)
    await new.until(lambda: new.owned)
    assert (new.owned, new.driver.ownership.epoch) == (had, generation)
    assert (new.driver.leads, other.driver.leads) == (leads, not leads)

    await kafka.add_partitions(topic, PARTITIONS + 2)
    await new.look_at_partitions()
    await other.look_at_partitions()
    await until_shared(new, other, count=PARTITIONS + 2)


async def test_a_second_process_with_the_same_instance_id_ends_the_first(join: Join) -> None:
    one = join(instance_id="one")
    await until_shared(one)

    two = join(instance_id="one")
    await one.until(lambda: one.saw(Ended))

    assert one.saw(Ended)[0].code == 82
    assert one.saw(Lost)
    await until_shared(two)


async def test_a_group_changes_from_eager_to_incremental_one_member_after_another(join: Join) -> None:
    members = [join(*EAGER), join(*EAGER)]
    await until_shared(*members)

    for assignors in ((*INCREMENTAL, *EAGER), INCREMENTAL):
        for index in range(2):
            await members[index].close()
            members[index] = join(*assignors)
            await until_shared(*members)

    third = join(*INCREMENTAL)
    kept = {member: member.owned for member in members}
    await until_shared(*members, third)
    assert all(member.owned <= kept[member] for member in members)


@pytest.mark.parametrize("is_first", [True, False], ids=["we lead", "librdkafka leads"])
async def test_a_member_of_librdkafka_shares_the_partitions_with_ours(
    join: Join, librdkafka: Callable[[], Librdkafka], is_first: bool
) -> None:
    ours: ClassicEngine | None = None
    if is_first:
        ours = join()
        await until_shared(ours)
        other = librdkafka()
    else:
        other = librdkafka()
        async with asyncio.timeout(30):
            while len(other.owned) < PARTITIONS:  # noqa: ASYNC110 - another thread
                await asyncio.sleep(0.05)
        ours = join()
    one = ours
    await one.until(lambda: len(one.owned) == 2 and len(other.owned) == 2 and not one.owned & other.owned)
    two = join()
    await one.until(
        lambda: (
            len(one.owned | two.owned | other.owned) == PARTITIONS
            and len(one.owned) + len(two.owned) + len(other.owned) == PARTITIONS
            and min(len(one.owned), len(two.owned), len(other.owned)) >= 1
        )
    )

    assert not one.saw(Lost)
    assert other.lost == 0
