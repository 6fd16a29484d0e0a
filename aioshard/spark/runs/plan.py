"""What a run over history is going to do, frozen before it begins: ranges, handlers, versions."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from aioshard.errors import PlanError

__all__ = ["FORMAT", "CommittedThen", "FinishedBeyond", "Layout", "Plan", "PlannedHandler", "PlannedRange"]

FORMAT = 1
"""The format of plans that this version writes; it reads this one and those before it."""

Layout = Literal["partition", "split", "shuffle"]


class CommittedThen(NamedTuple):
    """What the group had committed on a partition when the plan was made."""

    topic: str
    partition: int
    offset: int | None
    """None where there was no commit."""
    metadata: str


class FinishedBeyond(NamedTuple):
    """Records of a partition that the group recorded as finished beyond its committed offset."""

    topic: str
    partition: int
    offsets: tuple[int, ...]
    """Ascending, all within the planned range."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRange:
    """Offsets of one partition: from *start* up to, and without, *end*.

    Invariants:
        * `start <= end`. An empty range is a partition that has nothing to read; its end is handed over like others.
    """

    topic: str
    partition: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHandler:
    """A handler as it was when the plan was made, for people and for comparison; the app itself has the function.

    Attributes:
        name: The function's.
        topics: All that it reads in this run, those that its pattern matched among them.
        shard_by: What stays in order.
        shards: Fixed shards, None for shards on demand.
        concurrency: Workers, at first where it is adaptive.
        on_failure: What happens to a record whose attempts are used up, as text for people.
        layout: How its records are spread over tasks: one task per partition, partitions split, or shuffled.
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
    """What a run is going to do. It holds no secret.

    Attributes:
        format: Of this object as JSON.
        id: Unlike that of every other plan.
        created: Seconds since the epoch.
        app: Where the app is found: `orders.app:app`.
        group_id: The consumer group whose place the run takes.
        bootstrap_servers: As given when the plan was made; None: each executor has it in its environment.
        isolation_level: `read_committed` or `read_uncommitted`.
        ranges: What is read, by topic and partition.
        committed: What the group had committed on each partition of `ranges`.
        handlers: Of the app.
        tasks: How many tasks to make; None leaves it to the run.
        max_rows_per_batch: Records of one micro-batch at most: what a crash can repeat.
        total_concurrency: Handlers running at the same time in the whole job; None is each handler's own for each task.
        on_failure: In place of the handlers' own: None, `skip` or `dead-letter:TOPIC`.
        finished: Recorded as finished beyond the committed offset: they count as done and are not run again.
        versions: Of `aioshard`, `python` and `app` (a digest of its handlers and their modules' source).

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
        """Offsets to read: as many records, or fewer where the log has holes."""
        return sum(planned.end - planned.start for planned in self.ranges)

    @property
    def ends(self) -> dict[str, dict[int, int]]:
        """Where the group goes on after the run: topic, partition, offset."""
        ends: dict[str, dict[int, int]] = {}
        for planned in self.ranges:
            ends.setdefault(planned.topic, {})[planned.partition] = planned.end
        return ends

    @property
    def digest(self) -> str:
        """Of everything in the plan; what belongs to a run is marked with it."""
        return _digest(_jsonable(self))

    def to_json(self) -> str:
        """The plan as JSON for people, with its digest."""
        content = _jsonable(self)
        return json.dumps(content | {"digest": _digest(content)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: It is no plan, was written by a newer version, or was edited.
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
    """As JSON gives it back, so that the digest is the same before and after."""
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
