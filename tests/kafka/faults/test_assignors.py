"""Three apps under each of our assignors while records flow: nothing is lost or repeated."""

from contextlib import AsyncExitStack

import pytest

from aioshard import App
from tests.kafka.faults.support import Ledger, messages, quick_app, until
from tests.support.brokers import SharedKafka
from tests.support.cluster import Message

PARTITIONS = 7


def partitions(app: App) -> set[int]:
    return {partition.partition for partition in app.statistics().partitions}


async def until_shared(*apps: App) -> None:
    """Wait until each partition belongs to one app, and their numbers differ by at most 1."""

    def shared() -> bool:
        held = [partitions(app) for app in apps]
        counts = sorted(map(len, held))
        return sum(counts) == len(set().union(*held)) == PARTITIONS and counts[-1] - counts[0] <= 1

    await until(shared, lambda: [app.explain() for app in apps])


@pytest.mark.parametrize("assignor", ["fair", pytest.param("sticky", marks=pytest.mark.chaos)])
async def test_members_join_and_leave_while_records_flow(
    kafka: SharedKafka, topic: str, group: str, assignor: str
) -> None:
    await kafka.create_topic(topic, partitions=PARTITIONS)
    sent = messages(3_000, keys=60)
    await kafka.produce(topic, sent)
    ledger = Ledger(pause=0.002)
    one, two, three = apps = [quick_app(kafka, group, assignor=assignor) for _ in range(3)]
    for app in apps:
        app.consume(topic, concurrency=8)(ledger.handle)

    async with one, two:
        async with three:
            await until_shared(one, two, three)
            before = [partitions(app) for app in (one, two)]
            await ledger.until_more_than(100)
        await until_shared(one, two)
        after = [partitions(app) for app in (one, two)]
        await kafka.wait_for_lag(group, topic)

    assert sorted(map(bytes, filter(None, ledger.values))) == sorted(value for _, value in sent if value)
    assert (ledger.duplicates, ledger.overlaps) == ([], [])
    if assignor == "sticky":
        assert all(had <= has for had, has in zip(before, after, strict=True)), (
            "only the partitions of the third one have moved"
        )


async def test_a_member_joining_a_lagging_group_takes_half_of_the_backlog(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """Nothing was committed yet: the backlog is counted from the offset where the app would begin."""
    await kafka.create_topic(topic, partitions=PARTITIONS)
    sent: list[Message] = []
    for partition, count in enumerate((900, 300, 300, 300, 0, 0, 0)):
        more = messages(count, keys=30, start=len(sent))
        await kafka.produce(topic, more, partition=partition)
        sent += more
    ledger = Ledger()
    ledger.hold()
    apps = [quick_app(kafka, group, assignor="lag", drain_timeout=0.5) for _ in range(2)]
    for app in apps:
        app.consume(topic, concurrency=8)(ledger.handle)

    async with AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(app)
            await ledger.until(lambda: ledger.started)
        await until_shared(*apps)
        (far_behind,) = (partitions(app) for app in apps if 0 in partitions(app))
        ledger.release()
        await kafka.wait_for_lag(group, topic)

    assert far_behind & {1, 2, 3} == set(), (
        "one app has the long partition, the other the three that are as long together"
    )
    assert len(set(ledger.values)) == len(sent)
