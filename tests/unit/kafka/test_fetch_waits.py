"""How long brokers may hold a fetch: briefly while a partition is drained, longer while all of many are idle."""

import pytest
from aiokafka import errors as kafka
from aiokafka.consumer.fetcher import FetchError
from aiokafka.consumer.subscription_state import Assignment

from aioshard.kafka.aiokafka.buffer import FetchBuffer, fetch_wait
from aioshard.ports import Allowance
from aioshard.records import TopicPartition
from tests.unit.kafka.fetching import USUAL, Parts

PARTITIONS = [TopicPartition("t", number) for number in range(2_000)]


def refuse(_: TopicPartition) -> Allowance:
    raise AssertionError("nothing was fetched")


def begun(parts: Parts, *, may_wait_longer: bool = True) -> FetchBuffer:
    """An intake whose partitions all have a position and are fetched."""
    intake = FetchBuffer(read_committed=True, may_wait_longer=may_wait_longer)
    intake.begin(parts, Assignment(PARTITIONS))
    for partition in PARTITIONS:
        intake.seek(partition, 0)
    intake.resume(PARTITIONS)
    return intake


async def test_kept_partitions_continue_and_revoked_ones_pause() -> None:
    parts = Parts()
    buffer = FetchBuffer(read_committed=False)
    kept, held, gone, new, unopened = PARTITIONS[:5]
    buffer.begin(parts, Assignment([kept, held, gone, unopened]))
    for position, partition in enumerate((kept, held, gone), 5):
        buffer.seek(partition, position)
    buffer.resume([kept, gone])
    parts.states(buffer._assignment)[kept].highwater = 9

    now = Assignment([kept, held, new, unopened])
    buffer.begin(parts, now)

    states = parts.states(now)
    assert {name for name, state in states.items() if not state.paused} == {kept}
    assert [buffer.position(name) for name in (kept, held, gone, new, unopened)] == [5, 6, 7, None, None]
    assert buffer.end_offset(kept) == 9
    assert buffer._partitions[gone].state.paused
    buffer.remove([gone])
    assert set(buffer.partitions) == {kept, held, unopened, new}


@pytest.mark.parametrize(
    ("usual", "partitions", "left_over", "idle", "expected"),
    [
        (100, 10, False, False, 100),
        (100, 10, False, True, 100),
        (100, 400, False, True, 100),
        (100, 2_000, False, True, 500),
        (100, 100_000, False, True, 500),
        (900, 2_000, False, True, 900),
        (100, 2_000, False, False, 100),
        (100, 10, True, False, 10),
        (100, 500, True, False, 50),
        (100, 2_000, True, False, 100),
    ],
)
def test_fetches_wait_longer_only_for_many_idle_partitions(
    usual: int, partitions: int, left_over: bool, idle: bool, expected: int
) -> None:
    assert fetch_wait(usual, partitions, left_over=left_over, idle=idle) == expected


async def test_fetches_that_include_every_partition_wait_longer() -> None:
    parts = Parts()
    intake = begun(parts)
    assert parts.wait == USUAL, "the first fetch after an assignment names the partitions that are resumed first"

    intake.take(refuse)
    assert parts.wait == 500

    intake.pause(PARTITIONS[:1])
    assert parts.wait == USUAL, "the next fetch leaves it out, and it may be resumed meanwhile"
    intake.take(refuse)
    assert parts.wait == USUAL

    intake.resume(PARTITIONS[:1])
    intake.take(refuse)
    assert parts.wait == 500

    intake.begin(parts, Assignment(PARTITIONS[:1]))
    assert parts.wait == USUAL


async def test_fetches_do_not_wait_longer_soon_after_records() -> None:
    parts = Parts()
    intake = begun(parts)
    intake.take(refuse)
    parts.buffered[PARTITIONS[0]] = FetchError(error=kafka.UnknownError(), backoff=0)

    intake.take(refuse)
    assert parts.wait == USUAL

    parts.buffered.clear()
    intake.take(refuse)
    assert parts.wait == USUAL
    intake.end()


async def test_fetches_never_wait_longer_than_the_setting_when_it_is_set() -> None:
    parts = Parts()
    intake = begun(parts, may_wait_longer=False)

    intake.take(refuse)

    assert parts.wait == USUAL
