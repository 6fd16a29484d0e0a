"""How far an answer can be trusted: what the processor decides is not predicted, and what is left out is said."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aioshard.spark.analysis.candidate import Candidate
from aioshard.spark.analysis.fleet import Prediction
from aioshard.spark.analysis.journal import Journal
from aioshard.spark.analysis.recording import Recorded
from aioshard.spark.analysis.stalls import Stalls

__all__ = ["CPU_BOUND", "GOOD", "Answer", "judged", "off_by", "remarks"]

CPU_BOUND = 0.6
"""Of one core: above it the event loop is so busy that the durations in the journal are not those of other numbers."""
GOOD = 0.05
"""By so much of it a predicted time is wrong where the event loop never stood still, as measured."""
_UNEXPLAINED = 0.15
"""By so much of its time may a run have been slower than what its own configuration comes to."""
_STUCK_AFTER = 60_000_000
_PLACES = {
    "hidden": "The journal has no keys, so another number of partitions is dealt out by a stand-in for the producers' "
    "hash: as unequal, and not the same keys together. Write it with show_keys=True.",
    "unknown": "Neither murmur2 nor crc32 of the keys puts them where they are, so another number of partitions is "
    "dealt out by crc32: as unequal, and not the same keys together.",
}


class Answer(NamedTuple):
    """What a candidate comes to."""

    candidate: Candidate
    prediction: Prediction | None
    not_predicted: str | None
    """Why there is no prediction: a sentence."""
    off_by: float | None = None
    """By so much of it the time that is predicted may be wrong, as a share; see `off_by`. Three times as much for the
    99 %."""


def judged(
    candidate: Candidate,
    prediction: Prediction,
    check: Prediction | None,
    makespan: int,
    cpu: float | None,
    *,
    batch: int | None = None,
) -> Answer:
    """A prediction, unless the processor would decide.

    An event loop is one core. Runs that await overlap, so the sum of their durations says how many workers were busy,
    not how busy the processor was. Two things say that: what the process took of a core while it wrote the journal
    (*cpu*), which a candidate spreads over another time; and a run that took longer than its own configuration comes
    to: its records waited although workers were free, so it was the loop that had no time.

    Args:
        candidate: What is asked about.
        prediction: What it comes to where the processor is no limit.
        check: The same for the configuration of the run itself; None where that is not known.
        makespan: How long the run took, in microseconds.
        cpu: Of one core; None where that is not known.
        batch: Records of a batch; None for a handler of single records.
    """
    if batch is not None:
        return Answer(
            candidate, None, "not predicted: the journal has the time of a whole batch with each of its records"
        )
    if cpu is not None and prediction.makespan:
        needed = cpu * makespan / (prediction.makespan * candidate.members)
        if cpu > CPU_BOUND:
            return Answer(candidate, None, f"CPU-bound, not predicted: the run took {cpu:.0%} of a core")
        if needed > CPU_BOUND:
            return Answer(candidate, None, f"CPU-bound, not predicted: it would need {needed:.0%} of a core per member")
    if check is not None:
        unexplained = 1 - check.makespan / makespan
        if unexplained > _UNEXPLAINED:
            why = f"for {unexplained:.0%} of the run's time records waited although workers were free"
            return Answer(candidate, None, f"CPU-bound, not predicted: {why}")
    return Answer(candidate, prediction, None)


def off_by(prediction: Prediction, stalls: Stalls, work: int) -> float:
    """By how much of it a predicted time may be wrong, as a share.

    5 % are what is found where an event loop never stood still. Where it did, the durations of the journal have what
    their handlers waited for it, as if it was work. How much that is on average, a candidate is predicted to take too
    long. And the longest stall is in the durations of single records: one that is the last to end, with other numbers,
    makes the whole run longer by that.

    Args:
        prediction: What a candidate comes to.
        stalls: Of the run that was recorded.
        work: How long its handlers ran, in microseconds.

    Example:
        >>> one = Prediction(10_000_000, (0,) * 3, (0,) * 3, (0,) * 3, 1.0, 0, (0,), "events")
        >>> f"{off_by(one, Stalls(0, 0, 0, 0), 40_000_000):.0%}"
        '5%'
        >>> f"{off_by(one, Stalls(5, 300_000, 900_000, 2_000_000), 40_000_000):.0%}"
        '13%'
    """
    return GOOD + stalls.waited / max(work, 1) + stalls.longest / max(prediction.makespan, 1)


def remarks(found: Recorded, journal: Journal, answers: Sequence[Answer]) -> Iterator[str]:
    """What the answers leave out, in sentences."""
    if found.left_out:
        asked = len(found.recording.work.service)
        yield f"Only the first {asked:,} records are asked about; {found.left_out:,} are not."
    if found.retried:
        yield (
            f"{found.retried:,} record(s) had more than one attempt. The journal has the latest: the earlier ones, and "
            "the delays between, are not in the predictions."
        )
    if found.never_ran:
        yield f"For {found.never_ran:,} record(s) no handler ran; they are left out."
    if journal.handlers > 1:
        others = journal.handlers - 1
        yield f"The app's other handlers ({others}) shared its memory and its event loop; here they do not."
    if journal.members > 1:
        yield (
            f"{journal.members} processes wrote the journal: what they did is dealt out anew to the members of a "
            "candidate."
        )
    if any(one.candidate.partitions is not None for one in answers):
        yield _PLACES.get(
            found.places, f"Other partitions are chosen by the {found.places} of the keys, as these were."
        )
    late = sum(one.prediction is not None and one.prediction.longest_in_hand > _STUCK_AFTER for one in answers)
    if late:
        yield (
            f"With {late} of the candidates a record is in hand for over 60 s: its partition would be given less room "
            "(stuck_after), which is not in the predictions."
        )
    if any(one.candidate.dies_at is not None for one in answers):
        yield "After a death, what had ended is not run again here: records that were not committed would be."
