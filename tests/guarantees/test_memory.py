"""I6: bounded buffer memory for any handler and any record size."""

import random

import pytest

from tests.guarantees.behaviour import HANG
from tests.guarantees.checks import KeyOrder, LagZero, NeverAhead, NoDuplicates, NothingLost
from tests.guarantees.observations import Kind
from tests.guarantees.process import Member
from tests.guarantees.scenario import Scenario
from tests.support.cluster import Message

MIB = 1024 * 1024
OVERHEAD = 500
"""Overhead of a record beyond its bytes."""

SMALL, LARGE = 100, 100 * 1024
PATIENCE = 60
"""Samples of the statistics over which nothing more is taken in: about 2.5 s."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.chaos)])
async def test_a_hanging_handler_on_a_large_topic_buffers_no_more_than_the_bound(scenario: Scenario) -> None:
    bound, partitions, total = 16 * MIB, 16, 256 * MIB
    await scenario.create(partitions)
    await fill(scenario, total)

    settings = {"max_buffered_bytes": bound, "max_buffered_records": 100_000}
    member = scenario.start("a", settings, hangs="until cancelled", hangs_on="all")
    await scenario.until_settled("a")
    await until_intake_stops(scenario, member)

    sample = member.sample
    statistics = sample["statistics"]
    assert sample["peaks"]["buffered_bytes"] <= bound + LARGE + OVERHEAD
    assert statistics["buffered_bytes"] > bound // 2, "the buffer was not filled: it proves nothing"
    grown = (sample["rss_peak"] - sample["rss_at_start"]) / MIB
    assert grown <= 2 * bound / MIB + 50, f"resident memory grew by {grown:.0f} MiB"
    assert all(found["paused"] for found in statistics["partitions"]), "the statistics say why nothing moves"


async def fill(scenario: Scenario, total: int) -> None:
    """Produces small and large records, mixed, of about *total* bytes."""
    chance = random.Random(6)
    produced = 0
    while produced < total:
        chunk: list[Message] = []
        while sum(len(value or b"") for _, value in chunk[-400:]) < 16 * MIB:
            size = chance.choice((SMALL, LARGE))
            chunk.append((b"k%d" % chance.randrange(1_000), bytes(size)))
        produced += sum(len(value or b"") for _, value in chunk)
        await scenario.kafka.produce(scenario.topic, chunk)


async def until_intake_stops(scenario: Scenario, member: Member) -> None:
    """Returns when each partition is paused and none has moved for a while."""
    seen: dict[str, int] = {}

    def calm() -> bool:
        sample = member.sample
        if not sample:
            return False
        # Not the resident memory: the kernel's peak creeps by pages for as long as the process reports.
        state = repr((sample["peaks"], [found["position"] for found in sample["statistics"]["partitions"]]))
        since = seen.setdefault(state, sample["samples"])
        return all(found["paused"] for found in member.partitions.values()) and sample["samples"] - since > PATIENCE

    await scenario.until(calm, "the member takes in nothing more", 60)


@pytest.mark.chaos
async def test_a_record_larger_than_the_bound_is_processed_alone(scenario: Scenario) -> None:
    bound, size = MIB // 4, 900 * 1024
    await scenario.create(1, {"max.message.bytes": str(2 * MIB)})
    small: list[Message] = [(b"k%d" % number, bytes(SMALL)) for number in range(300)]
    before = await scenario.produce(small)
    (large,) = await scenario.produce([(b"large", HANG + bytes(size))])
    await scenario.produce(small)

    member = scenario.start("a", {"max_buffered_bytes": bound}, hangs="until released", base=0.01)
    await scenario.until(lambda: large in scenario.observations.started, "the large record has started")
    samples = member.sample["samples"]
    await scenario.until(lambda: member.sample["samples"] > samples + PATIENCE, "the member had time for more")

    assert scenario.observations.refresh().finished == set(before)
    assert member.statistics["buffered_records"] == 1
    assert size < member.sample["peaks"]["buffered_bytes"] <= size + OVERHEAD + 10
    assert member.partitions[0]["paused"]

    scenario.release()
    await scenario.until_finished(601)
    assert len(scenario.observations.of("a.1", Kind.STARTED)) == 601
    await scenario.verify(NothingLost(), KeyOrder(), NeverAhead(), NoDuplicates(), LagZero())
