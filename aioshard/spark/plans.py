"""The plan of a backfill, frozen before it begins, and arithmetic on its ranges. Pure, apart from `app_version`."""

import contextlib
import dataclasses
import hashlib
import heapq
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from aioshard import __version__
from aioshard.app import App
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import beyond
from aioshard.core.options import DeadLetter, OnFailure, Park
from aioshard.errors import DataLossError, PlanError
from aioshard.kafka.admin import LogBounds
from aioshard.ports import Committed
from aioshard.records import TopicPartition

T = TypeVar("T")

Vector = Mapping[str, Mapping[str, int]]
"""Offsets by topic and partition. Partitions are text because checkpoints store vectors as JSON."""

DEAD_LETTER = "dead-letter:"
"""Prefix of an `on_failure` value that names a dead-letter topic."""

MAX_ROWS = 500_000
"""Maximum records of a micro-batch, unless the user sets another one."""

Layout = Literal["partition", "split", "shuffle"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRange:
    """Offsets of one partition, from *start* (inclusive) to *end* (exclusive).

    Invariants:
        * `start <= end`. A range is empty if its partition has nothing to read; its end is still handed over.

    Attributes:
        topic: The topic.
        partition: The partition.
        start: The first offset.
        end: The offset after the last one.
        committed: The group's committed offset when the plan was made, if there was one.
        metadata: The metadata of that commit.
        finished: Offsets in the range that the group had completed beyond its commit; they are not run again.
    """

    topic: str
    partition: int
    start: int
    end: int
    committed: int | None = None
    metadata: str = ""
    finished: tuple[int, ...] = ()

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition of the range."""
        return TopicPartition(self.topic, self.partition)

    @property
    def before(self) -> Committed | None:
        """The group's commit when the plan was made."""
        return None if self.committed is None else Committed(self.committed, self.metadata)

    def commit(self, end: int) -> Committed:
        """Return the commit for a run that has processed the partition up to *end*.

        Completions beyond *end* are kept. The first-commit marker is dropped: this commit already shows that the group
        knows the topic.
        """
        return Committed(end, CommitMetadata(finished=beyond(metadata_of(self.before).finished, end)).text(end))


def metadata_of(committed: Committed | None) -> CommitMetadata:
    """Return the parsed metadata of a commit; it is empty without a commit."""
    return CommitMetadata() if committed is None else CommitMetadata.read(committed.metadata, committed.offset)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHandler:
    """A handler as it was when the plan was made, for people and for comparison; the function stays in the app.

    Attributes:
        name: Name of the function.
        topics: All topics that it reads in this run, including those its pattern matched.
        shard_by: The scope within which records stay in order.
        on_failure: Its policy for records whose retries are exhausted, as text for people.
        layout: How its records are spread over tasks: one task per partition, split partitions, or shuffled.
    """

    name: str
    topics: tuple[str, ...]
    shard_by: Literal["key", "partition", "record", "function"]
    on_failure: str
    layout: Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run. It contains no secrets.

    Attributes:
        id: Unique identifier.
        app: Import name of the app: `orders.app:app`.
        group_id: Consumer group that the run stands in for.
        bootstrap_servers: As given when the plan was made; None means that each executor has it in its environment.
        isolation_level: `read_committed` or `read_uncommitted`.
        ranges: The offsets to read, by topic and partition.
        handlers: The handlers of the app.
        tasks: Number of tasks; None lets the run decide.
        max_rows_per_batch: Maximum records per micro-batch, which is also the maximum that a crash can repeat.
        total_concurrency: Maximum handlers in parallel in the whole job; None means each handler's own, per task.
        on_failure: Replaces the handlers' own policies: None, `skip` or `dead-letter:TOPIC`.
        version: The version of the app; see `app_version`.

    Example:
        >>> plan = Plan(id="7", app="shop.app:app", group_id="shop", bootstrap_servers=None,
        ...     isolation_level="read_committed", handlers=(), version="",
        ...     ranges=(PlannedRange(topic="orders", partition=0, start=5, end=8),))
        >>> plan.records, Plan.from_json(plan.to_json()) == plan
        (3, True)
    """

    id: str
    app: str
    group_id: str
    bootstrap_servers: str | None
    isolation_level: str
    ranges: tuple[PlannedRange, ...]
    handlers: tuple[PlannedHandler, ...]
    tasks: int | None = None
    max_rows_per_batch: int = MAX_ROWS
    total_concurrency: int | None = None
    on_failure: str | None = None
    version: str

    @property
    def records(self) -> int:
        """Number of offsets to read; there are fewer records if the log has holes."""
        return sum(planned.end - planned.start for planned in self.ranges)

    @property
    def digest(self) -> str:
        """Digest of the whole plan; it marks everything that belongs to the run."""
        return _digest(dataclasses.asdict(self))

    def to_json(self) -> str:
        """Return the plan as readable JSON, with its digest."""
        return json.dumps(dataclasses.asdict(self) | {"digest": self.digest}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, name: str = "the text") -> "Plan":
        """Read a plan.

        Args:
            text: The plan as JSON.
            name: The source of the text, for the errors.

        Raises:
            PlanError: It is not a plan, or was edited.
        """
        try:
            content = json.loads(text)
            digest = content.pop("digest")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"{name}: not a plan of aioshard ({error!r}): make one with  aioshard spark plan") from None
        if digest != _digest(content):
            raise PlanError(
                f"{name}: the plan was edited after it was made: its digest does not match its content. Make a new "
                "plan in a new directory with  aioshard spark plan"
            )
        ranges = [PlannedRange(**{**item, "finished": tuple(item["finished"])}) for item in content["ranges"]]
        handlers = [PlannedHandler(**{**item, "topics": tuple(item["topics"])}) for item in content["handlers"]]
        return cls(**{**content, "ranges": tuple(ranges), "handlers": tuple(handlers)})


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def app_version(app: App) -> str:
    """Return a digest of aioshard's version and of the modules that define an app's handlers and their dependencies.

    The same code gives the same digest on every machine. Settings and modules that the handlers import are not part
    of it.
    """
    digest = hashlib.sha256(__version__.encode())
    functions = [inspect.unwrap(handler.function) for handler in app.handlers]
    for handler in app.handlers:
        calls = () if handler.dependencies is None else handler.dependencies.calls
        functions += [inspect.unwrap(dependency.function) for dependency in calls]
    for name in sorted({getattr(function, "func", function).__module__ for function in functions}):  # a partial's
        with contextlib.suppress(KeyError, OSError):  # a module without source
            digest.update(inspect.getsource(sys.modules[name]).encode())
    return f"sha256:{digest.hexdigest()}"


def on_failure_text(policy: OnFailure) -> str:
    """Describe a failure policy in the words of a plan.

    Example:
        >>> on_failure_text("halt"), on_failure_text(DeadLetter("orders.dlt"))
        ('halt', 'dead-letter:orders.dlt')
    """
    if isinstance(policy, DeadLetter):
        return f"{DEAD_LETTER}{policy.topic}"
    return f"park:{policy.topic}" if isinstance(policy, Park) else policy


# Offsets of many partitions ------------------------------------------------------------


def vector_of(offsets: Mapping[TopicPartition, T]) -> dict[str, dict[str, T]]:
    """Return offsets by topic and partition."""
    vector: dict[str, dict[str, T]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        vector.setdefault(topic, {})[str(partition)] = offset
    return vector


def offsets_in(vector: Any, option: str) -> dict[TopicPartition, int]:
    """Return the offsets of a vector that a user gave.

    Raises:
        PlanError: It is not a vector; the error names the option.
    """
    try:
        offsets = {
            TopicPartition(str(topic), int(partition)): int(offset)
            for topic, of_topic in vector.items()
            for partition, offset in of_topic.items()
        }
    except (AttributeError, TypeError, ValueError):
        offsets = None
    if offsets is None or min(offsets.values(), default=0) < 0:
        raise PlanError(
            f"{option}={vector!r}: expected an offset for each partition, by topic and partition, such as "
            '{"orders": {"0": 41}}'
        )
    return offsets


def check_ends(bounds: Mapping[TopicPartition, LogBounds], ends: Mapping[TopicPartition, int]) -> None:
    """Refuse a log that is shorter than it was.

    Raises:
        DataLossError: A range ends past the end of its log: the topic was recreated.
    """
    lost = [
        f"{partition}: the range ends at {ends[partition]}, and the log at {log.end}"
        for partition, log in sorted(bounds.items())
        if ends[partition] > log.end
    ]
    if lost:
        raise DataLossError(lost, "Make a new plan")


def starts_of(ranges: Iterable[PlannedRange]) -> dict[str, dict[str, int]]:
    """Return the starts of the ranges."""
    return vector_of({planned.topic_partition: planned.start for planned in ranges})


def ends_of(ranges: Iterable[PlannedRange]) -> dict[str, dict[str, int]]:
    """Return the ends of the ranges."""
    return vector_of({planned.topic_partition: planned.end for planned in ranges})


def ranges_between(start: Vector, end: Vector) -> list[PlannedRange]:
    """Return the non-empty ranges between two vectors; partitions missing from *start* are left out.

    Example:
        >>> ranges = ranges_between({"orders": {"0": 3, "1": 5}}, {"orders": {"0": 9, "1": 5}})
        >>> [(str(planned.topic_partition), planned.start, planned.end) for planned in ranges]
        [('orders/0', 3, 9)]
    """
    return [
        PlannedRange(topic=topic, partition=int(partition), start=first, end=end[topic][partition])
        for topic, offsets in sorted(start.items())
        for partition, first in sorted(offsets.items(), key=lambda item: int(item[0]))
        if end.get(topic, {}).get(partition, first) > first
    ]


def advanced(start: Vector, end: Vector, most: int) -> dict[str, dict[str, int]]:
    """Return a vector between two others, at most *most* offsets after the first.

    Each partition advances in proportion to its remaining offsets. All of them reach their ends together, and no batch
    is left to a few tasks.

    Args:
        start: The current vector.
        end: The upper bound.
        most: At least 1.

    Example:
        >>> advanced({"orders": {"0": 0, "1": 0}}, {"orders": {"0": 300, "1": 100}}, 40)
        {'orders': {'0': 30, '1': 10}}
    """
    left = ranges_between(start, end)
    total = sum(planned.end - planned.start for planned in left)
    most = min(most, total)
    result = {topic: dict(offsets) for topic, offsets in start.items()}
    before = 0
    for planned in left:
        after = before + planned.end - planned.start
        # Rounding the cumulative total instead of each share loses no offset.
        result[planned.topic][str(planned.partition)] += after * most // total - before * most // total
        before = after
    return result


def packed(ranges: Sequence[PlannedRange], tasks: int | None) -> list[list[PlannedRange]]:
    """Assign whole ranges to tasks: the largest first, each to the task with the least load.

    Args:
        ranges: Ranges of different partitions.
        tasks: Maximum number of tasks; None creates one per range.

    Example:
        >>> sizes = [PlannedRange(topic="t", partition=n, start=0, end=e) for n, e in enumerate((5, 9, 4))]
        >>> [[planned.end for planned in task] for task in packed(sizes, 2)]
        [[9], [5, 4]]
    """
    loads: list[tuple[int, int, list[PlannedRange]]] = [
        (0, number, []) for number in range(min(tasks or len(ranges), len(ranges)))
    ]
    for planned in sorted(ranges, key=lambda planned: (planned.start - planned.end, planned.topic, planned.partition)):
        load, number, task = loads[0]
        task.append(planned)
        heapq.heapreplace(loads, (load + planned.end - planned.start, number, task))
    return [task for _, _, task in loads]


def split(ranges: Sequence[PlannedRange], tasks: int) -> list[list[PlannedRange]]:
    """Cut ranges into tasks of about the same size, splitting them if necessary: order within a partition is lost.

    Example:
        >>> tasks = split([PlannedRange(topic="t", partition=0, start=0, end=10)], 3)
        >>> [[(planned.start, planned.end) for planned in task] for task in tasks]
        [[(0, 4)], [(4, 8)], [(8, 10)]]
    """
    total = sum(planned.end - planned.start for planned in ranges)
    size = max(-(-total // max(tasks, 1)), 1)
    result: list[list[PlannedRange]] = []
    room = 0
    for planned in ranges:
        start = planned.start
        while start < planned.end:
            if room == 0:
                result.append([])
                room = size
            end = min(start + room, planned.end)
            result[-1].append(PlannedRange(topic=planned.topic, partition=planned.partition, start=start, end=end))
            room -= end - start
            start = end
    return result
