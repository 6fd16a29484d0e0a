"""Which group protocol an app uses, and why it says so."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.kafka.admin import KafkaAdmin
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka.faults.support import until
from tests.kafka.group.librdkafka import Librdkafka
from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker

pytestmark = pytest.mark.kafka


def app_of(bootstrap: str, topic: str, group: str, **settings: Any) -> tuple[App, list[str]]:
    """An app, and what its handler was given."""
    app = App(group, bootstrap_servers=bootstrap, auto_offset_reset="earliest", commit_interval=0.1, **settings)
    processed: list[str] = []

    @app.consume(topic)
    async def handle(record: Record) -> None:
        processed.append(f"{record.partition}/{record.offset}")

    return app, processed


async def protocol_of(bootstrap: str, group: str) -> str:
    """Return the protocol of the group, as the brokers have it."""
    async with KafkaAdmin(Settings(bootstrap_servers=bootstrap)) as admin:
        return (await admin.group(group)).protocol


@pytest.mark.parametrize(
    ("settings", "protocol", "reason"),
    [
        ({}, "consumer", "no setting"),
        ({"session_timeout": 20}, "classic", "session_timeout"),
        ({"assignor": "fair"}, "classic", "assignor"),
        ({"group_protocol": "classic"}, "classic", "group_protocol is set"),
    ],
    ids=["default", "session_timeout", "assignor", "classic"],
)
async def test_the_protocol_in_use_is_named_with_its_reason(
    kafka: SharedKafka,
    topic: str,
    group: str,
    settings: dict[str, Any],
    protocol: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await kafka.create_topic(topic, 2)
    app, processed = app_of(kafka.bootstrap, topic, group, **settings)
    with caplog.at_level(logging.INFO, "aioshard.kafka.group"):
        async with app:
            await kafka.produce(topic, [(b"", b"")], 1)
            await until(lambda: processed == ["1/0"], app.explain)
            statistics = app.statistics()
            assert await protocol_of(kafka.bootstrap, group) == protocol
            explained = app.explain()
    assert statistics.group_protocol == protocol
    assert reason in (statistics.group_protocol_reason or "")
    assert f"{protocol}, because {statistics.group_protocol_reason}" in explained
    said = [record for record in caplog.records if str(statistics.group_protocol_reason) in record.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO]


@pytest.mark.parametrize("own_kafka", [{"group.version": 0}], indirect=True)
async def test_brokers_without_the_protocol_of_kip_848_get_a_classic_member(own_kafka: KafkaBroker) -> None:
    await own_kafka.create_topic("orders", 2)
    app, processed = app_of(own_kafka.bootstrap, "orders", "billing")
    async with app:
        await own_kafka.produce("orders", [(b"", b"")], 1)
        await until(lambda: processed == ["1/0"], app.explain)
        statistics = app.statistics()
        assert await protocol_of(own_kafka.bootstrap, "billing") == "classic"
    assert (statistics.group_protocol, statistics.client_losses, statistics.rebalances) == ("classic", 0, 1)
    assert "the other one" in (statistics.group_protocol_reason or "")


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_an_app_joins_a_live_group_of_another_client_and_both_run(
    kafka: SharedKafka, topic: str, group: str, librdkafka: Callable[..., Librdkafka], protocol: str
) -> None:
    """Of a classic group, they do not agree on an assignor: the brokers assign for both."""
    await kafka.create_topic(topic, 4)
    everything = {TopicPartition(topic, number) for number in range(4)}
    other = librdkafka(protocol)
    async with asyncio.timeout(30):
        while other.owned != everything:  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.05)
    app, processed = app_of(kafka.bootstrap, topic, group)
    async with app:
        await until(lambda: len(app.assignment()) == len(other.owned) == 2, app.explain)
        assert other.owned.union(app.assignment()) == everything
        ours = sorted(at.partition for at in app.assignment())
        for number in ours:
            await kafka.produce(topic, [(b"", b"")], number)
        await until(lambda: sorted(processed) == [f"{number}/0" for number in ours], app.explain)
        assert app.statistics().group_protocol == "consumer"
    async with asyncio.timeout(30):
        while other.owned != everything:  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.05)
    assert other.lost == 0
