"""Start positions of a group: without a commit, with one outside the log, and with foreign metadata."""

from typing import Literal

import pytest

from aioshard import App
from aioshard.errors import NoOffsetError, OffsetOutOfRangeError
from aioshard.records import TopicPartition
from tests.kafka.faults.intercepting import Interceptor
from tests.kafka.faults.support import (
    Ledger,
    commit_from_outside,
    messages,
    partition_of,
    quick_app,
    transport_of,
    until,
)
from tests.support.brokers import SharedKafka

Policy = Literal["earliest", "latest", "error"]


# Without a committed offset ---------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "error"])
async def test_an_app_without_offset_and_policy_ends_and_names_both(
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


async def test_under_error_a_missing_offset_ends_the_app_only_on_a_new_topic(
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


async def test_earliest_starts_at_the_beginning_of_the_log(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(10))
    await kafka.delete_records(topic, before={0: 4})
    app, ledger = quick_app(kafka, group), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        await kafka.wait_for_lag(group, topic)

    assert ledger.offsets(0) == [4, 5, 6, 7, 8, 9]


async def test_latest_delivers_every_record_after_the_start(kafka: SharedKafka, topic: str, group: str) -> None:
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
async def test_no_record_is_delivered_before_the_first_position_is_committed(
    kafka: SharedKafka, topic: str, group: str, policy: Policy
) -> None:
    """Else a crash before the first commit skips, under `latest`, what had come in meanwhile (I3)."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(10))
    app, ledger = quick_app(kafka, group, auto_offset_reset=policy, start_timeout=None), Ledger()
    app.consume(topic)(ledger.handle)
    interceptor = Interceptor(transport_of(app))
    interceptor.commits.clear()

    async with app.started(interceptor):
        await until(lambda: any(kind == "commit" for kind, *_ in interceptor.events), app.explain)
        sent = messages(10, start=100)
        await kafka.produce(topic, sent)
        with pytest.raises(TimeoutError):
            await ledger.until(lambda: ledger.started, timeout=0.5)
        assert interceptor.taken == []
        interceptor.commits.set()

        await ledger.until_finished(sent)
        first = next(what[0] for kind, *what in interceptor.events if kind == "committed")
        assert first == {TopicPartition(topic, 0): 0 if policy == "earliest" else 10}
        await kafka.wait_for_lag(group, topic)
    assert len(ledger.finished) == (20 if policy == "earliest" else 10)


async def test_latest_skips_no_record_that_arrived_before_the_first_poll(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    """A first run that ends before its first record has fixed where the group begins."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(10))
    first, ledger = quick_app(kafka, group, auto_offset_reset="latest"), Ledger()
    first.consume(topic)(ledger.handle)
    second = quick_app(kafka, group, auto_offset_reset="latest")
    second.include_router(first)
    sent = messages(5, start=100)

    async with first.started(Interceptor(transport_of(first), hand_out=False)):
        await kafka.produce(topic, sent)
    assert ledger.started == []
    async with second:
        await ledger.until_finished(sent)

    assert set(ledger.values) == {value for _, value in sent}


# With one that the log does not have --------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [*(pytest.param(policy, marks=pytest.mark.chaos) for policy in ("earliest", None)), "latest"]
)
@pytest.mark.parametrize(("committed", "why"), [(2, "below the start"), (50, "above the end")])
async def test_an_offset_outside_the_log_resumes_at_its_start(
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
async def test_under_error_an_offset_outside_the_log_ends_the_app(
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


async def test_an_offset_at_the_end_of_the_log_is_valid(kafka: SharedKafka, topic: str, group: str) -> None:
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


async def test_a_member_that_starts_later_starts_at_the_end_too(kafka: SharedKafka, topic: str, group: str) -> None:
    """The commits of the quicker one must not look like those of a group that knew the topic long ago."""
    await kafka.create_topic(topic, partitions=2)
    for number in (0, 1):
        await kafka.produce(topic, messages(20), partition=number)
    ledger = Ledger()
    quick, slow = (
        quick_app(kafka, group, auto_offset_reset="latest", start_timeout=None, commit_timeout=1) for _ in range(2)
    )
    for app in (quick, slow):
        app.consume(topic)(ledger.handle)
    fast, late = Interceptor(transport_of(quick)), Interceptor(transport_of(slow))
    fast.commits.clear()
    late.questions.clear()

    def has_one(interceptor: Interceptor) -> bool:
        """Whether the member has one of the two partitions."""
        given = [what for kind, *what in interceptor.events if kind == "assigned"]
        return bool(given) and len(given[-1][0]) == 1

    async with quick.started(fast), slow.started(late):
        await until(lambda: has_one(fast) and has_one(late))
        fast.commits.set()
        await until(lambda: quick.statistics().partitions and _committed(quick) == 20, quick.explain)
        late.questions.set()

        await until(lambda: slow.statistics().partitions and _committed(slow) == 20, slow.explain)
        sent = messages(40, start=1000)
        await kafka.produce(topic, sent)
        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)

    assert set(ledger.values) == {value for _, value in sent}


def _committed(app: App) -> int | None:
    """The committed offset of the only partition that an app has."""
    (partition,) = app.statistics().partitions
    return partition.committed
