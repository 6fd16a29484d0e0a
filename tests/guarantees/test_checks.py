"""The checks can fail: each accepts a correct history and finds a tampered one."""

from dataclasses import replace
from pathlib import Path

import pytest

from aioshard.core.finished_offsets import Run
from tests.guarantees.checks import (
    Apart,
    CommitsAt,
    CommitsOnlyAdvance,
    Guarantee,
    History,
    KeyOrder,
    LagZero,
    NeverAhead,
    NoDuplicates,
    NothingLost,
    OneAtATimePerKey,
    OneProcessPerKey,
    OnlyUncommittedAgain,
    TakenInOnce,
    verify,
)
from tests.guarantees.observations import Kind, Observations, Recorder, Seen

S, F, E, I = Kind.STARTED, Kind.FINISHED, Kind.ENDED, Kind.TAKEN_IN  # noqa: E741 - as in the files

KEYS = {(0, 0): "a", (0, 1): "b", (0, 2): "a", (0, 4): "b", (1, 0): "c"}
"""The offset 3 is a hole."""


def history(
    *steps: tuple[int, str, Kind, int, int, int],
    commits: tuple[tuple[int, dict[int, int]], ...] = (),
    produced: dict[tuple[int, int], str] = KEYS,
) -> History:
    """Steps are time, process, what happened, partition, offset, epoch."""
    seen = tuple(Seen(*step, KEYS.get((step[3], step[4]), "?")) for step in steps)
    return History(produced, seen, tuple(CommitsAt(at - 1, at, offsets) for at, offsets in commits), {0: 5, 1: 1})


GOOD = history(
    (10, "p", S, 0, 0, 1),
    (11, "p", S, 0, 1, 1),
    (12, "p", F, 0, 0, 1),
    (13, "p", S, 0, 2, 1),
    (14, "p", F, 0, 1, 1),
    (20, "q", S, 1, 0, 1),
    (21, "q", F, 1, 0, 1),
    # The partition moves while 2 runs; its run was cancelled, and it runs again where the partition is now.
    (30, "p", E, 0, 2, 1),
    (40, "q", S, 0, 2, 2),
    (41, "q", S, 0, 4, 2),
    (42, "q", F, 0, 4, 2),
    (43, "q", F, 0, 2, 2),
    commits=((15, {0: 2}), (35, {0: 2, 1: 1}), (50, {0: 5, 1: 1})),
)

ALL: tuple[Guarantee, ...] = (
    NothingLost(),
    KeyOrder(),
    OneAtATimePerKey(),
    OneProcessPerKey(),
    NeverAhead(),
    CommitsOnlyAdvance(),
    OnlyUncommittedAgain(),
    NoDuplicates(budget=1),
    LagZero(),
)


def with_steps(*steps: tuple[int, str, Kind, int, int, int]) -> History:
    return replace(GOOD, seen=(*GOOD.seen, *history(*steps).seen))


def without(*kept_out: tuple[int, Kind]) -> History:
    return replace(GOOD, seen=tuple(seen for seen in GOOD.seen if (seen.at, seen.kind) not in kept_out))


def with_commits(*commits: tuple[int, dict[int, int]]) -> History:
    return replace(GOOD, commits=history(commits=commits).commits)


def broken(guarantee: Guarantee, observed: History) -> str:
    """Return the error of the check for a history that must not pass."""
    with pytest.raises(AssertionError) as failure:
        verify(observed, guarantee)
    return str(failure.value)


def test_a_run_that_keeps_every_guarantee_passes() -> None:
    verify(GOOD, *ALL)


def test_every_broken_guarantee_is_reported_with_its_breach_count() -> None:
    message = broken(NothingLost(), replace(GOOD, seen=()))

    assert "NothingLost was broken 5 times:" in message
    with pytest.raises(AssertionError, match=r"(?s)NothingLost.*LagZero"):
        verify(replace(GOOD, seen=(), commits=()), *ALL)


# NothingLost ------------------------------------------------------------------------------


def test_a_record_that_never_finished_is_lost() -> None:
    assert "record 1/0 (key c) never finished; it was started once" in broken(NothingLost(), without((21, F)))


def test_a_record_that_nobody_produced_is_found() -> None:
    assert "p started 1/7, a record that it should not have had" in broken(
        NothingLost(), with_steps((60, "p", S, 1, 7, 1))
    )


def test_a_record_under_a_wrong_key_is_found() -> None:
    swapped = replace(GOOD, produced=KEYS | {(1, 0): "d"})

    assert "started 1/0 with key c, produced with key d" in broken(NothingLost(), swapped)


# KeyOrder ---------------------------------------------------------------------------------


def test_a_start_before_an_earlier_record_of_the_key_has_finished_breaks_the_order() -> None:
    early = with_steps((11, "p", S, 0, 2, 1))

    assert "p started 0/2 (key a) at +0.000 s although 0/0 of the same key finished at" in broken(KeyOrder(), early)


def test_the_order_holds_across_processes() -> None:
    early = with_steps((13, "q", S, 0, 4, 2))

    assert "q started 0/4 (key b)" in broken(KeyOrder(), early)


def test_a_start_after_a_skipped_record_breaks_the_order() -> None:
    skipped = without((10, S), (12, F))

    assert "p started 0/2 (key a) at +0.000 s although 0/0 of the same key has never" in broken(KeyOrder(), skipped)


def test_a_cancelled_run_does_not_let_the_next_record_start() -> None:
    cancelled = without((14, F))
    cancelled = replace(cancelled, seen=(*cancelled.seen, *history((14, "p", E, 0, 1, 1)).seen))

    assert "q started 0/4" in broken(KeyOrder(), cancelled)


def test_going_back_within_an_ownership_breaks_the_order() -> None:
    assert "p started 0/0 (key a) after offset 2" in broken(KeyOrder(), with_steps((29, "p", S, 0, 0, 1)))


def test_going_back_in_a_new_ownership_keeps_the_order() -> None:
    verify(with_steps((60, "p", S, 0, 2, 2)), KeyOrder())


def test_a_record_repeated_in_one_ownership_must_not_have_finished() -> None:
    assert "p started 1/0 again" in broken(
        KeyOrder(), with_steps((60, "p", S, 1, 0, 3), (61, "p", F, 1, 0, 3), (62, "p", S, 1, 0, 3))
    )
    verify(with_steps((60, "p", S, 1, 0, 3), (61, "p", E, 1, 0, 3), (62, "p", S, 1, 0, 3)), KeyOrder())


# OneAtATimePerKey -------------------------------------------------------------------------


def test_concurrent_runs_of_a_key_in_a_process_are_found() -> None:
    overlapping = with_steps((11, "p", S, 0, 2, 1))

    assert "p started 0/2 (key a) at +0.000 s while 0/0 of the same key ran" in broken(OneAtATimePerKey(), overlapping)


def test_a_run_that_outlives_its_ownership_still_occupies_its_key() -> None:
    outliving = replace(without((30, E)), seen=(*without((30, E)).seen, *history((60, "p", S, 0, 2, 2)).seen))

    assert "while 0/2 of the same key ran" in broken(OneAtATimePerKey(), outliving)


def test_the_same_key_may_run_in_two_processes() -> None:
    verify(without((30, E)), OneAtATimePerKey())


def test_concurrent_runs_of_a_key_in_two_connected_processes_are_found() -> None:
    both = with_steps((41, "r", S, 0, 2, 1), (45, "r", F, 0, 2, 1))

    assert "r started 0/2 at +0.000 s while q ran 0/2 of the same key" in broken(OneProcessPerKey(), both)
    verify(both, OneProcessPerKey(apart=[Apart("r", 30, 43)]))
    assert "q ran 0/2" in broken(OneProcessPerKey(apart=[Apart("q", 30, 42)]), both)
    assert "q ran 0/2" in broken(OneProcessPerKey(apart=[Apart("p")]), both)


def test_a_killed_run_does_not_count_as_concurrent() -> None:
    verify(with_steps((41, "r", S, 0, 2, 1)), OneProcessPerKey())


def test_records_without_a_key_have_no_order() -> None:
    steps = [(10, S, 1), (11, S, 0), (12, F, 0), (13, F, 1), (14, S, 0)]
    seen = tuple(Seen(at, "p", kind, 0, offset, 1, "") for at, kind, offset in steps)

    verify(History({(0, 0): "", (0, 1): ""}, seen, (), {}), KeyOrder(), OneAtATimePerKey())


# Commits ----------------------------------------------------------------------------------


def test_a_commit_past_an_unfinished_record_is_found() -> None:
    ahead = with_commits((25, {0: 3}), (50, {0: 5, 1: 1}))

    assert "partition 0 was committed at 3 by +0.000 s, and record 0/2 finished only" in broken(NeverAhead(), ahead)


def test_a_commit_beyond_a_hole_is_allowed() -> None:
    verify(with_commits((45, {0: 4}), (46, {0: 5})), NeverAhead())


def test_a_commit_past_a_record_that_never_finished_is_found() -> None:
    assert "and record 0/4 never finished" in broken(NeverAhead(), without((42, F)))


def test_a_commit_that_went_back_is_found() -> None:
    back = with_commits((45, {0: 4}), (46, {0: 2}))

    assert "partition 0 was committed at 4 and then at 2" in broken(CommitsOnlyAdvance(), back)


def test_a_commit_that_vanished_counts_as_going_back() -> None:
    assert "and then at -1" in broken(CommitsOnlyAdvance(), with_commits((45, {0: 4}), (46, {})))


def test_a_start_of_a_committed_record_is_found() -> None:
    again = with_steps((60, "p", S, 0, 2, 2))

    assert "p started 0/2 at +0.000 s, after the commit of 5" in broken(OnlyUncommittedAgain(), again)


def test_a_start_before_the_commit_was_acknowledged_is_allowed() -> None:
    verify(with_steps((49, "p", S, 0, 2, 2)), OnlyUncommittedAgain())


def test_a_stored_completion_of_an_unfinished_record_is_found() -> None:
    early = CommitsAt(13, 13, {0: 0}, completions={0: (Run(2, 5),)})

    assert "record 0/4 was stored as finished by" in broken(NeverAhead(), replace(GOOD, commits=(early, *GOOD.commits)))


def test_a_start_of_a_stored_completion_is_found_unless_the_process_was_frozen() -> None:
    later = CommitsAt(43, 43, {0: 2}, completions={0: (Run(4, 5),)})
    again = replace(GOOD, seen=(*GOOD.seen, *history((44, "p", S, 0, 4, 2)).seen), commits=(later,))

    assert "p started 0/4 at +0.000 s, after it was stored as finished" in broken(OnlyUncommittedAgain(), again)
    verify(again, OnlyUncommittedAgain(apart=[Apart("p")]))


def test_a_partition_not_committed_to_its_end_lags() -> None:
    lagging = with_commits((50, {0: 4}))

    message = broken(LagZero(), lagging)

    assert "partition 0 ends at 5 and is committed at 4" in message
    assert "partition 1 ends at 1 and is committed at None" in message


# Duplicates -------------------------------------------------------------------------------


def test_every_start_after_the_first_is_a_duplicate_even_if_cancelled() -> None:
    message = broken(NoDuplicates(), GOOD)

    assert "0/2 (key a) was started in p at +0.000 s and again in q" in message
    verify(GOOD, NoDuplicates(budget=1))
    verify(GOOD, NoDuplicates(apart_from=[(0, 2)]))


def test_a_budget_covers_all_records_together() -> None:
    twice = with_steps((60, "p", S, 1, 0, 2))

    assert "NoDuplicates was broken 2 times" in broken(NoDuplicates(budget=1), twice)


def test_an_offset_taken_in_twice_is_found() -> None:
    once = history((1, "p", I, 0, 0, 0), (2, "p", I, 0, 1, 0), (3, "q", I, 0, 1, 0))
    twice = replace(once, seen=(*once.seen, *history((4, "p", I, 0, 1, 0)).seen))

    verify(once, TakenInOnce("p", [0]))
    assert "p took in 0/1 after offset 1" in broken(TakenInOnce("p", [0]), twice)


def test_a_partition_without_intake_proves_nothing() -> None:
    assert "p took in nothing of partition 1" in broken(TakenInOnce("p", [1]), GOOD)


# Observations -----------------------------------------------------------------------------


def test_recorded_observations_are_read_back_once(tmp_path: Path) -> None:
    recorder, observations = Recorder(tmp_path, "a.1"), Observations(tmp_path)
    recorder.note(S, (3, 41), 2, b"with space")
    recorder.note(F, (3, 41), 2, None)

    observations.refresh()
    observations.refresh()

    assert [(seen.process, seen.kind, seen.record_id, seen.epoch, seen.key) for seen in observations.seen] == [
        ("a.1", S, (3, 41), 2, "with space"),
        ("a.1", F, (3, 41), 2, ""),
    ]
    assert observations.finished == {(3, 41)}
    assert observations.started == {(3, 41): 1}


def test_an_incomplete_line_is_read_once_complete(tmp_path: Path) -> None:
    file, observations = tmp_path / "a.1.seen", Observations(tmp_path)
    file.write_bytes(b"5 S 0 1 1 k\n7 F 0 ")

    assert [seen.kind for seen in observations.refresh().seen] == [S]

    file.write_bytes(b"5 S 0 1 1 k\n7 F 0 1 1 k\n")

    assert [seen.kind for seen in observations.refresh().seen] == [S, F]
