"""Topics that grow and are recreated; logs with holes, markers and open transactions."""

import asyncio
from typing import Literal

import pytest
from aiokafka import AIOKafkaProducer

from aioshard.errors import OffsetOutOfRangeError
from tests.kafka.faults.support import (
    Ledger,
    commit_from_outside,
    handler_of,
    messages,
    partition_of,
    quick_app,
    until,
)
from tests.support.brokers import SharedKafka
from tests.support.cluster import Message

SOON = 15.0
"""Seconds: `metadata_max_age` of the quick apps, a rebalance, and the delays of a loaded machine."""


# Topics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [pytest.param("earliest", marks=pytest.mark.chaos), "latest"])
async def test_new_partitions_are_read_from_the_beginning(
    kafka: SharedKafka, topic: str, group: str, policy: str
) -> None:
    """Their first records come before the app can know of the partitions: `latest` must not skip them (I3)."""
    await kafka.create_topic(topic)
    app, ledger = quick_app(kafka, group, auto_offset_reset=policy), Ledger()
    app.consume(topic)(ledger.handle)
    async with app:
        sent = messages(10)
        await kafka.produce(topic, sent)
        await ledger.until_finished(sent)

        await kafka.add_partitions(topic, 3)
        for number in (1, 2):
            more = messages(10, start=100 * number)
            await kafka.produce(topic, more, partition=number)
            sent += more

        await ledger.until_finished(sent, SOON)
        assert ledger.duplicates == []
        assert handler_of(app).processed == len(sent)
        await kafka.wait_for_lag(group, topic)
        assert {p.partition for p in app.statistics().partitions} == {0, 1, 2}


@pytest.mark.parametrize("policy", [pytest.param("earliest", marks=pytest.mark.chaos), "latest"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(2, 2, id="as many", marks=pytest.mark.chaos),
        pytest.param(2, 4, id="more"),
        pytest.param(3, 1, id="fewer", marks=pytest.mark.chaos),
    ],
)
async def test_a_recreated_topic_is_read_from_the_beginning(
    kafka: SharedKafka, topic: str, group: str, policy: str, before: int, after: int
) -> None:
    """The group's offsets belong to a log that is gone; nothing of the new one may be skipped; never quiet (I11)."""
    await kafka.create_topic(topic, partitions=before)
    app, ledger = quick_app(kafka, group, auto_offset_reset=policy), Ledger()
    app.consume(topic)(ledger.handle)
    async with app:
        old = messages(30)
        await kafka.produce(topic, old)
        await ledger.until_finished(old)
        await kafka.wait_for_lag(group, topic)

        await kafka.delete_topic(topic)
        await until(lambda: topic in str(app.statistics().trouble), app.explain, SOON)
        assert topic in app.explain()
        assert app.statistics().state == "running"
        await kafka.create_topic(topic, partitions=after)
        new = messages(60, start=1000)
        await kafka.produce(topic, new)

        await ledger.until_finished(old + new, SOON)
        await kafka.wait_for_lag(group, topic)
        await until(lambda: app.statistics().trouble is None, app.explain)
        assert {p.partition for p in app.statistics().partitions} == set(range(after))


async def test_a_topic_recreated_between_lookups_is_read_from_the_beginning(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """The client may never see it missing: only its positions, which the new log does not have, tell."""
    await kafka.create_topic(topic)
    app, ledger = quick_app(kafka, group, metadata_max_age=2), Ledger()
    app.consume(topic)(ledger.handle)
    async with app:
        old = messages(30)
        await kafka.produce(topic, old)
        await ledger.until_finished(old)
        await kafka.wait_for_lag(group, topic)

        await kafka.delete_topic(topic)
        await kafka.create_topic(topic)
        new = messages(10, start=1000)
        await kafka.produce(topic, new)

        await ledger.until_finished(old + new, SOON)
        await kafka.wait_for_lag(group, topic)


# Holes ----------------------------------------------------------------------------------


def _values(sent: list[Message]) -> set[bytes | None]:
    return {value for _, value in sent}


async def test_committed_transactions_are_read_and_aborted_ones_are_not(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """I10: markers and aborted records are offsets without a record; what is open holds the end, until it ends."""
    await kafka.create_topic(topic)
    app, ledger = quick_app(kafka, group), Ledger()
    app.consume(topic)(ledger.handle)
    committed: list[Message] = []
    async with app:
        for turn in range(5):
            some = messages(5, start=100 * turn)
            await kafka.produce_transaction(topic, some, transactional_id=topic)
            await kafka.produce_transaction(topic, messages(5, start=1000 + turn), abort=True, transactional_id=topic)
            committed += some
        await ledger.until_finished(committed)
        await kafka.wait_for_lag(group, topic)
        assert await kafka.committed(group, topic) == {0: 60}  # 50 records and 10 markers

        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as producer:
            await producer.begin_transaction()
            for _, value in (inside := messages(5, start=5000)):
                await producer.send_and_wait(topic, value, partition=0)
            outside = messages(5, start=6000)
            await kafka.produce(topic, outside, partition=0)
            await until(lambda: partition_of(app, 0).lag == 0, app.explain)
            assert len(ledger.finished) == len(committed)
            assert await kafka.committed(group, topic) == {0: 60}
            await producer.commit_transaction()

        await ledger.until_finished(committed + inside + outside)
        await kafka.wait_for_lag(group, topic)
        await until(lambda: partition_of(app, 0).lag == 0, app.explain)
    assert await kafka.committed(group, topic) == {0: 71}
    assert set(ledger.values) == _values(committed + inside + outside)
    assert ledger.duplicates == []


async def test_read_uncommitted_processes_aborted_and_open_transactions(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic)
    app, ledger = quick_app(kafka, group, isolation_level="read_uncommitted"), Ledger()
    app.consume(topic)(ledger.handle)
    aborted, inside = messages(5), messages(5, start=100)
    await kafka.produce_transaction(topic, aborted, abort=True, transactional_id=topic)
    async with app, AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as producer:
        await producer.begin_transaction()
        for _, value in inside:
            await producer.send_and_wait(topic, value, partition=0)

        await ledger.until_finished(aborted + inside)

        await until(lambda: partition_of(app, 0).committed == 11, app.explain)
        await producer.abort_transaction()
        await until(lambda: partition_of(app, 0).committed == 12, app.explain)
    assert await kafka.committed(group, topic) == {0: 12}
    assert ledger.duplicates == []


async def test_an_aborted_transaction_at_the_end_leaves_no_lag(kafka: SharedKafka, topic: str, group: str) -> None:
    """Nothing comes after it that could carry the position over the hole."""
    await kafka.create_topic(topic)
    sent = messages(5)
    await kafka.produce(topic, sent)
    await kafka.produce_transaction(topic, messages(50, start=100), abort=True, transactional_id=topic)
    app, ledger = quick_app(kafka, group), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        await kafka.wait_for_lag(group, topic)
        assert await kafka.committed(group, topic) == {0: 56}

    assert set(ledger.values) == _values(sent)


async def test_until_caught_up_ends_at_the_last_stable_offset(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic)
    sent = messages(5)
    await kafka.produce(topic, sent)
    app, ledger = quick_app(kafka, group), Ledger()
    app.consume(topic)(ledger.handle)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)

        async with asyncio.timeout(SOON):
            await app.serve(until_caught_up=True)

        await producer.abort_transaction()
    assert set(ledger.values) == _values(sent)
    assert await kafka.committed(group, topic) == {0: 5}


async def test_compaction_ahead_of_the_position_causes_neither_loss_nor_lag(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """I10: what is left of a compacted log has holes, before, between and after the newest of each key."""
    quick = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    await kafka.create_topic(topic, config=quick)
    for turn in range(3):
        await kafka.produce(topic, messages(40, keys=10, start=100 * turn))
    async with asyncio.timeout(60):
        while len(left := await kafka.read(topic)) > 20:
            await kafka.produce(topic, [(b"roll", b"")])  # the newest segment is spared
    (end,) = (await kafka.end_offsets(topic)).values()
    assert end > 120
    app, ledger = quick_app(kafka, group), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        await kafka.wait_for_lag(group, topic)
        await until(lambda: partition_of(app, 0).lag == 0, app.explain)

    newest = dict(messages(40, keys=10, start=200))
    assert newest.items() <= {record.key: record.value for record in ledger.finished}.items()
    assert len(ledger.finished) <= len(left)
    assert ledger.duplicates == []
    ledger.assert_in_order()


@pytest.mark.parametrize("policy", ["earliest", pytest.param("latest", marks=pytest.mark.chaos)])
async def test_retention_that_overtakes_the_position_is_skipped_and_reported(
    kafka: SharedKafka, topic: str, group: str, policy: Literal["earliest", "latest"], caplog: pytest.LogCaptureFixture
) -> None:
    """Buffered and running records continue; earlier ones are deleted; the rest is read."""
    await kafka.create_topic(topic)
    app = quick_app(kafka, group, auto_offset_reset=policy, max_buffered_records=40, max_buffered_bytes=128 * 1024)
    ledger = Ledger()
    app.consume(topic, concurrency=8)(ledger.handle)
    async with app:
        ledger.hold(lambda record: record.offset == 0)
        # Far more than the client fetches ahead: whole batches of 512 KiB.
        sent = [(b"alone", b"alone"), *messages(11_999, keys=50, padding=1000)]
        await kafka.produce(topic, sent)
        await ledger.until_more_than(20)
        ledger.hold()
        await until(lambda: partition_of(app, 0).paused, app.explain)
        epoch = partition_of(app, 0).epoch

        await kafka.delete_records(topic, before={0: 11_900})
        ledger.hold(lambda record: record.offset == 0)
        await ledger.until_finished(sent[11_900:], SOON)
        assert (await kafka.committed(group, topic))[0] == 0
        ledger.release()

        await kafka.wait_for_lag(group, topic)
        assert app.statistics().trouble is None
        assert partition_of(app, 0).epoch == epoch
        assert app.statistics().replayed == 0
    assert ledger.duplicates == []
    taken_in = sum(offset < 11_900 for offset in ledger.offsets(0))
    assert ledger.offsets(0) == [*range(taken_in), *range(11_900, 12_000)]
    ledger.assert_in_order()
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("aioshard")]
    assert any("retention" in warning and f"{taken_in} to 11899 of {topic}/0" in warning for warning in warnings), (
        taken_in,
        warnings,
    )


async def test_retention_that_overtakes_evicted_records_leaves_a_hole(
    kafka: SharedKafka, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A partition that cannot advance keeps a minimum and gives the rest back; then the log loses that."""
    await kafka.create_topic(topic)
    app = quick_app(kafka, group, max_buffered_records=1000, max_buffered_bytes=512 * 1024, stuck_after=1)
    ledger = Ledger()
    app.consume(topic, concurrency=8)(ledger.handle)
    ledger.hold()
    sent = messages(3000, keys=50, padding=1000)
    await kafka.produce(topic, sent)
    async with app:
        await until(lambda: "were evicted" in caplog.text, app.explain)
        kept = partition_of(app, 0).buffered_records
        assert 0 < kept < partition_of(app, 0).incomplete

        await kafka.delete_records(topic, before={0: 2900})
        ledger.release()

        await ledger.until_finished(sent[2900:], SOON)
        await kafka.wait_for_lag(group, topic)
        assert app.statistics().buffered_records == 0
        assert app.statistics().buffered_bytes == 0
    taken_in = sum(offset < 2900 for offset in ledger.offsets(0))
    assert kept <= taken_in < 2900
    assert set(range(kept)) <= set(ledger.offsets(0))
    assert ledger.duplicates == []
    ledger.assert_in_order()
    assert any("retention" in r.getMessage() for r in caplog.records)


async def test_under_error_retention_past_the_position_ends_the_app(kafka: SharedKafka, topic: str, group: str) -> None:
    """`auto_offset_reset="error"`: what was deleted unread is for a human to decide about."""
    await kafka.create_topic(topic)
    await commit_from_outside(kafka, group, topic, {0: 0})
    app = quick_app(kafka, group, auto_offset_reset="error", max_buffered_records=40, max_buffered_bytes=128 * 1024)
    ledger = Ledger()
    app.consume(topic, concurrency=8)(ledger.handle)
    ledger.hold()
    serving = asyncio.create_task(app.serve())
    await kafka.produce(topic, messages(3000, padding=1000))
    await ledger.until(lambda: ledger.started)
    await until(lambda: partition_of(app, 0).paused, app.explain)

    await kafka.delete_records(topic, before={0: 2900})
    ledger.release()

    async with asyncio.timeout(SOON):
        with pytest.raises(OffsetOutOfRangeError, match=f"{topic}/0.*retention"):
            await serving
