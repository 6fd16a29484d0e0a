"""Records missing in the log are detected before a drain begins, on a real broker."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from aioshard import spark
from aioshard.errors import DataLossError
from aioshard.spark.plans import Plan, Vector, starts_of
from aioshard.spark.runs import check_logs
from tests.spark.apps import write_app
from tests.support.brokers import SharedKafka


@pytest.fixture
async def plan(kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(None, b"")] * 20)
    app = write_app(tmp_path, monkeypatch, kafka, group, topic)
    return await spark.plan(app.target, directory=None, start="earliest")


async def check(plan: Plan, reached: Vector | None = None) -> None:
    await asyncio.to_thread(check_logs, plan, reached or starts_of(plan.ranges))


async def test_records_deleted_by_retention_are_named_unless_done(kafka: SharedKafka, topic: str, plan: Plan) -> None:
    await check(plan)
    await kafka.delete_records(topic, before={0: 6})

    with pytest.raises(DataLossError, match=f"{topic}/0: offsets 0 to 5"):
        await check(plan)
    with pytest.raises(DataLossError, match=f"{topic}/0: offsets 5 to 5"):
        await check(plan, {topic: {"0": 5, "1": 0}})
    await check(plan, {topic: {"0": 6, "1": 0}})
    await kafka.delete_records(topic, before={0: 10, 1: 10})
    await check(plan, {topic: {"0": 10, "1": 10}})


async def test_a_deleted_or_recreated_topic_is_named(kafka: SharedKafka, topic: str, plan: Plan) -> None:
    await kafka.delete_topic(topic)
    with pytest.raises(DataLossError, match=f"topic '{topic}' does not exist any more"):
        await check(plan)

    await kafka.create_topic(topic, partitions=2)
    with pytest.raises(DataLossError, match=f"{topic}/0: the range ends at 10, and the log at 0"):
        await check(plan)


async def test_brokers_reachable_only_from_tasks_are_accepted(plan: Plan) -> None:
    await check(dataclasses.replace(plan, app="no_such_module:app", bootstrap_servers="127.0.0.1:1"))
