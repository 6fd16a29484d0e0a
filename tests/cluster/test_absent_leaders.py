"""Partitions without a leader on a real cluster: the others resume, and members start."""

import asyncio

import pytest

from aioshard import App, Record
from tests.kafka.faults.support import quick_app, until
from tests.support.three_brokers import ThreeBrokers

SOON = 10.0
"""Seconds within which partitions with a leader resume after a rebalance."""


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.parametrize("group_protocol", ["classic", "consumer"])
async def test_partitions_with_a_leader_resume_while_another_has_none(
    brokers: ThreeBrokers, topic: str, group: str, group_protocol: str
) -> None:
    await brokers.create_topic(topic, assignment={number: [number % 3 + 1] for number in range(6)})
    coordinator = await brokers.coordinator_of(group)
    away = next(node for node in brokers.nodes if node != coordinator)
    leaderless = {number for number in range(6) if number % 3 + 1 == away}
    seen: set[bytes | None] = set()

    def member() -> App:
        app = quick_app(brokers, group, group_protocol=group_protocol)

        @app.consume(topic)
        async def handle(record: Record) -> None:
            seen.add(record.value)

        return app

    async def publish(name: bytes, partitions: set[int]) -> set[bytes]:
        for number in partitions:
            await brokers.produce(topic, [(None, b"%s-%d" % (name, number))], partition=number)
        return {b"%s-%d" % (name, number) for number in partitions}

    first, second = member(), member()
    async with first:
        before = await publish(b"before", set(range(6)))
        await until(lambda: before <= seen)

        await brokers.stop(away)
        later = await publish(b"later", set(range(6)) - leaderless)
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with second:
            assert loop.time() - began < SOON, "a member starts although partitions have no leader"
            await until(lambda: later <= seen, lambda: first.explain() + second.explain(), timeout=SOON)
            await until(
                lambda: any(
                    f"{topic}/{number}" in str(app.statistics().trouble)
                    for app in (first, second)
                    for number in leaderless
                )
            )

            await brokers.start(away)
            last = await publish(b"last", set(range(6)))
            await until(lambda: last <= seen, lambda: first.explain() + second.explain())
            await until(lambda: first.statistics().trouble is None and second.statistics().trouble is None)


async def test_an_app_reports_leaders_and_replicas(brokers: ThreeBrokers, topic: str, group: str) -> None:
    replicas = {0: [1, 2], 1: [2, 3], 2: [3, 1]}
    await brokers.create_topic(topic, assignment=replicas)
    app = quick_app(brokers, group)

    @app.consume(topic)
    async def handle(record: Record) -> None:
        """Nothing to be done."""

    async with app:
        found = await app.partitions(topic)

        assert {info.partition: (info.leader, list(info.replicas)) for info in found} == {
            number: (nodes[0], nodes) for number, nodes in replicas.items()
        }
        assert all(set(info.in_sync) == set(info.replicas) for info in found)
        assert await app.partitions(f"{topic}.none") == ()
