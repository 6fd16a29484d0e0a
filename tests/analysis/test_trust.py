"""What is not predicted, and why."""

import pytest

from aioshard.spark.analysis.candidate import Candidate
from aioshard.spark.analysis.fleet import Prediction
from aioshard.spark.analysis.stalls import Stalls
from aioshard.spark.analysis.trust import judged, off_by

SECOND = 1_000_000


def takes(seconds: float) -> Prediction:
    zero = (0, 0, 0)
    return Prediction(round(seconds * SECOND), zero, zero, zero, 0.5, 0, (0,), "events")


@pytest.mark.parametrize(
    ("predicted", "members", "own", "cpu", "batch", "told"),
    [
        (5, 1, 10, 0.2, None, None),
        (5, 1, 10, None, None, None),
        (5, 1, None, None, None, None),
        (9, 1, 10, 0.7, None, "the run took 70% of a core"),
        (2, 1, 10, 0.2, None, "it would need 100% of a core per member"),
        (2, 3, 10, 0.2, None, None),
        (5, 1, 8, 0.2, None, "for 20% of the run's time records waited although workers were free"),
        (5, 1, 10, 0.2, 500, "not predicted: the journal has the time of a whole batch"),
    ],
)
def test_what_the_processor_would_decide_is_not_predicted(
    predicted: float, members: int, own: float | None, cpu: float | None, batch: int | None, told: str | None
) -> None:
    """A run of ten seconds."""
    check = None if own is None else takes(own)
    candidate = Candidate(concurrency=4, members=members)

    answer = judged(candidate, takes(predicted), check, 10 * SECOND, cpu, batch=batch)

    if told is None:
        assert answer.prediction == takes(predicted)
    else:
        assert answer.prediction is None
        assert answer.not_predicted is not None
        assert told in answer.not_predicted


def test_a_loop_that_stood_still_makes_predictions_uncertain() -> None:
    """What its handlers waited for it is no work; and the longest stall may be in the record that ends last."""
    stalls = Stalls(times=4, longest=SECOND, total=2 * SECOND, waited=4 * SECOND)

    assert off_by(takes(10), Stalls(0, 0, 0, 0), 40 * SECOND) == pytest.approx(0.05)
    assert off_by(takes(10), stalls, 40 * SECOND) == pytest.approx(0.05 + 0.1 + 0.1)
    assert off_by(takes(5), stalls, 40 * SECOND) == pytest.approx(0.05 + 0.1 + 0.2)
