"""Consuming up to the ends of the logs, and no further."""

import asyncio

from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.runtime import Engine
from aioshard.errors import HaltedError

__all__ = ["caught_up", "halted_of", "nothing_moves"]

_CHECK_INTERVAL = 0.05


async def caught_up(engine: Engine, interval: float = _CHECK_INTERVAL) -> None:
    """Wait until all records up to the ends seen at the start are complete.

    Args:
        engine: The engine that consumes.
        interval: Seconds between checks.

    Raises:
        HaltedError: The records that are left are halted, or wait behind halted ones.
    """
    while True:
        if engine.failed.done():
            engine.failed.result()
        if engine.rebalance.in_place and all(_reached_end(engine, epoch) for epoch in engine.rebalance.epochs):
            return
        halted = halted_of(engine)
        if halted and nothing_moves(engine):
            raise HaltedError(repr(delivery) for delivery in halted)
        await asyncio.wait([engine.failed], timeout=interval)


def halted_of(engine: Engine) -> list[Delivery]:
    """Deliveries that occupy their shard until they are released."""
    return [delivery for handler in engine.handlers for shards in handler.feed.shards for delivery in shards.halted]


def _reached_end(engine: Engine, epoch: Epoch) -> bool:
    return epoch.tracker.committable >= engine.rebalance.ends[epoch.topic_partition]


def nothing_moves(engine: Engine) -> bool:
    """Whether nothing runs, and nothing can start or be taken in."""
    if not engine.rebalance.in_place or any(worker.deliveries for worker in engine.workers):
        return False
    if any(fetcher.has_unfed for fetcher in engine.rebalance.fetchers.values()):
        return False
    if not all(shards.at_rest for handler in engine.handlers for shards in handler.feed.shards):
        return False
    return all(
        epoch.tracker.position >= engine.rebalance.ends[epoch.topic_partition]
        or not engine.admission.allowance(epoch.topic_partition).records
        for epoch in engine.rebalance.epochs
    )
