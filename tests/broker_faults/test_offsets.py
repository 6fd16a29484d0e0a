"""Where a group goes on: without a committed offset, with one that its log does not have, and with a mark of others."""

import asyncio
from typing import Literal

import pytest

from aioshard.errors import NoOffsetError, OffsetOutOfRangeError
from aioshard.records import TopicPartition
from tests.broker_faults.support import (
    Ledger,
    Meddler,
    commit_from_outside,
    messages,
    partition_of,
    quick_app,
    until,
)
from tests.support.shared_kafka import SharedKafka

Policy = Literal["earliest", "latest", "error"]


# Without a committed offset ---------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "error"])
async def test_without_an_offset_and_a_policy_the_app_ends_and_names_both(
    kafka: SharedKafka, topic: str, group: str, policy: Policy | None
) -> None:
    """`earliest` repeats and `latest` skips: nobody chose, so nothing is consumed and nothing committed."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(5))
    app, ledger = quick_app(kafka, group, auto_offset_reset=policy), Ledger()
    app.consume(topic)(ledger.handle)

    with pytest.raises(NoOffsetError) as refused:
        await app.serve()

    assert repr(group) in str(refused.value)
    assert f"{topic}/0" in str(refused.value)
    assert "auto_offset_reset" in str(refused.value)
    assert refused.value.topic_partition == TopicPartition(topic, 0)
    assert app.statistics().state == "failed"
    assert ledger.started == []
    assert await kafka.committed(group, topic) == {}


async def test_a_partition_without_an_offset_ends_an_app_that_must_not_guess_only_on_a_new_topic(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """A group with commits on the topic has a first position there: later partitions begin at their start."""
    await kafka.create_topic(topic, partitions=2)
    for number in (0, 1):
        await kafka.produce(topic, messages(5, start=10 * number), partition=number)
    await commit_from_outside(kafka, group, topic, {0: 3})
    app, ledger = quick_app(kafka, group, auto_offset_reset="error"), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        await kafka.wait_for_lag(group, topic)

    assert ledger.offsets(0) == [3, 4]
    assert ledger.offsets(1) == [0, 1, 2, 3, 4]


async def test_earliest_begins_at_the_start_of_the_log(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(10))
    await kafka.delete_records(topic, before={0: 4})
    app, ledger = quick_app(kafka, group), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        await kafka.wait_for_lag(group, topic)

    assert ledger.offsets(0) == [4, 5, 6, 7, 8, 9]


async def test_latest_delivers_what_comes_after_the_start_and_skips_nothing_of_it(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, messages(10))
    app, ledger = quick_app(kafka, group, auto_offset_reset="latest"), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        sent = messages(20, start=100)
        await kafka.produce(topic, sent)
        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)

    assert set(ledger.values) == {value for _, value in sent}
    assert ledger.duplicates == []


@pytest.mark.parametrize("policy", ["earliest", "latest"])
async def test_the_first_position_is_committed_before_a_record_is_handed_out(
    kafka: SharedKafka, topic: str, group: str, policy: Policy
) -> None:
    """Else a crash before the first commit skips, under `latest`, what had come in meanwhile (I3)."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(10))
    app, ledger = quick_app(kafka, group, auto_offset_reset=policy), Ledger()
    app.consume(topic)(ledger.handle)
    meddler = Meddler(app._make_transport())
    ledger.hold()

    async with app.started(meddler):
        sent = messages(10, start=100)
        await kafka.produce(topic, sent)
        await ledger.until(lambda: ledger.started)
        assert await kafka.committed(group, topic) == {0: 0 if policy == "earliest" else 10}
        kinds = [kind for kind, *_ in meddler.events if kind in ("committed", "records")]
        assert kinds.index("committed") < kinds.index("records")
        ledger.release()
        await kafka.wait_for_lag(group, topic)


async def test_latest_skips_nothing_of_what_came_while_nothing_was_handed_out(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """A first run that ends before its first record has fixed where the group begins."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(10))
    first, ledger = quick_app(kafka, group, auto_offset_reset="latest"), Ledger()
    first.consume(topic)(ledger.handle)
    second = quick_app(kafka, group, auto_offset_reset="latest")
    second.include(first)
    sent = messages(5, start=100)

    async with first.started(Meddler(first._make_transport(), hand_out=False)):
        await kafka.produce(topic, sent)
    assert ledger.started == []
    async with second:
        await ledger.until_finished(sent)

    assert set(ledger.values) == {value for _, value in sent}


# With one that the log does not have --------------------------------------------------------


@pytest.mark.parametrize("policy", ["earliest", "latest", None])
@pytest.mark.parametrize(("committed", "why"), [(2, "below the start"), (50, "above the end")])
async def test_an_offset_outside_the_log_goes_on_at_its_start(
    kafka: SharedKafka, topic: str, group: str, committed: int, why: str, policy: Policy | None
) -> None:
    """Jumping to the end, as clients do under `latest`, would lose what came after the group's first position."""
    await kafka.create_topic(topic)
    sent = messages(10)
    await kafka.produce(topic, sent)
    await kafka.delete_records(topic, before={0: 4})
    await commit_from_outside(kafka, group, topic, {0: committed})
    app, ledger = quick_app(kafka, group, auto_offset_reset=policy), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        await ledger.until_finished(sent[4:])
        await kafka.wait_for_lag(group, topic)
        assert partition_of(app, 0).committed == 10

    assert ledger.offsets(0) == [4, 5, 6, 7, 8, 9], why


@pytest.mark.parametrize("committed", [2, 50])
async def test_an_offset_outside_the_log_ends_an_app_that_must_not_guess(
    kafka: SharedKafka, topic: str, group: str, committed: int
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(10))
    await kafka.delete_records(topic, before={0: 4})
    await commit_from_outside(kafka, group, topic, {0: committed})
    app, ledger = quick_app(kafka, group, auto_offset_reset="error"), Ledger()
    app.consume(topic)(ledger.handle)

    with pytest.raises(OffsetOutOfRangeError, match=f"offset {committed} of {topic}/0 is outside"):
        await app.serve()

    assert ledger.started == []
    assert await kafka.committed(group, topic) == {0: committed}


async def test_the_end_of_the_log_is_inside_it(kafka: SharedKafka, topic: str, group: str) -> None:
    """A group that has read everything, also when retention has deleted everything since."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(10))
    await kafka.delete_records(topic, before={0: 10})
    await commit_from_outside(kafka, group, topic, {0: 10})
    app, ledger = quick_app(kafka, group, auto_offset_reset="error"), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        sent = messages(3, start=100)
        await kafka.produce(topic, sent)
        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)

    assert ledger.offsets(0) == [10, 11, 12]


async def test_two_members_that_begin_at_once_under_latest_skip_nothing(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """The commits of the quicker one must not look like those of a group that knew the topic long ago."""
    await kafka.create_topic(topic, partitions=4)
    await kafka.produce(topic, messages(40))
    ledger = Ledger()
    apps = [quick_app(kafka, group, auto_offset_reset="latest") for _ in range(2)]
    for app in apps:
        app.consume(topic)(ledger.handle)

    async with asyncio.TaskGroup() as starting:
        for app in apps:
            starting.create_task(app.__aenter__(), name="start")
    try:
        await until(lambda: sorted(len(app.statistics().partitions) for app in apps) == [2, 2])
        sent = messages(40, start=1000)
        await kafka.produce(topic, sent)
        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)
    finally:
        for app in apps:
            await app.__aexit__(None, None, None)

    assert set(ledger.values) == {value for _, value in sent}
