"""The plan of a backfill, frozen before it begins: ranges, handlers, versions."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from aioshard.errors import PlanError

__all__ = ["FORMAT", "CommittedThen", "FinishedBeyond", "Layout", "Plan", "PlannedHandler", "PlannedRange"]

FORMAT = 1
"""The plan format that this version writes; it also reads all earlier ones."""

Layout = Literal["partition", "split", "shuffle"]


class CommittedThen(NamedTuple):
    """The group's commit on a partition when the plan was made."""

    topic: str
    partition: int
    offset: int | None
    """None without a commit."""
    metadata: str


class FinishedBeyond(NamedTuple):
    """Records of a partition that the group had completed beyond its committed offset."""

    topic: str
    partition: int
    offsets: tuple[int, ...]
    """Ascending; all lie within the planned range."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRange:
    """Offsets of one partition, from *start* (inclusive) to *end* (exclusive).

    Invariants:
        * `start <= end`. A range is empty if its partition has nothing to read; its end is still handed over.
    """

    topic: str
    partition: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHandler:
    """A handler as it was when the plan was made, for people and for comparison; the function stays in the app.

    Attributes:
        name: Name of the function.
        topics: All topics that it reads in this run, including those its pattern matched.
        shard_by: The scope within which records stay in order.
        shards: Number of fixed shards, or None for shards on demand.
        concurrency: Number of workers; the initial number if it is adaptive.
        on_failure: Its policy for records whose retries are exhausted, as text for people.
        layout: How its records are spread over tasks: one task per partition, split partitions, or shuffled.
    """

    name: str
    topics: tuple[str, ...]
    shard_by: Literal["key", "partition", "record", "function"]
    shards: int | None
    concurrency: int
    on_failure: str
    layout: Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run. It contains no secrets.

    Attributes:
        format: Format of the plan as JSON.
        id: Unique identifier.
        created: Seconds since the epoch.
        app: Import name of the app: `orders.app:app`.
        group_id: Consumer group that the run stands in for.
        bootstrap_servers: As given when the plan was made; None means that each executor has it in its environment.
        isolation_level: `read_committed` or `read_uncommitted`.
        ranges: The offsets to read, by topic and partition.
        committed: The group's commit on each partition of `ranges`.
        handlers: The handlers of the app.
        tasks: Number of tasks; None lets the run decide.
        max_rows_per_batch: Maximum records per micro-batch, which is also the maximum that a crash can repeat.
        total_concurrency: Maximum handlers in parallel in the whole job; None means each handler's own, per task.
        on_failure: Replaces the handlers' own policies: None, `skip` or `dead-letter:TOPIC`.
        finished: Records completed beyond the committed offset; they count as done and are not run again.
        versions: Versions of `aioshard`, `python` and `app` (a digest of its handlers and their modules' source).

    Example:
        >>> plan = Plan(id="7", created=0.0, app="shop.app:app", group_id="shop", bootstrap_servers=None,
        ...     isolation_level="read_committed", committed=(), handlers=(), versions={},
        ...     ranges=(PlannedRange(topic="orders", partition=0, start=5, end=8),))
        >>> plan.records, Plan.from_json(plan.to_json()) == plan
        (3, True)
    """

    format: int = FORMAT
    id: str
    created: float
    app: str
    group_id: str
    bootstrap_servers: str | None
    isolation_level: str
    ranges: tuple[PlannedRange, ...]
    committed: tuple[CommittedThen, ...]
    handlers: tuple[PlannedHandler, ...]
    tasks: int | None = None
    max_rows_per_batch: int = 500_000
    total_concurrency: int | None = None
    on_failure: str | None = None
    finished: tuple[FinishedBeyond, ...] = ()
    versions: Mapping[str, str]

    @property
    def records(self) -> int:
        """Number of offsets to read; there are fewer records if the log has holes."""
        return sum(planned.end - planned.start for planned in self.ranges)

    @property
    def ends(self) -> dict[str, dict[int, int]]:
        """Offsets at which the group resumes after the run: topic, partition, offset."""
        ends: dict[str, dict[int, int]] = {}
        for planned in self.ranges:
            ends.setdefault(planned.topic, {})[planned.partition] = planned.end
        return ends

    @property
    def digest(self) -> str:
        """Digest of the whole plan; it marks everything that belongs to the run."""
        return _digest(_jsonable(self))

    def to_json(self) -> str:
        """Return the plan as readable JSON, with its digest."""
        content = _jsonable(self)
        return json.dumps(content | {"digest": _digest(content)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: It is not a plan, was written by a newer version, or was edited.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the plan is not JSON ({error}): make it anew with  aioshard spark plan") from None
        if not isinstance(content, dict) or type(content.get("format")) is not int or "digest" not in content:
            raise PlanError("JSON was found that is not a plan of aioshard: name the directory of a planned run")
        if content["format"] > FORMAT:
            raise PlanError(
                f"the plan has format {content['format']} and this version of aioshard reads formats up to {FORMAT}: "
                "use the version that made the plan, or a newer one"
            )
        digest = content.pop("digest")
        if digest != _digest(content):
            raise PlanError(
                "the plan was changed after it was made: its digest does not fit its content. A plan is not edited; "
                "make another one, in a new directory, with  aioshard spark plan"
            )
        try:
            return _plan_of(content)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the plan of format {content['format']} cannot be read: {error!r}; make it anew") from None


def _jsonable(plan: Plan) -> dict[str, Any]:
    """Return the plan as it looks after a JSON round trip, so that the digest is the same before and after."""
    content: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan)))
    return content


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _plan_of(content: dict[str, Any]) -> Plan:
    return Plan(
        **{
            **content,
            "ranges": tuple(PlannedRange(**one) for one in content["ranges"]),
            "committed": tuple(CommittedThen(*one) for one in content["committed"]),
            "handlers": tuple(PlannedHandler(**{**one, "topics": tuple(one["topics"])}) for one in content["handlers"]),
            "finished": tuple(
                FinishedBeyond(topic, partition, tuple(offsets)) for topic, partition, offsets in content["finished"]
            ),
        }
    )
