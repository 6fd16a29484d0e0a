"""Permanently failed records: what they block, what they do not, and how they are reported."""

import asyncio
from collections.abc import Hashable
from typing import Any

import pytest

from aioshard import App, Record, Retry
from aioshard.errors import HaltedError
from tests.kafka.faults.support import Ledger, handler_of, messages, partition_of, quick_app, until
from tests.support.brokers import SharedKafka
from tests.support.cluster import Message

ATTEMPTS = 3
SHARE = 10
"""A hundredth of the buffer: the share of a partition that cannot advance."""


class Failing(Ledger):
    """A handler that fails for every record with key `bad`.

    Attributes:
        attempts: Offsets of the runs that failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attempts: list[int] = []

    async def handle(self, record: Record) -> None:
        if record.key == b"bad":
            self.attempts.append(record.offset)
            raise ValueError(f"no such customer: {record.value!r}")
        await super().handle(record)


def _app(kafka: SharedKafka, group: str, **overrides: Any) -> App:
    return quick_app(kafka, group, max_buffered_records=100 * SHARE, **overrides)


def _mixed(count: int, *, start: int = 0) -> list[Message]:
    """Records of key `bad` and of others in turn."""
    return [(b"bad" if index % 2 else key, value) for index, (key, value) in enumerate(messages(count, start=start))]


def _good(sent: list[Message]) -> list[Message]:
    return [message for message in sent if message[0] != b"bad"]


async def test_a_failing_record_halts_only_its_shard_and_is_named(kafka: SharedKafka, topic: str, group: str) -> None:
    """I1, I2, I6 and I11."""
    await kafka.create_topic(topic, partitions=2)
    app, ledger = _app(kafka, group), Failing()
    app.consume(topic, retry=Retry(attempts=ATTEMPTS, initial=0.01, maximum=0.02))(ledger.handle)
    async with app:
        halting: list[Message] = [(b"good", b"a"), (b"bad", b"b"), (b"bad", b"c"), (b"good", b"d")]
        await kafka.produce(topic, halting, partition=0)
        await until(lambda: handler_of(app).halted == 1, app.explain)
        assert ledger.attempts == [1] * ATTEMPTS
        assert handler_of(app).retried == ATTEMPTS - 1

        same = messages(50, start=100)
        await kafka.produce(topic, same, partition=0)
        await ledger.until_finished(_good(halting) + same)
        await until(lambda: partition_of(app, 0).committed == 1, app.explain)
        assert partition_of(app, 0).incomplete == 2

        held_up = [(b"bad", b"%d" % number) for number in range(1000, 1000 + 3 * SHARE)]
        await kafka.produce(topic, held_up, partition=0)
        await until(lambda: partition_of(app, 0).paused, app.explain)
        partition = partition_of(app, 0)
        assert f"{topic}/0/1" in str(partition.paused)
        assert partition.incomplete == SHARE
        assert partition.lag == len(halting) + len(same) + len(held_up) - 1
        assert (partition.oldest_incomplete_age or 0) > 0
        for part in (f"{topic}/0", "offset 1 ", "halted", f"s ago after {ATTEMPTS} attempt", "no such customer"):
            assert part in app.explain()

        other = messages(3000, start=5000)
        await kafka.produce(topic, other, partition=1)
        await ledger.until_finished(_good(halting) + same + other)
        await until(lambda: partition_of(app, 1).lag == 0, app.explain)
        assert app.statistics().state == "running"
        assert await kafka.committed(group, topic) == {0: 1, 1: 3000}
    assert await kafka.committed(group, topic) == {0: 1, 1: 3000}
    assert set(ledger.attempts) == {1}
    ledger.assert_in_order()


async def test_a_halted_record_is_retried_after_a_restart(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic)
    failing, fixed = _app(kafka, group), _app(kafka, group)
    broken, ledger = Failing(), Ledger()
    failing.consume(topic, retry=Retry(attempts=1))(broken.handle)
    fixed.consume(topic)(ledger.handle)
    sent = _mixed(6)
    await kafka.produce(topic, sent)

    async with failing:
        await broken.until_finished(_good(sent))
        await until(lambda: handler_of(failing).halted == 1, failing.explain)
    async with fixed:
        await kafka.wait_for_lag(group, topic)

    assert ledger.offsets(0) == [1, 3, 5], "the completions beyond it were stored"


@pytest.mark.parametrize("count", [6, 500])
async def test_until_caught_up_raises_the_halted_records(
    kafka: SharedKafka, topic: str, group: str, count: int
) -> None:
    """Also when not all that is left can be taken in behind it."""
    await kafka.create_topic(topic)
    app, ledger = _app(kafka, group), Failing()
    app.consume(topic, retry=Retry(attempts=2, initial=0.01))(ledger.handle)
    sent = _mixed(count)
    await kafka.produce(topic, sent)

    async with asyncio.timeout(20):
        with pytest.raises(HaltedError) as halted:
            await app.serve(until_caught_up=True)

    assert halted.value.records == (f"{topic}/0/1",)
    assert f"{topic}/0/1" in str(halted.value)
    assert await kafka.committed(group, topic) == {0: 1}
    assert ledger.attempts == [1, 1]


async def test_until_caught_up_waits_for_a_retry(kafka: SharedKafka, topic: str, group: str) -> None:
    """A record that waits for its retry is not halted yet."""
    await kafka.create_topic(topic)
    app, runs = _app(kafka, group), [0]

    @app.consume(topic, retry=Retry(attempts=3, initial=0.5, jitter=0))
    async def fails_twice(record: Record) -> None:
        runs[0] += 1
        if record.offset == 3 and runs[0] < 8:
            raise ValueError("not yet")

    await kafka.produce(topic, messages(6))

    async with asyncio.timeout(20):
        await app.serve(until_caught_up=True)

    assert await kafka.committed(group, topic) == {0: 6}


def _raises(record: Record) -> Hashable:
    if record.key == b"bad":
        raise KeyError("customer")
    return record.key


def _unhashable(record: Record) -> Hashable:
    return ["customer"] if record.key == b"bad" else record.key  # type: ignore[return-value]


@pytest.mark.parametrize("shards", [None, 4])
@pytest.mark.parametrize("shard_by", [_raises, _unhashable])
async def test_a_failing_sharding_function_halts_its_record_and_no_worker(
    kafka: SharedKafka, topic: str, group: str, shard_by: Any, shards: int | None
) -> None:
    """Without a key the record has no order to run in; it never runs, and the others do."""
    await kafka.create_topic(topic)
    app, ledger = _app(kafka, group), Failing()
    app.consume(topic, shard_by=shard_by, shards=shards)(ledger.handle)
    async with app:
        sent = _mixed(6)
        await kafka.produce(topic, sent)
        await ledger.until_finished(_good(sent))
        await until(lambda: handler_of(app).halted == 3, app.explain)
        more = messages(100, start=100)
        await kafka.produce(topic, more)

        await ledger.until_finished(_good(sent) + more)
        await until(lambda: partition_of(app, 0).committed == 1, app.explain)
        assert "offset 1 " in app.explain()
        assert ("KeyError" if shard_by is _raises else "TypeError") in app.explain()
        assert app.statistics().state == "running"
    assert ledger.attempts == []
    assert await kafka.committed(group, topic) == {0: 1}
