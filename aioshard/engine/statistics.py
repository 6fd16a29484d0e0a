"""The statistics of an app, assembled from the figures of its parts. Safe from any thread."""

import time
from collections import Counter

from aioshard.engine.epoch import Gate
from aioshard.engine.explain.problems import missing_processes, restart_cures, silent_registries, trouble_of
from aioshard.engine.partition import Partition
from aioshard.engine.runtime import Engine
from aioshard.engine.watch import Watch
from aioshard.observe import PartitionStatistics, Sample, Statistics


def statistics(watch: Watch) -> Statistics:
    """Take a snapshot of the statistics; safe to call from any thread."""
    engine = watch.engine
    intake = engine.intake.statistics()
    commits = engine.committer.statistics()
    rebalances = engine.rebalance.statistics()
    blocked = watch.blocked
    protocol = engine.group_protocol
    return Statistics(
        state=engine.state,
        group_id=engine.group_id,
        member_id=_member_id(engine),
        rebalances=rebalances.assignments,
        commits=commits.durations.count,
        commit_failures=commits.failure_durations.count,
        replayed=engine.handlers.replayed,
        lost_offsets=rebalances.lost_offsets,
        already_done=intake.already_done,
        buffered_records=intake.buffered_records,
        buffered_bytes=intake.buffered_bytes,
        client_losses=engine.client_losses,
        trouble=_trouble_of(watch) or (None if blocked is None else str(blocked)),
        partitions=_partitions(engine),
        handlers=tuple(handler.statistics() for handler in engine.handlers),
        rebalance_reports=rebalances.reports,
        loop_delays=None if watch.loop is None else watch.loop.delays.counts(),
        blocked=blocked,
        restart_cures=tuple(restart_cures(watch)),
        group_protocol=None if protocol is None else protocol.name,
        group_protocol_reason=None if protocol is None else protocol.reason,
        rebalance_kinds=rebalances.kinds,
        rebalance_seconds=rebalances.seconds,
        catch_up_seconds=watch.tail().seconds,
        heartbeat_age=_heartbeat_age(engine),
        commit_durations=commits.durations,
        commit_failure_durations=commits.failure_durations,
        transactions=commits.transactions,
        limits=engine.limits.statistics(),
    )


def sample(watch: Watch) -> Sample:
    """Take a sample of the figures that the dashboard plots.

    It runs in the event loop, so it does not take all statistics: with 1,000 partitions they cost 60 ms.
    """
    engine = watch.engine
    lags = engine.lags()
    ages = [partition.oldest_age for partition in engine.rebalance.partitions]
    counters = [handler.counters for handler in engine.handlers]
    durations = [counts for handler in counters for counts in handler.durations]
    return Sample(
        at=time.time(),
        processed=sum(handler.processed for handler in counters),
        lag=sum(lags.values()) if lags else None,
        oldest_age=max((age for age in ages if age is not None), default=0.0),
        durations=tuple(map(sum, zip(*durations, strict=True))),
    )


def _trouble_of(watch: Watch) -> str | None:
    """Describe the problem that keeps the app from consuming; None if there is none, or only a blocked event loop."""
    engine = watch.engine
    trouble = trouble_of(watch) or missing_processes(engine) or watch.hang.sentence(engine.clock())
    return trouble or "; ".join(silent_registries(engine)) or None


def _member_id(engine: Engine) -> str | None:
    transport = engine.client.transport
    if transport is None:
        return None
    return transport.membership().member_id or None


def _heartbeat_age(engine: Engine) -> float | None:
    transport = engine.client.transport
    heartbeat = None if transport is None else transport.last_heartbeat
    if heartbeat is None:
        return None
    return max(engine.clock() - heartbeat, 0.0)


def _partitions(engine: Engine) -> tuple[PartitionStatistics, ...]:
    """Return the statistics of all partitions, by name."""
    in_flight = Counter(delivery.epoch for worker in engine.handlers.workers for delivery in worker.deliveries)
    return tuple(
        partition.statistics(engine.log_end(partition), in_flight[partition], _why_paused(engine, partition))
        for partition in sorted(engine.rebalance.partitions, key=lambda partition: partition.topic_partition)
    )


def _why_paused(engine: Engine, partition: Partition) -> str | None:
    """Say why nothing is fetched from a partition; None if it is."""
    if partition.gate is Gate.PAUSED:
        return "; ".join(partition.pauses.values())
    if partition.gate is not Gate.OPEN:
        if engine.state == "draining":
            return "the app is draining"
        return "the group is rebalancing, or the partition's position is not confirmed yet"
    return partition.fault.sentence(engine.clock()) or engine.intake.reason(partition)
