"""The engine with handlers that leave records out: `keep="latest"` and `max_age`, under seeded interleavings."""

import time
from typing import Any

from aioshard import Context, Record
from aioshard.records import TopicPartition
from tests.simulation.batching import BatchWorld
from tests.simulation.failing import FailingWorld
from tests.simulation.seeds import with_seeds
from tests.simulation.world import Process, World, live

MAX_AGE = 3.0


class LatestWorld(World):
    """A world in which a record may be left out once a later one of its key and partition is there."""

    def consume_options(self) -> dict[str, Any]:
        return super().consume_options() | {"keep": "latest"}

    def is_terminal(self, topic_partition: TopicPartition, offset: int) -> bool:
        return super().is_terminal(topic_partition, offset) or self.has_later(topic_partition, offset)

    def may_be_passed(self, topic_partition: TopicPartition, offset: int) -> bool:
        return super().may_be_passed(topic_partition, offset) or self.has_later(topic_partition, offset)

    def has_later(self, topic_partition: TopicPartition, offset: int) -> bool:
        return any(
            offset in offsets and offsets[-1] > offset
            for (place, _), offsets in self.of_key.items()
            if place == topic_partition
        )


class LatestBatches(LatestWorld, BatchWorld):
    """The same with batches."""


class LatestFailing(LatestWorld, FailingWorld):
    """The same with records that exhaust their attempts."""


class AgingWorld(World):
    """A world in which records grow too old."""

    def __init__(self, seed: int, *args: Any, **options: Any) -> None:
        super().__init__(seed, *args, **options)
        self.broker.now = time.time  # the clock of the loop

    def consume_options(self) -> dict[str, Any]:
        return super().consume_options() | {"max_age": MAX_AGE}

    async def handle(self, process: Process, record: Record, context: Context) -> None:
        if time.time() - record.timestamp > MAX_AGE:
            self._breach(f"{record.topic_partition} {record.offset} runs and is {time.time() - record.timestamp} s old")
        await super().handle(process, record, context)

    def is_terminal(self, topic_partition: TopicPartition, offset: int) -> bool:
        return super().is_terminal(topic_partition, offset) or self.is_old(topic_partition, offset)

    def may_be_passed(self, topic_partition: TopicPartition, offset: int) -> bool:
        return super().may_be_passed(topic_partition, offset) or self.is_old(topic_partition, offset)

    def is_old(self, topic_partition: TopicPartition, offset: int) -> bool:
        (record,) = self.broker.log(*topic_partition).read(offset, offset + 1)
        return time.time() - record.timestamp > MAX_AGE


class AgingFailing(AgingWorld, FailingWorld):
    """The same with records that exhaust their attempts."""


class AgingLatest(AgingWorld, LatestWorld):
    """A world in which records are left out for both reasons."""


def simulate(world_class: type[World], seed: int, *args: Any) -> int:
    """Let a world live; return how many records its handlers never finished."""
    worlds: list[World] = []

    async def life() -> None:
        world = world_class(seed, *args)
        worlds.append(world)
        await world.live_through(30, [0.0, 0.01, 0.1, 1.0])

    live(life(), seed=seed, on_step=lambda: worlds[0].check() if worlds else None)
    (world,) = worlds
    return sum(len(set(offsets) - world.done[place]) for place, offsets in world.offsets.items())


@with_seeds(5, least=3)
def test_the_newest_of_each_key_runs(seeds: range) -> None:
    assert sum(simulate(LatestWorld, seed) for seed in seeds) > 0


@with_seeds(5, least=3)
def test_the_newest_of_each_key_runs_in_batches(seeds: range) -> None:
    assert sum(simulate(LatestBatches, seed) for seed in seeds) > 0


@with_seeds(5, least=3)
def test_the_newest_of_each_key_runs_or_ends_as_its_policy_says(seeds: range) -> None:
    policies = ("skip", "dead letter", "park")
    for seed in seeds:
        simulate(LatestFailing, seed, policies[seed % len(policies)])


@with_seeds(5, least=3)
def test_no_record_starts_that_is_too_old(seeds: range) -> None:
    assert sum(simulate(AgingWorld, seed) for seed in seeds) > 0


@with_seeds(5, least=4)
def test_no_record_starts_that_is_too_old_whatever_the_policy(seeds: range) -> None:
    policies = ("skip", "park", "dead letter", "park for good")
    for seed in seeds:
        simulate(AgingFailing, seed, policies[seed % len(policies)])


@with_seeds(5, least=3)
def test_records_are_left_out_for_both_reasons(seeds: range) -> None:
    for seed in seeds:
        simulate(AgingLatest, seed)
