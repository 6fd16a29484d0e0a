"""Hand over a backfill: send its dead letters, then commit its ends for the group; the live app resumes there."""

import asyncio
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from aioshard.errors import (
    CommitError,
    CommitRefusedError,
    GroupBusyError,
    GroupMovedError,
    NotVerifiedError,
    PlanError,
)
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.publisher import Publisher
from aioshard.ports import Committed, Message
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import MESSAGE_ID, Coordinates, Failure, as_text, dead_letter
from aioshard.spark.plans import DEAD_LETTER, Plan, Vector, check_ends, metadata_of, offsets_in, vector_of
from aioshard.spark.run_directory import DEAD_LETTERS, HANDED_OVER, OUTCOMES, VERIFIED, RunDirectory
from aioshard.spark.runs import counts_of
from aioshard.spark.work import blocking, formats_for, settings_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("aioshard.spark.handover")

_PAUSE = 0.5
_PATIENCE = 30.0
"""Minimum seconds to retry transient errors (a moving coordinator), even if the wait for members is shorter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The result of a hand-over.

    Attributes:
        plan: The digest of the plan.
        group_id: The group.
        state: `handed-over`; `already` if an earlier call did it.
        before: The group's offsets before, by topic and partition; None for partitions without a commit.
        offsets: The group's offsets after, at which the live app resumes.
        moved: Commits that differed from the plan and were overruled by force.
        waited: Seconds spent waiting for members to leave.
    """

    plan: str
    group_id: str
    state: Literal["handed-over", "already"]
    before: Mapping[str, Mapping[str, int | None]]
    offsets: Vector
    moved: tuple[str, ...] = ()
    waited: float = 0.0


async def handover(
    directory: str | os.PathLike[str] | RunDirectory,
    *,
    wait: float | None = None,
    force: bool = False,
    tell: Callable[[str], None] = logger.warning,
) -> Handover:
    """Commit the ends of a verified run for its group, so that the live app resumes exactly there.

    A single request commits all partitions. The broker refuses it if the group has a member of any protocol. That
    refusal alone decides; the brokers' description of the group is only reported. Success proves that the group had no
    members at that moment. The check just before it shows that nothing was committed since the plan was made. Neither
    rules out consumers that read the topics without a group, or without committing.

    Args:
        directory: The directory of the run.
        wait: Seconds to wait for killed or static members to expire; by default the session timeout of the app's
            settings. A live member is waited for just as long and then named in the error.
        force: Hand over although the group has moved since the plan was made, or hand over again. Members are never
            overruled.
        tell: Receives messages for the user; logs them by default.

    Returns:
        The result; it is also written to the directory.

    Raises:
        NotVerifiedError: The run was not verified, has halted records, or has unsent dead letters.
        GroupBusyError: The group has members. Nothing was changed.
        GroupMovedError: The group has moved since the plan was made. Nothing was changed.
        DataLossError: The run ends past the end of the log: the topic was recreated.
        PlanError: The directory has no plan, or *wait* is invalid.
        TransportError: The brokers do not answer, or refuse access.

    Example:
        ```python
        done = await handover("runs/7")
        print(done.offsets["orders"]["0"])
        ```
    """
    if wait is not None and not wait >= 0:
        raise PlanError(f"wait={wait!r}: expected a number of seconds, 0 or more")
    run_dir = RunDirectory.of(directory)
    plan = run_dir.plan()
    ends = verified_ends(run_dir, plan)
    due = {planned.topic_partition: planned.commit(ends[planned.topic_partition]) for planned in plan.ranges}
    earlier = {} if force else run_dir.read_json(HANDED_OVER) or {}
    if earlier.get("plan") == plan.digest:
        return Handover(**{**earlier, "state": "already"})
    settings = settings_for(plan)
    async with KafkaAdmin(settings) as brokers:
        bounds = await brokers.bounds(due)
        check_ends(bounds, ends)
        for partition, log in sorted(bounds.items()):
            if ends[partition] < log.start:
                tell(
                    f"retention has deleted offsets {ends[partition]} to {log.start - 1} of {partition} since the run "
                    "ended: the live app resumes after them"
                )
        result = await _commit(
            brokers, plan, due, settings.session_timeout if wait is None else wait, force=force, tell=tell
        )
    run_dir.write_json(HANDED_OVER, dataclasses.asdict(result))
    return result


# Preconditions ------------------------------------------------------------------------


def verified_ends(run_dir: RunDirectory, plan: Plan) -> dict[TopicPartition, int]:
    """Return the ends of a verified run.

    Raises:
        NotVerifiedError: The run was not verified, has halted records, or has unsent dead letters.
    """
    verification = run_dir.read_json(VERIFIED) or {}
    if verification.get("plan") != plan.digest:
        problem = "was verified with another plan" if verification else "was not verified"
        raise NotVerifiedError(f"the run in {run_dir} {problem}: run  aioshard spark verify {run_dir}  first")
    halted = verification.get("halted") or ()
    if halted or verification.get("ok") is not True:
        examples = f", with {len(halted)} halted records such as {halted[0]}" if halted else ""
        raise NotVerifiedError(
            f"the verification of the run in {run_dir} failed{examples}: fix what {VERIFIED} names, then "
            "run and verify again"
        )
    if unsent := unsent_dead_letters(run_dir):
        raise NotVerifiedError(
            f"{unsent} of {verification['dead_lettered']} dead letters of the run in {run_dir} were not sent: send "
            "them with  aioshard spark handover  or aioshard.spark.send_dead_letters before the group resumes"
        )
    return offsets_in(verification["ends"], "ends")


# Commit -------------------------------------------------------------------------------


async def _commit(
    brokers: KafkaAdmin,
    plan: Plan,
    due: Mapping[TopicPartition, Committed],
    patience: float,
    *,
    force: bool,
    tell: Callable[[str], None],
) -> Handover:
    """Commit; retry while members may expire or the coordinator moves.

    Raises:
        GroupBusyError: The group still has members after *patience* seconds.
        GroupMovedError: The group has moved, and *force* is not set.
        TransportError: The commit was not stored.
    """
    group_id = plan.group_id
    expected = {planned.topic_partition: planned.before for planned in plan.ranges}
    loop = asyncio.get_running_loop()
    began = loop.time()
    waited = 0.0
    before: Mapping[TopicPartition, Committed | None] = {}
    changes: tuple[str, ...] = ()
    while due:
        # Check before every attempt: an unacknowledged commit may be stored, and a consumer may have resumed there.
        current = await brokers.group_commits(group_id, due)
        before = before or current
        not_ours = {at: commit for at, commit in expected.items() if current[at] != due[at]}
        changes = tuple(moved(not_ours, current)) or changes
        if changes and not force:
            raise GroupMovedError(group_id, changes)
        result = await _try_commit(brokers, group_id, due)
        elapsed = loop.time() - began
        # 1. It is stored.
        if result is None:
            break
        # 2. It may succeed later: the coordinator moves.
        if isinstance(result, CommitError):
            if not result.retriable or elapsed >= max(patience, _PATIENCE):
                raise result
        # 3. The group has members, which may expire.
        elif elapsed >= patience:
            raise GroupBusyError(group_id, result, elapsed)
        else:
            if not waited:
                listed = ", ".join(result) or "members that the brokers no longer list"
                tell(f"group {group_id!r} has members; waiting up to {patience:g} s for them: {listed}")
            waited = elapsed
        await asyncio.sleep(_PAUSE)
    offsets_before = {at: None if commit is None else commit.offset for at, commit in before.items()}
    return Handover(
        plan=plan.digest,
        group_id=group_id,
        state="handed-over",
        before=vector_of(offsets_before),
        offsets=vector_of({at: commit.offset for at, commit in due.items()}),
        moved=changes,
        waited=round(waited, 3),
    )


async def _try_commit(
    brokers: KafkaAdmin, group_id: str, due: Mapping[TopicPartition, Committed]
) -> CommitError | list[str] | None:
    """Commit once; return None if it is stored, the members of the group if they prevent it, or another error."""
    try:
        await brokers.commit_without_member(group_id, due)
    except CommitRefusedError:
        description = await brokers.group(group_id)
        return [str(member) for member in description.members]
    except CommitError as error:
        return error
    return None


def moved(
    then: Mapping[TopicPartition, Committed | None], now: Mapping[TopicPartition, Committed | None]
) -> Iterator[str]:
    """Describe each commit that has changed since the plan was made."""
    for partition, before in sorted(then.items()):
        old, new = ("no commit" if commit is None else commit.offset for commit in (before, now[partition]))
        if old != new:
            yield f"{partition}: then {old}, now {new}"
        elif metadata_of(before) != metadata_of(now[partition]):
            yield f"{partition}: {old}, with other commit metadata"


# Dead letters ---------------------------------------------------------------------------


_BATCH = "batch="


def unsent_dead_letters(run_dir: RunDirectory) -> int:
    """Return how many dead letters of a verified run are still unsent; 0 for an unverified run.

    Raises:
        PlanError: The directory has no plan.
    """
    plan = run_dir.plan()
    verification = run_dir.read_json(VERIFIED) or {}
    if verification.get("plan") != plan.digest or verification.get("ok") is not True:
        return 0
    return max(int(verification.get("dead_lettered", 0)) - int(sent_dead_letters(run_dir, plan)["acknowledged"]), 0)


def send_dead_letters(
    spark: "SparkSession",
    directory: str | os.PathLike[str] | RunDirectory,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Send the unsent dead letters of a run's complete micro-batches.

    They have the same headers as the live app's dead letters; `aioshard.failed_at` is the end of the last attempt. The
    additional header `aioshard.message_id` holds the record's `topic/partition/offset`. Dead letters are sent batch
    by batch, ordered by topic, partition and offset. Progress is recorded after each batch: after a crash, those of at
    most one batch are sent again, with the same ids.

    Args:
        spark: Any session; it sorts the dead letters of a batch, which are streamed from it.
        directory: The directory of the run.
        tell: Called with a message for each batch with dead letters.

    Returns:
        The number of dead letters sent and acknowledged by this call.

    Raises:
        PlanError: The directory has no plan, or the plan has no dead-letter topic for the handler of a row.
        TransportError: A dead letter was not acknowledged. Recorded progress is kept; call again.

    Example:
        ```python
        send_dead_letters(spark, "runs/7", print)
        ```
    """
    run_dir = RunDirectory.of(directory)
    plan = run_dir.plan()
    sent = sent_dead_letters(run_dir, plan)
    before = sent["acknowledged"]
    for batch in sorted(int(name.removeprefix(_BATCH)) for name in run_dir.list(OUTCOMES) if name.startswith(_BATCH)):
        counts = counts_of(run_dir, f"{_BATCH}{batch}")
        if batch in sent["batches"] or (counts is not None and "dead_lettered" not in counts):
            continue
        count = blocking(functools.partial(_publish, plan, _dead_letters(spark, run_dir, plan, batch)))
        sent["acknowledged"] += count
        sent["batches"].append(batch)
        run_dir.write_json(DEAD_LETTERS, sent)
        tell(f"dead letters sent for batch {batch}: {count}")
    return int(sent["acknowledged"] - before)


def sent_dead_letters(run_dir: RunDirectory, plan: Plan) -> dict[str, Any]:
    """Return the dead letters recorded as acknowledged: their number, and the numbers of complete batches."""
    empty = {"plan": plan.digest, "acknowledged": 0, "batches": []}
    stored = run_dir.read_json(DEAD_LETTERS) or {}
    return empty | stored if stored.get("plan") == plan.digest else empty


async def _publish(plan: Plan, messages: Iterable[Message]) -> int:
    async with Publisher(settings_for(plan)) as publisher:
        await publisher.publish(messages)
    return publisher.acknowledged


def _dead_letters(spark: "SparkSession", run_dir: RunDirectory, plan: Plan, batch: int) -> Iterator[Message]:
    """Yield the dead letters of one batch, streamed from Spark."""
    policies = {handler.name: plan.on_failure or handler.on_failure for handler in plan.handlers}
    formats = formats_for(plan)
    rows = (
        run_dir.rows(spark, f"{OUTCOMES}/{_BATCH}{batch}")
        .where("status = 'dead_lettered'")
        .orderBy("topic", "partition", "offset")
        .selectExpr(
            "*",
            # As numbers, because Spark returns timestamps without a zone, in the local time of the machine.
            "coalesce(double(started) + duration, double(current_timestamp())) AS failed_at",
            "double(timestamp) AS moment",
        )
    )
    for row in rows.toLocalIterator():
        policy = policies.get(row["handler"], "")
        if not policy.startswith(DEAD_LETTER):
            raise PlanError(
                f"the outcomes in {run_dir} contain dead letters of handler {row['handler']!r}, and the plan has no "
                "dead-letter topic for it: they belong to another run"
            )
        coordinates = Coordinates(row["topic"], row["partition"], row["offset"])
        headers = tuple((name, _bytes(content)) for name, content in row["headers"] or ())
        record = Record(*coordinates, _bytes(row["key"]), _bytes(row["value"]), headers, row["moment"])
        value_format = formats.get(row["handler"])
        message = dead_letter(
            policy.removeprefix(DEAD_LETTER),
            record,
            Failure(plan.group_id, row["handler"], row["attempts"], row["error_type"], row["error"], row["failed_at"]),
            None if value_format is None else value_format.ref_of(record),
        )
        yield message._replace(headers=(*message.headers, (MESSAGE_ID, as_text(str(coordinates)))))


def _bytes(content: bytearray | bytes | None) -> bytes | None:
    return None if content is None else bytes(content)
