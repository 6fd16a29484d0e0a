"""Problems beyond single partitions: of the app, its client, its brokers and its topics. Safe from any thread."""

import itertools
from collections.abc import Iterator, Sequence

from aioshard.core.sharding import shown
from aioshard.core.text import message_of
from aioshard.engine.epoch import Delivery
from aioshard.engine.explain.words import MOST_NAMED, for_seconds, without_numbers
from aioshard.engine.handler import ActiveHandler
from aioshard.engine.rebalance import ADD_HANDLER, no_handler
from aioshard.engine.runtime import Engine
from aioshard.engine.watch import Watch
from aioshard.observe import Finding
from aioshard.records import counted

_MUCH_LEFT = 1_000
_FEW = 4
"""A tail is reported if at least `_MUCH_LEFT` records are left, most of them in at most a quarter of the partitions."""


def trouble_of(watch: Watch) -> str | None:
    """Describe the trouble with client, brokers or commits, and its duration; None if all is well."""
    engine = watch.engine
    now = engine.clock()
    if engine.trouble.why is not None:
        return f"no Kafka client for {now - engine.trouble.since:.0f} s: {engine.trouble.why}"
    trouble = watch.standstill.sentence(now) or engine.producer.trouble
    commits = engine.committer.trouble
    if trouble is None and commits.why is not None:
        return f"commits have not been acknowledged for {now - commits.since:.0f} s: {commits.why}"
    return trouble


def _remedy(engine: Engine) -> str:
    """Return what to do about the trouble of `trouble_of`."""
    standstill = engine.standstill
    if engine.trouble.why is None and standstill is not None:
        if standstill == engine.hang:
            return "check that the brokers answer and allow the request; records of an aborted transaction run again"
        if standstill == engine.absence:
            return "create the topic, correct its name in the handler, or grant this user DESCRIBE on it"
        if standstill == engine.slow_join:
            return "wait, or look at the members; with group_instance_id, a restarted process rejoins immediately"
    return "check that the brokers answer and allow the request; the app keeps retrying"


def missing_processes(engine: Engine) -> str | None:
    """Say which worker processes do not start; None if all run, or if there are none."""
    return None if engine.processes is None else engine.processes.trouble


def _failure_of(engine: Engine) -> str | None:
    """Say why the app has failed; None if it has not."""
    if engine.state != "failed":
        return None
    error = engine.failed.exception() if engine.failed.done() else None
    why = "the log says why" if error is None else message_of(error)
    return f"the app has failed: {why}"


def restart_cures(watch: Watch) -> Iterator[str]:
    """Yield the reasons why a restart would help.

    Partitions stuck because of their data or of unavailable brokers are not among them: they would be stuck again
    after a restart.
    """
    engine = watch.engine
    limit = engine.settings.rebalance_timeout  # until then, heartbeats keep the membership
    if watch.loop is not None and watch.loop.standing() > limit:
        blocked = watch.blocked
        if blocked is not None and blocked.restart_helps:
            yield f"{blocked}; that is longer than rebalance_timeout={limit:g} s"
    failure = _failure_of(engine)
    if failure is not None:
        yield failure
    hangs = watch.hang.sentence(engine.clock())
    if hangs is not None and engine.state in ("starting", "running"):
        yield hangs


# Findings -------------------------------------------------------------------------------------


def general_findings(watch: Watch) -> Iterator[Finding]:
    """Yield the findings that concern all partitions."""
    yield from _failures(watch)
    yield from _healthy_keys_wait(watch.engine)
    yield from _unwritten(watch.engine)
    yield from _nothing_consumed(watch)
    for topic in sorted(watch.engine.rebalance.unhandled):
        yield Finding("topics", no_handler(topic), None, ADD_HANDLER)
    yield from _dominant_keys(watch)
    left = watch.tail()
    if left.lag >= _MUCH_LEFT and left.heaviest * _FEW <= left.partitions:
        yield Finding(
            "tail",
            f"{counted(left.lag, 'record')} are left, and {left}",
            None,
            "`aioshard group lag --over 10` shows it for the whole group; assignor='cooperative-lag' balances backlogs",
        )


def _healthy_keys_wait(engine: Engine) -> Iterator[Finding]:
    """Yield findings about partitions that take in nothing more behind a failed record: their other keys wait too."""
    waiting: dict[ActiveHandler, list[Delivery]] = {}
    for partition in engine.rebalance.partitions:
        oldest = partition.tracker.oldest
        if oldest is None or oldest.block is None or oldest.recovery is not None:
            continue
        if engine.intake.limit(partition) is not None:
            waiting.setdefault(engine.handlers.of(partition.topic_partition.topic), []).append(oldest)
    for handler, oldest_records in waiting.items():
        first = oldest_records[0]
        block = first.block
        error = "" if block is None else f" ({block.error})"
        parks = "on_failure=Park()"
        if block is None or not block.halted:
            parks = f"few attempts and {parks}"
        yield Finding(
            "healthy keys wait",
            f"healthy keys wait too in {counted(len(oldest_records), 'partition')} of handler {handler.spec.name}: "
            f"nothing more is taken in behind failed records, such as {first!r}{error}",
            None,
            f"fix the cause; with {parks} only the keys that fail would wait",
        )


def _dominant_keys(watch: Watch) -> Iterator[Finding]:
    """Yield findings about keys that take most of the time of their handlers' workers, while their records wait."""
    show_keys = watch.engine.settings.show_keys
    for handler, (delivery, share) in tuple(watch.dominant_keys.items()):
        waiting = handler.sharder.shards_of(delivery).behind(delivery)
        key = delivery.record.key
        if waiting == 0:
            continue
        named = f"the shard of record {delivery!r}"
        if key is not None:
            named += f" (key {shown(key, show_keys=show_keys)})"
        yield Finding(
            "dominant key",
            f"{named} took {share:.0%} of the time of handler {handler.spec.name}'s workers in the last minute, and "
            f"{counted(waiting, 'record')} of its partition wait behind it: its records run one after the other",
            None,
            "spread its records over more keys, or make the handler faster for it; more workers do not help",
        )


def _failures(watch: Watch) -> Iterator[Finding]:
    """Yield findings about the process and its connections, the worst first."""
    engine = watch.engine
    blocked = watch.blocked
    if blocked is not None:
        yield Finding("event loop", f"{blocked}; nothing else runs meanwhile", None, blocked.what_to_do)
    failure = _failure_of(engine)
    if failure is not None:
        yield Finding("failed", failure, None, "fix the cause, then restart the process")
    hangs = watch.hang.sentence(engine.clock())
    if hangs is not None:
        yield Finding("hung", hangs, None, "restart the process; /livez returns 503 until then")
    trouble = trouble_of(watch)
    if trouble is not None:
        yield Finding("trouble", trouble, None, _remedy(engine))
    missing = missing_processes(engine)
    if missing is not None:
        yield Finding(
            "processes",
            missing,
            None,
            "check the memory and the number of processes that the machine or container allows; the app keeps trying",
        )
    for silent in silent_registries(engine):
        yield Finding(
            "schema registry",
            f"{silent}; records with a schema that is not loaded yet wait, and so do values to be published",
            None,
            "check that the schema registry answers and accepts the login; the app keeps trying",
        )


def silent_registries(engine: Engine) -> Sequence[str]:
    """Name the schema registries that do not answer."""
    return engine.registries.troubles


def _nothing_consumed(watch: Watch) -> Iterator[Finding]:
    """Yield a finding if no partition is assigned, or not all of them are open."""
    engine = watch.engine
    rebalance = engine.rebalance
    if engine.state in ("starting", "running") and not rebalance.opened.is_set():
        since = watch.lasts("opened", fact=False)
        doing = rebalance.log.doing()
        what = f"the group is rebalancing: {doing}" if doing else "the group is rebalancing"
        reason = rebalance.trouble
        if reason is not None:
            what = f"the start position is not known yet: {reason}"
        yield Finding("rebalancing", f"{what}{for_seconds(since)}", since, None)
    elif not engine.handlers:
        yield Finding("nothing assigned", "the app has no handlers, so it consumes nothing", None, None)
    elif not rebalance.partitions:
        yield Finding("nothing assigned", "no partition is assigned to this process", None, None)


def _unwritten(engine: Engine) -> Iterator[Finding]:
    """Yield findings about topics that handlers cannot write to, and about the records that wait for that."""
    for handler in engine.handlers:
        parking = handler.parking
        why = None if parking is None else parking.trouble
        if parking is not None and why is not None:
            topic = parking.policy.topic
            yield Finding(
                "parking",
                f"the records that handler {handler.spec.name} parked in {topic} cannot be read or written: {why}",
                None,
                f"check that topic {topic} exists, and may be read and written",
            )
    for missing in engine.missing_outputs:
        yield Finding("topics", missing.sentence, None, missing.what_to_do)
    for handler in engine.handlers:
        yield from _failing_recoveries(handler)


def _failing_recoveries(handler: ActiveHandler) -> Iterator[Finding]:
    """Yield findings about records whose dead letters, or other recoveries, cannot be written, per cause."""
    blocked = (delivery for shards in handler.shards for delivery in shards.blocked)
    in_flight = (delivery for worker in handler.workers for delivery in tuple(worker.deliveries))
    failing: dict[str, list[tuple[Delivery, str]]] = {}
    for delivery in dict.fromkeys((*blocked, *in_flight)):
        why = _failure_of_recovery(delivery)
        if why is not None:
            failing.setdefault(without_numbers(why), []).append((delivery, why))
    for records in itertools.islice(failing.values(), MOST_NAMED):
        first, why = records[0]
        which = f"record {first!r}"
        if len(records) > 1:
            which = f"{counted(len(records), 'record')}, {first!r} first,"
        yield Finding(
            "recovery",
            f"{which} of handler {handler.spec.name} failed and cannot be completed, because this fails too: {why}",
            None,
            "fix that cause; the app keeps trying",
        )


def _failure_of_recovery(delivery: Delivery) -> str | None:
    """Return the recovery of a record and its latest error; None if it has not failed, but was only held back."""
    recovery = delivery.recovery
    error = delivery.recovery_error
    if recovery is None or error is None or not delivery.recovery_failures:
        return None
    return f"{recovery.purpose}: {error}"
