"""Why each partition does not advance, as data and as text. Safe from any thread."""

from aioshard.engine.explain.causes import HandlerSnapshot
from aioshard.engine.explain.parked import parked_lines
from aioshard.engine.explain.partitions import examine
from aioshard.engine.explain.problems import general_findings
from aioshard.engine.partition import Partition
from aioshard.engine.watch import Watch
from aioshard.observe import Diagnosis, HandlerStatistics, PartitionDiagnosis


def diagnose(watch: Watch) -> Diagnosis:
    """Explain why each partition does not advance; safe to call from any thread."""
    engine = watch.engine
    snapshots = {handler: HandlerSnapshot(handler, watch) for handler in engine.handlers}
    findings = tuple(general_findings(watch))
    partitions = []
    for partition in sorted(engine.rebalance.partitions, key=lambda partition: partition.topic_partition):
        handler = engine.handlers.of(partition.topic_partition.topic)
        partitions.append(examine(watch, partition, snapshots[handler]))
    outliving = [snapshot.describe(delivery) for snapshot in snapshots.values() for delivery in snapshot.outliving]
    return Diagnosis(state=engine.state, findings=findings, partitions=tuple(partitions), outliving=tuple(outliving))


def explain(watch: Watch) -> str:
    """Explain in sentences why each partition does not advance, and when parked keys run; safe from any thread."""
    diagnosis = diagnose(watch)
    lines = [f"The app is {diagnosis.state}."]
    engine = watch.engine
    protocol = engine.group_protocol
    if protocol is not None:
        lines.append(f"Its group protocol is {protocol.name}, because {protocol.reason}.")
    lines += [_concurrency_of(handler.statistics()) for handler in engine.handlers if handler.adaptation is not None]
    for finding in diagnosis.findings:
        label = "Trouble: " if finding.kind == "trouble" else ""
        lines.append(f"{label}{_as_sentence(finding.sentence)}")
        lines += _advice(finding.what_to_do)
    for partition in diagnosis.partitions:
        lines += _lines_of(partition)
    for handler in engine.handlers:
        lines += parked_lines(handler, show_keys=engine.settings.show_keys)
    for run in diagnosis.outliving:
        lines.append(f"Record {run.topic}/{run.partition}/{run.offset} {run.reason.removeprefix('it ')}.")
        lines += _advice(run.what_to_do)
    return "\n".join(lines) + "\n"


def _concurrency_of(handler: HandlerStatistics) -> str:
    """Say how many runs an adaptive concurrency allows, and why."""
    adaptive = handler.adaptive
    bounds = "" if adaptive is None else f", of {adaptive.minimum} to {adaptive.maximum}: {adaptive.why}"
    return f"The adaptive concurrency of handler {handler.name} is {handler.concurrency} now{bounds}."


def explain_partition(watch: Watch, partition: Partition) -> str:
    """Explain on one line, for the log, why a partition does not advance."""
    snapshot = HandlerSnapshot(watch.engine.handlers.of(partition.topic_partition.topic), watch)
    return " ".join(line.strip() for line in _lines_of(examine(watch, partition, snapshot)))


def _lines_of(partition: PartitionDiagnosis) -> list[str]:
    lines = [f"{partition.sentence}."]
    if partition.behind:
        lines.append(f"  {partition.behind} of the {partition.window} offsets from there on wait for that record.")
    head = partition.head
    if head is not None and partition.verdict in ("waiting", "stuck"):
        lines += _advice(head.what_to_do)
        if head.stack is not None and head.stack.frames:
            lines.append(f"  Stack, innermost last: {' > '.join(map(str, head.stack.frames))}")
    for finding in partition.findings:
        if head is not None or finding is not partition.findings[0]:
            lines.append(f"  {_as_sentence(finding.sentence)}")
        lines += _advice(finding.what_to_do)
    return lines


def _advice(what_to_do: str | None) -> list[str]:
    return [] if what_to_do is None else [f"  What to do: {what_to_do}."]


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
