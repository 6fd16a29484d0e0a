"""Why one partition does not advance: its oldest record, the other findings, and a verdict. Safe from any thread."""

import itertools
import operator
from collections.abc import Iterator

from aioshard.engine.epoch import Gate
from aioshard.engine.explain.causes import HandlerSnapshot
from aioshard.engine.explain.words import MOST_NAMED, for_seconds, without_numbers
from aioshard.engine.partition import Partition
from aioshard.engine.pauses import APPLICATION
from aioshard.engine.watch import Watch
from aioshard.observe import Finding, IncompleteRecord, PartitionDiagnosis, Verdict
from aioshard.records import TopicPartition, counted

_MOMENT = 1.0
"""Seconds after which the oldest record of a partition is reported as holding it back."""
_SLOW_FETCH = 5.0
"""Seconds without a record, although there are more, after which that is reported."""
_PARKED = "parked"
"""Kind of finding about a parked record, which does not hold its partition back."""
_HALTED = "halted"
"""Kind of finding about halted records behind the oldest record, which do not hold their partition back yet."""
_DRAINED_NAMED = 3
"""Maximum number of records named when a drain waits for several."""


def examine(watch: Watch, partition: Partition, snapshot: HandlerSnapshot) -> PartitionDiagnosis:
    """Explain why a partition does not advance.

    Args:
        watch: Knows since when things have been as they are.
        partition: The partition.
        snapshot: The snapshot of its handler.
    """
    return _Examination(watch, partition, snapshot).diagnose()


class _Examination:
    """One look at a partition."""

    def __init__(self, watch: Watch, partition: Partition, snapshot: HandlerSnapshot) -> None:
        engine = watch.engine
        oldest = partition.tracker.oldest
        self._watch = watch
        self._engine = engine
        self._partition = partition
        self._name = partition.topic_partition
        self._snapshot = snapshot
        self._now = engine.clock()
        self._stuck_after = engine.settings.stuck_after
        self._head = None if oldest is None else snapshot.describe(oldest)
        """The oldest incomplete record."""

    def diagnose(self) -> PartitionDiagnosis:
        """Return the findings, and the verdict and the sentence that follow from them."""
        findings = tuple(self._findings())
        stalled_for = self._stalled_for()
        verdict = self._verdict(findings, stalled_for)
        since = stalled_for if verdict in ("waiting", "stuck") else None
        head = self._head
        if head is None:
            sentence = self._sentence_without_head(verdict, findings)
            window = 0
            behind = 0
        else:
            partition = self._partition
            incomplete = len(partition.tracker)
            sentence = self._sentence(head, verdict, since)
            window = partition.tracker.position - head.offset
            waiting = min(head.waiting + len(partition.evicted), incomplete - 1)
            behind = max(window - incomplete, 0) + waiting
        return PartitionDiagnosis(
            topic=self._name.topic,
            partition=self._name.partition,
            verdict=verdict,
            since=since,
            sentence=sentence,
            head=head,
            findings=findings,
            window=window,
            behind=behind,
        )

    # The verdict ----------------------------------------------------------------------

    def _stalled_for(self) -> float:
        """Return for how many seconds the partition has not advanced."""
        failed = self._partition.commits.held_up_by_transactions
        if failed is not None:  # records that finish in an epoch are not committed, and run again
            return self._now - failed.since
        stands = self._watch.stands(self._partition)
        head = self._head
        if head is None:
            return stands
        # Not simply its age: it may have waited behind slower records. Sampled times are a moment late.
        if stands and stands > head.age - 2 * _MOMENT:
            return head.age
        return min(stands, head.age)

    def _verdict(self, findings: tuple[Finding, ...], stalled_for: float) -> Verdict:
        head = self._head
        if self._is_stuck(stalled_for):
            return "stuck"
        if any(finding.kind not in (_PARKED, _HALTED) for finding in findings):
            return "waiting"
        if head is None:
            return "up to date" if self._is_up_to_date() else "advancing"
        if head.state in ("outliving", "retrying", "halted", "evicted", "held") or stalled_for >= _MOMENT:
            return "waiting"
        return "advancing"

    def _is_stuck(self, stalled_for: float) -> bool:
        partition = self._partition
        head = self._head
        if partition.commits.keeps_failing(self._now, self._stuck_after):
            return True
        if head is None or not partition.stuck(self._now, self._stuck_after):
            return False
        return head.state == "halted" or stalled_for > self._stuck_after

    def _is_up_to_date(self) -> bool:
        """Whether everything up to the end of the log is committed."""
        partition = self._partition
        position = partition.tracker.position
        end = self._engine.log_end(partition)
        return partition.commits.acknowledged == position and (end is None or end <= position)

    def _sentence(self, head: IncompleteRecord, verdict: Verdict, since: float | None) -> str:
        verb = "advances" if verdict == "advancing" else f"has not advanced{for_seconds(since)}"
        known = []
        if head.key is not None:
            known.append(f"key {head.key}")
        if head.shard is not None:
            known.append(f"shard {head.shard}")
        if head.state != "halted":  # otherwise the reason gives the number; it may have been given up before the last
            known.append(f"attempt {head.attempt} of {head.attempts}")
        details = f" ({', '.join(known)})" if known else ""
        incomplete = counted(len(self._partition.tracker), "record")
        return (
            f"{self._name} {verb}: {incomplete} incomplete, the oldest is offset {head.offset}{details}, which arrived "
            f"{head.age:.1f} s ago; {head.reason}"
        )

    def _sentence_without_head(self, verdict: Verdict, findings: tuple[Finding, ...]) -> str:
        partition = self._partition
        position = partition.tracker.position
        if verdict == "up to date":
            return f"{self._name} is up to date: everything up to offset {position} is done and committed"
        end = self._engine.log_end(partition)
        log_end = f", of a log that ends at {end}" if end is not None and end > position else ""
        why = f": {findings[0].sentence}" if findings else ""
        return (
            f"{self._name} has no record in flight at position {position}, committed {partition.commits.acknowledged}"
            f"{log_end}{why}"
        )

    # Findings besides the oldest record -------------------------------------------------

    def _findings(self) -> Iterator[Finding]:
        partition = self._partition
        fault = partition.fault.sentence(self._now)
        # 1. Records may not start.
        if partition.gate is Gate.PAUSED:
            yield from self._paused_by_application()
            yield from self._paused_by_breaker()
        elif partition.gate is not Gate.OPEN:
            yield self._closed()
        # 2. Records cannot be read.
        if fault is not None:
            yield Finding(
                "unreadable",
                f"it cannot be read: {fault}",
                None,
                "fix the cause at the brokers; the app keeps retrying",
            )
        if partition.outside_log is not None:
            yield Finding(
                "outside log",
                f"its position {partition.outside_log} is not in the log; the new position is being looked up",
                None,
                None,
            )
        yield from self._open_transaction()
        # 3. Records have ended, but something of them is left to do.
        yield from self._waiting_outputs()
        yield from self._slow_replay()
        yield from self._also_halted()
        # 4. No record is taken in.
        if partition.gate is Gate.OPEN and fault is None:
            yield from self._intake()
        # 5. Records are complete but not committed.
        yield from self._uncommitted()

    def _paused_by_application(self) -> Iterator[Finding]:
        pauses = self._engine.pauses
        handler = self._snapshot.handler.spec.name
        calls: dict[TopicPartition | str, str] = {
            self._name: f"app.resume({self._name.topic!r}, {self._name.partition})",
            handler: f"app.resume_handler({handler!r})",
        }
        for paused, call in calls.items():
            why = pauses.get(paused)
            if why is not None:
                since = self._watch.lasts(("application", paused), why)
                yield Finding(
                    "paused",
                    f"paused by the application{for_seconds(since)}: {why}",
                    since,
                    f"call {call} to resume",
                )

    def _paused_by_breaker(self) -> Iterator[Finding]:
        partition = self._partition
        for who, why in tuple(partition.pauses.items()):
            if who == APPLICATION:
                continue
            since = self._watch.lasts(("pause", self._name, who), why)
            oldest = partition.tracker.oldest
            failure = None if oldest is None else oldest.failure
            failed = "" if failure is None else f" (record {oldest!r} failed with {failure})"
            probe = partition.probe
            tried = "" if probe is None else f"; record {probe!r} is being tried"
            yield Finding(
                "paused",
                f"paused{for_seconds(since)}: {why}{tried}",
                since,
                f"fix why the records fail{failed}: a system that the handler calls, the handler or the schema; the "
                "partition resumes by itself",
            )

    def _closed(self) -> Finding:
        """Return a finding about a partition that is being revoked, or is not certainly ours."""
        partition = self._partition
        since = self._watch.lasts(("gate", self._name), partition.gate)
        due = [delivery for epoch in partition.epochs for delivery in tuple(epoch.pending.values())]
        waits = ""
        if due:
            names = ", ".join(repr(delivery) for delivery in due[:_DRAINED_NAMED])
            if len(due) > _DRAINED_NAMED:
                names += ", ..."
            waits = f", and waits for {counted(len(due), 'record')} to end first: {names}"
        if self._engine.state == "draining":
            return Finding("draining", f"the app is draining{for_seconds(since)}{waits}", since, None)
        if due:
            return Finding(
                "rebalancing",
                f"the partition is being revoked{for_seconds(since)}{waits}",
                since,
                "end handlers soon after Context.revoked is set, to keep rebalances short",
            )
        what = "the group is rebalancing, or the partition's position is not confirmed yet"
        reason = self._engine.rebalance.unresolved.get(self._name)
        if reason is not None:
            what = f"the start position is not known yet: {reason}"
        return Finding("rebalancing", f"{what}{for_seconds(since)}", since, None)

    def _open_transaction(self) -> Iterator[Finding]:
        partition = self._partition
        log_end = partition.log_end
        if log_end.held_back and log_end.held_since is not None:
            since = self._now - log_end.held_since
            yield Finding(
                "transaction",
                f"{counted(log_end.held_back, 'offset')} from {log_end.offset} on cannot be read yet: a producer "
                f"has held a transaction open{for_seconds(since)}",
                since,
                "wait, or end that producer: the brokers abort it after its transaction timeout",
            )

    def _waiting_outputs(self) -> Iterator[Finding]:
        waiting = self._partition.commits.outputs_waiting
        if waiting:
            yield Finding(
                "outputs",
                f"the outputs of {counted(waiting, 'finished run')} are not published yet: the broker stores too "
                "little commit metadata to list their records, so they wait until the records before them are complete",
                None,
                "set offset.metadata.max.bytes of the broker to 4096, its default",
            )

    def _slow_replay(self) -> Iterator[Finding]:
        """Yield a finding if the oldest replay of a parked record takes long."""
        replays = self._partition.replays
        oldest = None if replays is None else replays.tracker.oldest
        if oldest is not None and self._now - oldest.arrived > _MOMENT:
            cause = self._snapshot.cause_of(oldest)
            yield Finding(
                _PARKED,
                f"record {oldest!r}, which was parked and is run again, {cause.reason}",
                self._now - oldest.arrived,
                cause.what_to_do,
            )

    def _also_halted(self) -> Iterator[Finding]:
        """Yield findings about halted records that hold the partition back once the oldest one is done, per error."""
        oldest = self._partition.tracker.oldest
        halted = []
        for delivery in self._snapshot.halted:
            block = delivery.block
            if delivery.epoch is self._partition and delivery is not oldest and block is not None:
                halted.append((without_numbers(block.error), delivery.offset, block.error))
        by_error = itertools.groupby(sorted(halted), key=operator.itemgetter(0))
        for _, group in itertools.islice(by_error, MOST_NAMED):
            records = list(group)
            _, _, error = records[0]
            offsets = tuple(offset for _, offset, _ in records[:MOST_NAMED])
            named = ", ".join(map(str, offsets))
            if len(records) > MOST_NAMED:
                named += ", ..."
            sentence = f"{counted(len(records), 'record')} behind it halted with {error}: offset {named}"
            yield Finding(_HALTED, sentence, None, None, error, offsets, len(records))

    def _intake(self) -> Iterator[Finding]:
        """Yield a finding if nothing is taken in although the log has more records."""
        # Use the end offset of the last fetch: a newer one may include records that are just being fetched.
        transport = self._engine.client.transport
        end = None if transport is None else transport.end_offset(self._name)
        position = self._partition.tracker.position
        if end is not None and end <= position and self._head is None:
            return
        since = self._watch.lasts(("position", self._name), position)
        limit = self._engine.intake.limit(self._partition)
        if limit is not None:
            yield Finding(
                "no room", f"nothing more is taken in{for_seconds(since)}: {limit.reason}", since, limit.what_to_do
            )
        elif end is not None and self._head is None and since is not None and since > _SLOW_FETCH:
            yield Finding(
                "nothing comes",
                f"no record has arrived{for_seconds(since)}, although its log ends at {end} and there is room",
                since,
                "check that the leader of the partition answers, and that this process gets enough CPU; the app keeps "
                "fetching",
            )

    def _uncommitted(self) -> Iterator[Finding]:
        """Yield a finding if commits of the partition, or transactions with it, fail."""
        commits = self._partition.commits
        failed = commits.held_up_by_transactions
        if failed is not None:
            since = self._now - failed.since
            yield Finding(
                "commit",
                f"its transactions have failed{for_seconds(since)}, {counted(failed.times, 'time')}, and it begins "
                f"again at offset {commits.acknowledged} each time: {failed.why}",
                since,
                "fix the cause at the brokers; the app keeps retrying",
            )
            return
        trouble = self._engine.committer.trouble
        committable = self._partition.tracker.committable
        if trouble.why is not None and committable != commits.acknowledged:
            since = self._now - trouble.since
            yield Finding(
                "commit",
                f"records are complete up to offset {committable} but not committed (committed: "
                f"{commits.acknowledged}); commits have not been acknowledged{for_seconds(since)}: {trouble.why}",
                since,
                "check that the brokers answer and allow commits; the app keeps retrying",
            )
