"""The measurement of pauses detects them."""

import pytest

from tests.guarantees.observations import Kind, Seen
from tests.guarantees.pauses import idle_workers, pauses

T, S, F = Kind.TAKEN_IN, Kind.STARTED, Kind.FINISHED
SECOND = 1_000_000_000


def seen(*steps: tuple[float, str, Kind, int, int]) -> list[Seen]:
    """Steps are seconds, process, what happened, partition, offset."""
    return [
        Seen(round(at * SECOND), process, kind, partition, offset, 1, f"{partition}-{offset}")
        for at, process, kind, partition, offset in steps
    ]


def test_a_pause_counts_from_arrival_or_the_previous_start() -> None:
    available = {(0, 0): 0, (0, 1): 1 * SECOND, (0, 2): 9 * SECOND, (1, 0): 0}
    found = pauses(seen((2, "a", S, 0, 0), (3, "a", S, 1, 0), (5, "a", S, 0, 1), (9.5, "a", S, 0, 2)), available)

    assert [(pause.seconds, pause.record_id, pause.moved) for pause in found] == [
        (3, (0, 1), False),
        (0.5, (0, 2), False),
    ]


def test_a_partition_that_continues_in_another_process_has_moved() -> None:
    (found,) = pauses(seen((1, "a", S, 0, 0), (2, "b", S, 0, 1)), {(0, 0): 0, (0, 1): 0})

    assert (found.seconds, found.process, found.moved) == (1, "b", True)


def test_a_worker_idles_while_a_record_waits() -> None:
    steps = seen((0, "a", T, 0, 0), (0, "a", T, 0, 1), (1, "a", S, 0, 0), (2, "a", S, 0, 1))

    assert max(idle_workers(steps, 2)).seconds == 2


def test_a_record_that_waits_while_every_worker_is_busy_is_not_idle_time() -> None:
    steps = [
        *seen((0, "a", T, 0, 0), (0, "a", T, 0, 1), (0, "a", S, 0, 0)),
        *seen((5, "a", F, 0, 0), (5.25, "a", S, 0, 1), (5.5, "a", F, 0, 1)),
    ]

    assert max(idle_workers(steps, 1)).seconds == pytest.approx(0.25)


def test_a_record_handed_over_after_intake_does_not_count_as_waiting() -> None:
    steps = seen(
        (0, "a", T, 0, 0), (0, "a", T, 1, 0), (0, "a", S, 1, 0), (1, "a", F, 1, 0), (9, "a", T, 0, 0), (9, "a", S, 0, 0)
    )

    assert max(idle_workers(steps, 1)).seconds == 0
    assert max(idle_workers(steps[:-2], 1)).seconds == 0
