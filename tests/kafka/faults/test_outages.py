"""Brokers that are gone, hang, return, or are at a wrong address."""

import asyncio
import logging
import re
from pathlib import Path

import pytest

from aioshard import App
from aioshard.errors import NotDrainedError, StartError
from tests.kafka.faults.support import (
    DEADLINE,
    Ledger,
    messages,
    partition_of,
    quick_app,
    until,
    with_both_protocols,
    with_classic_at_least,
)
from tests.support.cluster import Message
from tests.support.kafka import KafkaBroker

OUTAGE = 20.0
"""Seconds: longer than the session of these apps, every backoff and every commit timeout."""
SESSION = 16.0


def _large(count: int, *, start: int = 0) -> list[Message]:
    """Records that the client's prefetch cannot hold all together, so that some are fetched after the outage."""
    return [(key, (value or b"") + b"." * 1000) for key, value in messages(count, keys=50, start=start)]


def _loaded(
    broker: KafkaBroker, group: str, topic: str, session: float = 10, protocol: str = "classic"
) -> tuple[App, Ledger]:
    app = quick_app(
        broker,
        group,
        max_buffered_records=300,
        max_buffered_bytes=1024 * 1024,
        commit_timeout=2,
        session_timeout=session,
        rebalance_timeout=max(15, session),
        group_protocol=protocol,
    )
    ledger = Ledger(pause=0.005)
    app.consume(topic, concurrency=16)(ledger.handle)
    return app, ledger


@with_both_protocols
@pytest.mark.chaos
async def test_a_twenty_second_outage_loses_nothing(
    own_kafka: KafkaBroker, topic: str, group: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """I3 and I11: no restart, no new client needed; while it lasts, the app says so and stays ready."""
    await own_kafka.create_topic(topic, partitions=4)
    before = _large(6000)
    await own_kafka.produce(topic, before)
    app, ledger = _loaded(own_kafka, group, topic, SESSION, protocol)
    async with app:
        await ledger.until_more_than(1000)

        await own_kafka.stop()
        stopped = asyncio.get_running_loop().time()
        await until(lambda: app.statistics().trouble, app.explain, timeout=10)
        assert re.search(r"for \d+ s", str(app.statistics().trouble)), "since when"
        assert "Trouble: " in app.explain()
        warnings = [r for r in caplog.records if r.name.startswith("aioshard") and r.levelno >= logging.WARNING]
        assert warnings != []
        while asyncio.get_running_loop().time() < stopped + OUTAGE:
            assert app.statistics().state == "running"
            assert app.statistics().trouble is not None
            await asyncio.sleep(0.1)  # the outage itself
        at_most = len(ledger.finished)
        assert at_most < len(before), "the outage came too late to be one"
        await own_kafka.start()
        await ledger.until(lambda: len(ledger.finished) > at_most)

        after = _large(100, start=6000)
        await own_kafka.produce(topic, after)
        # 4,000 records, which take 2 s and were seen to take 20 s on two cores with three other busy processes.
        await ledger.until_finished(before + after, timeout=2 * DEADLINE)
        await until(lambda: app.statistics().trouble is None, app.explain)
        await own_kafka.wait_for_lag(group, topic)
        assert app.statistics().state == "running"
        assert app.statistics().commit_failures > 0
    ledger.assert_in_order()


@with_classic_at_least
async def test_killing_the_broker_under_load_loses_nothing(
    own_kafka: KafkaBroker, topic: str, group: str, protocol: str
) -> None:
    await own_kafka.create_topic(topic, partitions=4)
    sent = _large(3000)
    await own_kafka.produce(topic, sent)
    app, ledger = _loaded(own_kafka, group, topic, protocol=protocol)
    async with app:
        await ledger.until_more_than(300)

        await own_kafka.kill()
        assert len(ledger.finished) < len(sent)
        await own_kafka.start()

        await ledger.until_finished(sent)
        await until(lambda: app.statistics().trouble is None, app.explain)
        await own_kafka.wait_for_lag(group, topic)
        assert app.statistics().state == "running"
    ledger.assert_in_order()


async def test_a_stop_during_an_outage_names_what_is_not_committed(
    own_kafka: KafkaBroker, topic: str, group: str
) -> None:
    """Exactly once: the transaction has failed and ended the epochs, so that nothing is in flight."""
    await own_kafka.create_topic(topic, partitions=2)
    app = quick_app(own_kafka, group, processing_guarantee="exactly_once", commit_timeout=2, shutdown_timeout=10)
    ledger = Ledger()
    app.consume(topic, concurrency=50)(ledger.handle)
    ledger.hold()
    sent = messages(50, keys=50)

    with pytest.raises(NotDrainedError) as error:  # noqa: PT012 - leaving the app raises
        async with app:
            await own_kafka.produce(topic, sent)
            await ledger.until(lambda: len(ledger.started) == len(sent))
            await own_kafka.kill()
            ledger.release()
            await ledger.until_finished(sent)
            await until(lambda: not app.statistics().partitions, app.explain)

    assert error.value.records == ()
    assert sum(error.value.uncommitted.values()) == len(sent)


@pytest.mark.chaos
@with_both_protocols
async def test_a_hanging_broker_is_reported_and_waited_for(
    own_kafka: KafkaBroker, topic: str, group: str, protocol: str
) -> None:
    """Connections stay open and nothing answers: only the deadline of a commit finds out."""
    await own_kafka.create_topic(topic)
    app, ledger = _loaded(own_kafka, group, topic, protocol=protocol)
    async with app:
        first = messages(50)
        await own_kafka.produce(topic, first)
        ledger.hold()
        await ledger.until(lambda: ledger.started)

        own_kafka.freeze()
        ledger.release()
        await ledger.until_finished(first)
        await until(lambda: app.statistics().trouble, app.explain, timeout=10)
        assert "commit" in str(app.statistics().trouble)
        assert app.statistics().state == "running"
        own_kafka.thaw()

        second = messages(50, start=50)
        await own_kafka.produce(topic, second)
        await ledger.until_finished(first + second)
        await own_kafka.wait_for_lag(group, topic)
        await until(lambda: app.statistics().trouble is None, app.explain)
    ledger.assert_in_order()


async def test_a_wrong_address_ends_the_start_in_time_and_names_it(group: str) -> None:
    app = quick_app("127.0.0.1:9", group, start_timeout=1)
    app.consume("orders")(Ledger().handle)
    began = asyncio.get_running_loop().time()

    with pytest.raises(StartError, match=r"127\.0\.0\.1:9") as refused:
        await app.serve()

    assert asyncio.get_running_loop().time() - began < 4
    assert "bootstrap_servers" in str(refused.value)
    assert app.statistics().state in ("failed", "stopped")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("delay", "away"),
    [(0.3, 6.0), *((number / 5, 20.0) for number in range(10))],
)
async def test_two_members_start_during_a_broker_restart(
    own_kafka: KafkaBroker, topic: str, group: str, delay: float, away: float
) -> None:
    """The broker is away for longer than `start_timeout`: once it has answered, it is waited for."""
    await own_kafka.create_topic(topic, partitions=4)
    sent = messages(100)
    apps = [quick_app(own_kafka, group, start_timeout=4) for _ in range(2)]
    ledger = Ledger()
    is_back = asyncio.Event()

    async def serve(app: App) -> None:
        async with app:
            await is_back.wait()
            await ledger.until_finished(sent)

    for app in apps:
        app.consume(topic)(ledger.handle)
    async with asyncio.TaskGroup() as members:
        for number, app in enumerate(apps):
            members.create_task(serve(app), name=f"member {number}")
        await until(lambda: all(app._engine is not None and app._engine._reached for app in apps))
        await asyncio.sleep(delay)
        await own_kafka.kill()
        await asyncio.sleep(away)
        await own_kafka.start()
        await own_kafka.produce(topic, sent)
        is_back.set()


@pytest.mark.chaos
async def test_an_app_can_start_before_its_broker_and_topic(tmp_path: Path, topic: str, group: str) -> None:
    """`start_timeout=None`: degraded and not ready at first, and all by itself well later."""
    broker = KafkaBroker(tmp_path)
    app = quick_app(broker, group, start_timeout=None)
    ledger = Ledger()
    app.consume(topic)(ledger.handle)
    try:
        async with app:
            await until(lambda: app.statistics().trouble, app.explain)
            assert app.statistics().state == "starting"
            assert broker.bootstrap in str(app.statistics().trouble)

            await broker.start()
            await until(lambda: topic in str(app.statistics().trouble), app.explain)
            await broker.create_topic(topic, partitions=2)
            sent = messages(20)
            await broker.produce(topic, sent)

            await ledger.until_finished(sent)
            await until(lambda: app.statistics().trouble is None, app.explain)
            assert app.statistics().state == "running"
            assert partition_of(app, 0) is not None
            await broker.wait_for_lag(group, topic)
    finally:
        await broker.kill()
