"""Send the dead letters of a run from its outcome rows, in the format of the live app."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from aioshard.errors import PlanError
from aioshard.kafka.producer import KafkaProducer
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.side_records import MESSAGE_ID, Coordinates, Failure, as_text, dead_letter
from aioshard.spark.draining.batches import counts_of
from aioshard.spark.runs.access import settings_for
from aioshard.spark.runs.blocking import blocking
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import LETTERS, OUTCOMES, VERIFIED
from aioshard.spark.runs.plan import Plan
from aioshard.spark.source.publishing import publish_wave, waves
from aioshard.spark.tasks.work import DEAD_LETTER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["letters_owed", "send_letters"]

_BATCH = "batch="
_NO_TIME = -0.001
"""Timestamp of a record that has none."""


def letters_owed(place: RunDirectory) -> int:
    """Return how many dead letters of a verified run are still unsent; 0 for an unverified run.

    Raises:
        PlanError: The directory has no plan.
    """
    plan = place.plan()
    found = place.read_json(VERIFIED)
    if not isinstance(found, dict) or found.get("plan") != plan.digest or found.get("ok") is not True:
        return 0
    return max(int(found.get("dead_lettered") or 0) - _Sent.read(place, plan).acknowledged, 0)


def send_letters(
    spark: "SparkSession",
    directory: str | os.PathLike[str] | RunDirectory,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Send the unsent dead letters of a run's complete micro-batches.

    They have the same headers as the live app's dead letters; `aioshard.failed_at` is the end of the last attempt. The
    additional header `aioshard.message_id` holds the record's `topic/partition/offset`. Letters are sent batch by
    batch, ordered by topic, partition and offset. Progress is recorded after each batch: a crash sends the letters of
    at most one batch again, with the same ids.

    Args:
        spark: Any session; it sorts the letters of a batch, which are streamed from it.
        directory: The directory of the run.
        tell: Called with a message for each batch with letters.

    Returns:
        The number of letters sent and acknowledged by this call.

    Raises:
        PlanError: The directory has no plan, or the plan has no dead-letter topic for the handler of a row.
        TransportError: A letter was not acknowledged. Recorded progress is kept; call again.

    Example:
        ```python
        send_letters(spark, "runs/7", print)
        ```
    """
    place = RunDirectory.of(directory)
    plan = place.plan()
    sent = _Sent.read(place, plan)
    before = sent.acknowledged
    batches = sorted(int(name.removeprefix(_BATCH)) for name in place.list(OUTCOMES) if name.startswith(_BATCH))
    for batch in batches:
        noted = counts_of(place, f"{_BATCH}{batch}")
        if batch in sent.batches or (noted is not None and "dead_lettered" not in noted):
            continue
        letters = _letters(spark, place, plan, batch)
        count = blocking(functools.partial(_publish, plan, letters))
        sent = sent.with_batch(batch, count)
        sent.write(place, plan)
        tell(f"{count} dead letter(s) of batch {batch} sent")
    return sent.acknowledged - before


@dataclasses.dataclass(frozen=True, slots=True)
class _Sent:
    """Letters that the directory records as acknowledged."""

    acknowledged: int
    batches: frozenset[int]

    @classmethod
    def read(cls, place: RunDirectory, plan: Plan) -> "_Sent":
        found = place.read_json(LETTERS)
        if not isinstance(found, dict) or found.get("plan") != plan.digest:
            return cls(0, frozenset())
        return cls(int(found["acknowledged"]), frozenset(found["batches"]))

    def with_batch(self, batch: int, count: int) -> "_Sent":
        return _Sent(self.acknowledged + count, self.batches | {batch})

    def write(self, place: RunDirectory, plan: Plan) -> None:
        batches = sorted(self.batches)
        place.write_json(LETTERS, {"plan": plan.digest, "acknowledged": self.acknowledged, "batches": batches})


async def _publish(plan: Plan, letters: Iterator[Message]) -> int:
    producer = KafkaProducer(settings_for(plan))
    count = 0
    try:
        for wave in waves(letters):
            await publish_wave(producer, wave)
            count += len(wave)
    finally:
        await producer.close()
    return count


def _letters(spark: "SparkSession", place: RunDirectory, plan: Plan, batch: int) -> Iterator[Message]:
    """Yield the letters of one batch, fetched from Spark piece by piece."""
    topics = _topics(plan)
    for row in _rows(spark, place.uri(f"{OUTCOMES}/{_BATCH}{batch}")).toLocalIterator():
        topic = topics.get(row["handler"])
        if topic is None:
            raise PlanError(
                f"the outcomes in {place} have dead letters of handler {row['handler']!r}, and the plan has no "
                "dead-letter topic for it: they are of another run"
            )
        yield _letter(plan, topic, row.asDict())


def _topics(plan: Plan) -> Mapping[str, str]:
    """Return the dead-letter topic of each handler."""
    policies = {handler.name: plan.on_failure or handler.on_failure for handler in plan.handlers}
    return {
        name: policy.removeprefix(DEAD_LETTER) for name, policy in policies.items() if policy.startswith(DEAD_LETTER)
    }


def _rows(spark: "SparkSession", files: str) -> "DataFrame":
    from pyspark.sql import functions  # noqa: PLC0415 - pyspark is imported on use

    from aioshard.spark.source.data_source import OUTCOME_COLUMNS  # noqa: PLC0415

    rows = spark.read.schema(OUTCOME_COLUMNS).parquet(files).where("status = 'dead_lettered'")
    # As numbers, because Spark returns timestamps without a zone, in the local time of the machine.
    started, timestamp = functions.col("started").cast("double"), functions.col("timestamp").cast("double")
    rows = rows.withColumn("failed_at", started + functions.col("duration")).withColumn("moment", timestamp)
    return rows.orderBy("topic", "partition", "offset")


def _letter(plan: Plan, topic: str, row: Mapping[str, Any]) -> Message:
    where = Coordinates(row["topic"], row["partition"], row["offset"])
    headers = tuple((name, _bytes(content)) for name, content in row["headers"] or ())
    moment = _NO_TIME if row["moment"] is None else row["moment"]
    record = Record(*where, _bytes(row["key"]), _bytes(row["value"]), headers, moment)
    failed_at = time.time() if row["failed_at"] is None else row["failed_at"]
    failure = Failure(plan.group_id, row["handler"], row["attempts"], row["error_type"], row["error"], failed_at)
    letter = dead_letter(topic, record, failure)
    return letter._replace(headers=(*letter.headers, (MESSAGE_ID, as_text(str(where)))))


def _bytes(content: bytearray | bytes | None) -> bytes | None:
    return None if content is None else bytes(content)
