"""Why each partition does not advance: the record in front, the limits around it, since when, and what to do."""

from collections.abc import Iterator, Sequence

from aioshard.engine.epoch import Epoch, Gate
from aioshard.engine.handler import Running
from aioshard.engine.insight.head import Ward, for_seconds, stack_in_words
from aioshard.engine.insight.process import of_the_process
from aioshard.engine.rebalance import APPLICATION
from aioshard.engine.runtime import Engine
from aioshard.observe import Diagnosis, Finding, HeadOfLine, PartitionDiagnosis, Verdict
from aioshard.records import TopicPartition

__all__ = ["diagnose", "diagnose_partition", "in_words", "line_of", "trouble_of"]

_MOMENT = 1.0
"""Seconds in hand after which the oldest record of a partition is said to be in the way."""
_SLOW_FETCH = 5.0
"""Seconds without a record after which it is said that none comes, though there are some."""
_PARKED = "parked"
"""The kind of finding about a record that is out of the way of its partition."""
_HALTED = "halted"
"""The kind of finding about halted records behind the oldest record, which do not hold their partition back yet."""
_NAMED = 3
"""Of records that are waited for together so many are named."""
_NAMED_HALTED = 10
"""Of halted records so many are named: each is released by itself."""


def diagnose(engine: Engine, *, show_keys: bool) -> Diagnosis:
    """Why each partition does not advance; safe to call from any thread.

    Args:
        engine: The running engine.
        show_keys: Whether record keys may be shown; they may be personal data.
    """
    now = engine.clock()
    wards = {id(running): _ward(engine, running, now, show_keys=show_keys) for running in engine.handlers}
    partitions = [
        _examine(engine, epoch, now, wards[id(engine.handler_of(epoch.topic_partition.topic))])
        for epoch in sorted(engine.rebalance.epochs, key=lambda epoch: epoch.topic_partition)
    ]
    return Diagnosis(
        state=engine.state,
        findings=tuple(_general(engine, now)),
        partitions=tuple(partitions),
        outliving=tuple(run for ward in wards.values() for run in ward.find_outliving()),
    )


def diagnose_partition(engine: Engine, epoch: Epoch, *, show_keys: bool) -> PartitionDiagnosis:
    """Why one partition does not advance; as `diagnose`."""
    now = engine.clock()
    running = engine.handler_of(epoch.topic_partition.topic)
    return _examine(engine, epoch, now, _ward(engine, running, now, show_keys=show_keys))


def _ward(engine: Engine, running: Running, now: float, *, show_keys: bool) -> Ward:
    return Ward(running, engine.since, now, show_keys=show_keys)


# All partitions ----------------------------------------------------------------------------


def trouble_of(engine: Engine, now: float) -> str | None:
    """What is wrong beyond single partitions, and since when; None when nothing is."""
    if engine.trouble is not None:
        return f"no Kafka client for {now - engine.trouble_since:.0f} s: {engine.trouble}"
    standstill = engine.standstill.sentence(now)
    if standstill is not None:
        return standstill
    if engine.producer.trouble is not None:
        return engine.producer.trouble
    committer = engine.committer
    if committer.trouble is not None:
        return f"commits have not been acknowledged for {now - committer.trouble_since:.0f} s: {committer.trouble}"
    return None


def _general(engine: Engine, now: float) -> Iterator[Finding]:
    yield from of_the_process(engine, now)
    trouble = trouble_of(engine, now)
    if trouble is not None:
        yield Finding("trouble", trouble, None, "see that the brokers answer and allow what is asked; we go on trying")
    for running in engine.handlers:
        if running.parking is not None and running.parking.trouble is not None:
            topic, name = running.parking.policy.topic, running.spec.name
            sentence = (
                f"what handler {name} has parked in {topic} cannot be read or answered: {running.parking.trouble}"
            )
            yield Finding("parking", sentence, None, f"see that topic {topic} exists, and may be read and written")
    if engine.state in ("starting", "running") and not engine.rebalance.settled.is_set():
        since = _seconds(engine.since.of("settled", fact=False), now)
        doing = engine.rebalance.log.doing()
        what = f"the group is rebalancing: {doing}" if doing else "the group is rebalancing"
        if (reason := engine.rebalance.trouble) is not None:
            what = f"where to resume is not known yet: {reason}"
        yield Finding("rebalancing", f"{what}{for_seconds(since)}", since, None)
    elif not engine.rebalance.epochs:
        yield Finding("nothing assigned", "no partition is assigned to this process", None, None)


# One partition -----------------------------------------------------------------------------


def _examine(engine: Engine, epoch: Epoch, now: float, ward: Ward) -> PartitionDiagnosis:
    tracker = epoch.tracker
    oldest = tracker.oldest
    head = None if oldest is None else ward.describe(oldest)
    committable = tracker.position if oldest is None else oldest.offset
    findings = tuple(_findings(engine, epoch, head, now, ward))
    standing = _standing(engine, epoch, committable, head, now)
    verdict = _verdict(engine, epoch, head, findings, standing=standing, now=now)
    since = standing if verdict in ("waiting", "stuck") else None
    window = tracker.position - committable
    behind = 0
    if oldest is not None:
        waiting = ward.behind(oldest) + len(epoch.shed)
        behind = max(window - len(tracker), 0) + min(waiting, len(tracker) - 1)
    return PartitionDiagnosis(
        topic=epoch.topic_partition.topic,
        partition=epoch.topic_partition.partition,
        verdict=verdict,
        since=since,
        sentence=_sentence_of_none(engine, epoch, verdict, findings)
        if head is None
        else _sentence(epoch, head, verdict, since),
        head=head,
        findings=findings,
        window=window,
        behind=behind,
    )


def _standing(engine: Engine, epoch: Epoch, committable: int, head: HeadOfLine | None, now: float) -> float | None:
    """For how long the partition has not advanced; None when nobody noted that it did."""
    noted = engine.since.of(("committable", epoch.topic_partition), committable)
    moved = _seconds(engine.since.looked_at if noted is None else noted, now)
    if head is None:
        return moved
    # Not since it came in: it may have been behind others that were slower. What was noted is a moment late.
    return head.age if moved is None or (noted is not None and moved > head.age - 2 * _MOMENT) else min(moved, head.age)


def _seconds(at: float | None, now: float) -> float | None:
    return None if at is None else max(now - at, 0.0)


def _verdict(
    engine: Engine,
    epoch: Epoch,
    head: HeadOfLine | None,
    findings: Sequence[Finding],
    *,
    standing: float | None,
    now: float,
) -> Verdict:
    limit = engine.settings.stuck_after
    lasts = standing is not None and standing > limit
    if head is not None and epoch.stuck(now, limit) and (lasts or head.state == "halted"):
        return "stuck"
    if any(finding.kind not in (_PARKED, _HALTED) for finding in findings):
        return "waiting"
    if head is not None:
        waits = head.state in ("outliving", "retrying", "halted", "given back", "held")
        return "waiting" if waits or standing is None or standing >= _MOMENT else "advancing"
    end = engine.log_ends.of(epoch)
    up_to_date = epoch.acknowledged == epoch.tracker.position and (end is None or end <= epoch.tracker.position)
    return "up to date" if up_to_date else "advancing"


def _sentence(epoch: Epoch, head: HeadOfLine, verdict: Verdict, since: float | None) -> str:
    verb = "advances" if verdict == "advancing" else f"has not advanced{for_seconds(since)}"
    key = "" if head.key is None else f"key {head.key}, "
    shard = "" if head.shard is None else f"shard {head.shard}, "
    # Of a halted record the reason says how many attempts there were; it may have given up before the last one.
    attempt = "" if head.state == "halted" else f"attempt {head.attempt} of {head.attempts}"
    known = f"{key}{shard}{attempt}".removesuffix(", ")
    return (
        f"{epoch.topic_partition} {verb}: {len(epoch.tracker)} record(s) incomplete, the oldest is offset "
        f"{head.offset}{f' ({known})' if known else ''}, in hand for {head.age:.1f} s; "
        f"{head.reason}"
    )


def _sentence_of_none(engine: Engine, epoch: Epoch, verdict: Verdict, findings: Sequence[Finding]) -> str:
    name, position = epoch.topic_partition, epoch.tracker.position
    if verdict == "up to date":
        return f"{name} is up to date: everything up to offset {position} is done and committed"
    end = engine.log_ends.of(epoch)
    there_is = f", of a log that ends at {end}" if end is not None and end > position else ""
    why = f": {findings[0].sentence}" if findings else ""
    return f"{name} has nothing in hand at position {position}, committed {epoch.acknowledged}{there_is}{why}"


# What is in the way beside the oldest record ------------------------------------------------


def _findings(engine: Engine, epoch: Epoch, head: HeadOfLine | None, now: float, ward: Ward) -> Iterator[Finding]:
    if epoch.gate is Gate.PAUSED:
        yield from _pauses(engine, epoch, now)
    elif epoch.gate is not Gate.OPEN:
        yield _closed(engine, epoch, now)
    fault = epoch.fault(now)
    if fault is not None:
        sentence = f"it cannot be read: {fault}"
        yield Finding(
            "unreadable", sentence, None, "we go on trying; what that says has to be mended where the topic is"
        )
    if epoch.outside_log is not None:
        sentence = f"its position {epoch.outside_log} is not in the log; where to go on is being found out"
        yield Finding("outside log", sentence, None, None)
    yield from _run_again(engine, epoch, now, ward)
    yield from _also_halted(engine, epoch)
    if epoch.gate is Gate.OPEN and fault is None:
        yield from _intake(engine, epoch, head, now)
    committer, committable = engine.committer, epoch.tracker.committable
    if committer.trouble is not None and committable != epoch.acknowledged:
        since = now - committer.trouble_since
        sentence = (
            f"what is done up to offset {committable} is not committed (committed: {epoch.acknowledged}); commits have "
            f"not been acknowledged{for_seconds(since)}: {committer.trouble}"
        )
        yield Finding("commit", sentence, since, "we go on trying; see that the brokers answer and allow it")


def _pauses(engine: Engine, epoch: Epoch, now: float) -> Iterator[Finding]:
    name = epoch.topic_partition
    calls: dict[TopicPartition | str, str] = {
        name: f"app.resume({name.topic!r}, {name.partition})",
        (handler := engine.handler_of(name.topic).spec.name): f"app.resume_handler({handler!r})",
    }
    for paused, call in calls.items():
        why = engine.pauses.get(paused)
        if why is not None:
            since = _seconds(engine.since.of(("application", paused), why), now)
            sentence = f"paused by the application{for_seconds(since)}: {why}"
            yield Finding("paused", sentence, since, f"{call} lets it go on")
    for who, why in tuple(epoch.pauses.items()):
        if who == APPLICATION:
            continue
        since = _seconds(engine.since.of(("pause", name, who), why), now)
        oldest = epoch.tracker.oldest
        failed = (
            "" if oldest is None or oldest.failure is None else f" (record {oldest!r} failed with {oldest.failure})"
        )
        probe = epoch.probe
        tried = "" if probe is None else f"; record {probe!r} is being tried"
        advice = f"see what the handler depends on{failed}; it goes on by itself"
        yield Finding("paused", f"paused{for_seconds(since)}: {why}{tried}", since, advice)


def _closed(engine: Engine, epoch: Epoch, now: float) -> Finding:
    since = _seconds(engine.since.of(("gate", epoch.topic_partition), epoch.gate), now)
    epochs = engine.feed_of(epoch.topic_partition.topic).with_side(epoch)
    due = [one for each in epochs if each.drain is not None for one in tuple(each.drain.pending.values())]
    waits = ""
    if due:
        names = ", ".join(repr(delivery) for delivery in due[:_NAMED]) + (", ..." if len(due) > _NAMED else "")
        waits = f", and waits for {len(due)} record(s) to end first: {names}"
    if engine.state == "draining":
        return Finding("draining", f"the app is draining{for_seconds(since)}{waits}", since, None)
    if due:
        advice = "handlers that end soon when Context.revoked is set make rebalances short"
        return Finding("rebalancing", f"the partition is being taken away{for_seconds(since)}{waits}", since, advice)
    reason = engine.rebalance.unsettled.get(epoch.topic_partition)
    what = "the group is rebalancing, or the partition's position is not confirmed yet"
    if reason is not None:
        what = f"where to resume is not known yet: {reason}"
    return Finding("rebalancing", f"{what}{for_seconds(since)}", since, None)


def _run_again(engine: Engine, epoch: Epoch, now: float, ward: Ward) -> Iterator[Finding]:
    """What was parked of a partition, and is in hand now: the oldest that does not come to an end."""
    for side in engine.feed_of(epoch.topic_partition.topic).with_side(epoch)[1:]:
        oldest = side.tracker.oldest
        if oldest is not None and now - oldest.arrived > _MOMENT:
            cause = ward.cause_of(oldest)
            sentence = f"record {oldest!r}, which was parked and is run again, {cause.reason}"
            yield Finding(_PARKED, sentence, now - oldest.arrived, cause.what_to_do)


def _also_halted(engine: Engine, epoch: Epoch) -> Iterator[Finding]:
    """Records that will be in the way as soon as the oldest one is not."""
    shards = engine.feed_of(epoch.topic_partition.topic).shards
    oldest = epoch.tracker.oldest
    halted = [one for each in shards for one in each.halted if one.epoch is epoch and one is not oldest]
    if halted:
        offsets = sorted(one.offset for one in halted)
        named = ", ".join(map(str, offsets[:_NAMED_HALTED])) + (", ..." if len(offsets) > _NAMED_HALTED else "")
        sentence = f"{len(offsets)} record(s) behind that one halted too: offset {named}"
        yield Finding(_HALTED, sentence, None, None)


def _intake(engine: Engine, epoch: Epoch, head: HeadOfLine | None, now: float) -> Iterator[Finding]:
    """Why nothing more is taken in, where there is more."""
    # The end is that of the last fetch: one that was asked for since may be of records that are just being fetched.
    transport = engine.transport
    position, end = epoch.tracker.position, None if transport is None else transport.end_offset(epoch.topic_partition)
    if end is not None and end <= position and head is None:
        return
    since = _seconds(engine.since.of(("position", epoch.topic_partition), position), now)
    limit = engine.admission.limit(epoch.topic_partition)
    if limit is not None:
        sentence = f"nothing more is taken in{for_seconds(since)}: {limit.reason}"
        yield Finding("no room", sentence, since, limit.what_to_do)
    elif end is not None and head is None and since is not None and since > _SLOW_FETCH:
        sentence = f"nothing has come of it{for_seconds(since)}, though its log goes on to {end} and there is room"
        yield Finding("nothing comes", sentence, since, "see that the leader of the partition answers; we go on asking")


# In words ------------------------------------------------------------------------------------


def in_words(diagnosis: Diagnosis) -> str:
    """The whole in sentences, one partition after the other."""
    lines = [f"The app is {diagnosis.state}."]
    for finding in diagnosis.findings:
        lines.append(f"{'Trouble: ' if finding.kind == 'trouble' else ''}{_as_sentence(finding.sentence)}")
        lines += _advice(finding.what_to_do)
    for partition in diagnosis.partitions:
        lines += _lines_of(partition)
    for run in diagnosis.outliving:
        lines.append(_as_sentence(f"Record {run.topic}/{run.partition}/{run.offset} {run.reason.removeprefix('it ')}"))
        lines += _advice(run.what_to_do)
    return "\n".join(lines) + "\n"


def _lines_of(partition: PartitionDiagnosis) -> list[str]:
    lines = [f"{partition.sentence}."]
    if partition.behind:
        lines.append(f"  {partition.behind} of the {partition.window} offsets from there on wait for that record.")
    head = partition.head
    if head is not None and partition.verdict in ("waiting", "stuck"):
        lines += _advice(head.what_to_do)
        if head.stack is not None and head.stack.frames:
            lines.append(f"  Stack, innermost last: {stack_in_words(head.stack)}")
    for finding in partition.findings:
        if head is not None or finding is not partition.findings[0]:
            lines.append(f"  {_as_sentence(finding.sentence)}")
        lines += _advice(finding.what_to_do)
    return lines


def line_of(partition: PartitionDiagnosis) -> str:
    """One partition in one line, for the log."""
    return " ".join(line.strip() for line in _lines_of(partition))


def _advice(what_to_do: str | None) -> list[str]:
    return [] if what_to_do is None else [f"  What to do: {what_to_do}."]


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
