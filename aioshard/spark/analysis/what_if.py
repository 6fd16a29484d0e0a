"""What a run would have been with other shards, workers, partitions and members: asked of its journal."""

import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as sql

from aioshard.errors import SettingsError
from aioshard.spark.analysis.candidate import Candidate
from aioshard.spark.analysis.fleet import Prediction, Recording, best_possible, predict
from aioshard.spark.analysis.journal import Journal, RecordedHandler
from aioshard.spark.analysis.recording import Recorded, recorded
from aioshard.spark.analysis.simulation import NO_KEY
from aioshard.spark.analysis.skew import key_name
from aioshard.spark.analysis.stalls import Stalls
from aioshard.spark.analysis.trust import Answer, judged, off_by, remarks
from aioshard.spark.analysis.windows import Windowed, summed_windows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DEFAULT_LIMIT", "Measured", "WhatIf", "ask"]

DEFAULT_LIMIT = 1_000_000
"""Records that are asked about where nobody says how many: each takes about 50 bytes in each task."""
_GOOD_ENOUGH = 1.05


class Measured(NamedTuple):
    """What the journal says of the run itself; microseconds."""

    makespan: int
    wait: tuple[int, int, int]
    total: tuple[int, int, int]


class WhatIf(NamedTuple):
    """The answers, and how far they can be trusted."""

    handler: RecordedHandler
    records: int
    measured: Measured
    own: Candidate | None
    """The configuration of the run itself; None where the journal does not say."""
    check: Prediction | None
    """What that comes to: how far it is from what was measured says how good the rest is."""
    answers: tuple[Answer, ...]
    best_possible: int
    """Microseconds that no number of shards, workers or members beats, because each key is in order."""
    hottest_key: str | None
    """The key that takes so long; None where it is a record without a key, or the last record to come."""
    hottest_work: int
    """How long the handler ran for that key."""
    recommended: Answer | None
    """Of the answers, that with the fewest workers that is within 5 % of the quickest."""
    cpu: float | None
    """Of one core, what the process took while it wrote the journal; None where the journal does not say."""
    stalls: Stalls
    """When the event loop stood still in the run itself; the durations have it as if it was work."""
    waited: float
    """Which share of the work that is."""
    remarks: tuple[str, ...]
    """What the answers leave out, in sentences."""


def ask(
    journal: Journal, candidates: Sequence[Candidate] = (), handler: str | None = None, *, limit: int = DEFAULT_LIMIT
) -> WhatIf:
    """Ask what a run would have been.

    Args:
        journal: What to look at.
        candidates: The configurations; some that suggest themselves where none is given.
        handler: By default the one with the most records.
        limit: Only the records that were there first, so many.

    Raises:
        SettingsError: A candidate cannot be asked about with what the journal has.
    """
    found = recorded(journal, handler, limit)
    told = found.handler
    if not found.recording.work.service:
        raise SettingsError(f"no record of handler {told.name!r} ran: there is nothing to ask {journal.path} about")
    measured = _measured(journal, told.name, found.left_out)
    own = _own(journal, told)
    asked = [_complete(one, journal, told) for one in candidates or _suggested(own)]
    for one in asked:
        _refuse(one, found)
    predictions = _predictions(journal.rows.sparkSession, found, [*asked, *([own] if own is not None else [])])
    cpu = journal.cpu
    check = predictions.pop() if own is not None else None
    answers = tuple(
        _with_error(judged(one, prediction, check, measured.makespan, cpu, batch=told.batch), found)
        for one, prediction in zip(asked, predictions, strict=True)
    )
    least, key = best_possible(found.recording.work)
    return WhatIf(
        handler=told,
        records=len(found.recording.work.service),
        measured=measured,
        own=own,
        check=check,
        answers=answers,
        best_possible=least,
        hottest_key=None if key == NO_KEY else _name_of(journal, told, key),
        hottest_work=sum(
            service for service, one in zip(found.recording.work.service, found.recording.work.key, strict=True)
            if one == key and one != NO_KEY
        ),
        recommended=_recommended(answers),
        cpu=cpu,
        stalls=found.stalls,
        waited=found.stalls.waited / max(sum(found.recording.work.service), 1),
        remarks=tuple(remarks(found, journal, answers)),
    )  # fmt: skip


# What is asked --------------------------------------------------------------------------


def _own(journal: Journal, told: RecordedHandler) -> Candidate | None:
    if told.shards is None and told.concurrency is None:
        return None
    return _complete(Candidate(members=max(journal.members, 1)), journal, told)


def _complete(candidate: Candidate, journal: Journal, told: RecordedHandler) -> Candidate:
    return candidate.as_recorded(
        shards=told.shards, concurrency=told.concurrency, max_buffered_records=journal.max_buffered_records
    )


def _suggested(own: Candidate | None) -> list[Candidate]:
    """Half, twice and four times the workers, each on demand and as fixed shards."""
    if own is None:
        return [Candidate(concurrency=workers, shards=0) for workers in (16, 64, 256)]
    numbers = sorted({max(own.workers // 2, 1), own.workers, own.workers * 2, own.workers * 4})
    members = own.members
    return [
        *(Candidate(shards=0, concurrency=number, members=members) for number in numbers),
        *(Candidate(shards=number, members=members) for number in numbers),
    ]


def _refuse(candidate: Candidate, found: Recorded) -> None:
    if found.splits or candidate.shards == found.handler.shards:
        return
    raise SettingsError(
        f"{candidate.label} cannot be asked about: the journal has the {found.handler.shards} fixed shards of handler "
        f"{found.handler.name!r}, which are not those of the records' keys, and not what they were made of; record "
        "a run with shards on demand"
    )


# What is found --------------------------------------------------------------------------


def _predictions(spark: "SparkSession", found: Recorded, candidates: Sequence[Candidate]) -> list[Prediction]:
    """Windows where they are exact, else one event simulation per task."""
    plain = {one.shards for one in candidates if _is_plain(one) and one.shards}
    windows = summed_windows(found.work, sorted(plain)) if plain else {}
    known: dict[int, Prediction] = {}
    for place, one in enumerate(candidates):
        seen = windows.get(one.shards or 0)
        if _is_plain(one) and seen is not None and seen.is_exact(one.max_buffered_records or 0):
            known[place] = _as_prediction(seen, found.recording)
    left = [place for place in range(len(candidates)) if place not in known]
    known.update(zip(left, _simulated(spark, found.recording, [candidates[place] for place in left]), strict=True))
    return [known[place] for place in range(len(candidates))]


def _is_plain(candidate: Candidate) -> bool:
    """Whether it is one member with the partitions that there were."""
    return candidate.members == 1 and candidate.dies_at is None and candidate.partitions is None


def _as_prediction(seen: Windowed, recording: Recording) -> Prediction:
    work = sum(recording.work.service)
    return Prediction(
        makespan=seen.makespan,
        wait=seen.wait,
        total=seen.total,
        since_available=seen.total,
        busy=work / (seen.shards * seen.makespan) if seen.makespan else 0.0,
        longest_in_hand=seen.total[2],
        member_work=(work,),
        by="windows",
    )


def _simulated(spark: "SparkSession", recording: Recording, candidates: Sequence[Candidate]) -> list[Prediction]:
    if not candidates:
        return []
    packed = pickle.dumps((recording, tuple(candidates)))

    def simulate_each(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        recording, candidates = pickle.loads(packed)  # noqa: S301 - packed by the driver
        for batch in batches:
            places = batch.column(0).to_pylist()
            told = [json.dumps(predict(recording, candidates[place])) for place in places]
            yield pa.RecordBatch.from_arrays([pa.array(places, pa.int64()), pa.array(told)], ["place", "told"])

    count = len(candidates)
    rows = spark.range(0, count, 1, count).mapInArrow(simulate_each, "place bigint, told string").collect()
    return [_from_json(row["told"]) for row in sorted(rows, key=lambda row: row["place"])]


def _from_json(text: str) -> Prediction:
    return Prediction._make(tuple(field) if isinstance(field, list) else field for field in json.loads(text))


def _with_error(answer: Answer, found: Recorded) -> Answer:
    if answer.prediction is None:
        return answer
    return answer._replace(off_by=off_by(answer.prediction, found.stalls, sum(found.recording.work.service)))


def _measured(journal: Journal, name: str, left_out: int) -> Measured:
    rows = journal.of_handler(name)
    if left_out:
        rows = rows.orderBy("arrived_us").limit(rows.count() - left_out)
    row = rows.agg(
        sql.max("finished_us") - sql.min("arrived_us"),
        *(
            sql.expr(f"cast(percentile_disc({level}) WITHIN GROUP (ORDER BY {of}_us) as bigint)")
            for of in ("wait", "total")
            for level in (0.5, 0.99, 1.0)
        ),
    ).first()
    assert row is not None  # noqa: S101 - an aggregate without groups has one row
    return Measured(row[0], tuple(row[1:4]), tuple(row[4:7]))


def _name_of(journal: Journal, told: RecordedHandler, key: int) -> str | None:
    column = "shard" if told.shards is None else "key_hash"
    row = journal.of_handler(told.name).where(sql.col(column) == key).select(key_name().alias("name")).first()
    return row["name"] if row is not None and row["name"] is not None else f"#{key & (1 << 64) - 1:016x}"


def _recommended(answers: Sequence[Answer]) -> Answer | None:
    predicted = [
        (one.prediction.makespan, one)
        for one in answers
        if one.prediction is not None and one.candidate.dies_at is None
    ]
    if not predicted:
        return None
    quickest = min(makespan for makespan, _ in predicted)
    good = [(makespan, one) for makespan, one in predicted if makespan <= quickest * _GOOD_ENOUGH]
    return min(good, key=lambda each: (each[1].candidate.workers * each[1].candidate.members, each[0]))[1]
