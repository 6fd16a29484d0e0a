"""The checks on failed records can fail: each accepts a correct history and finds a tampered one."""

from dataclasses import replace

import pytest

from aioshard import Record
from aioshard.ports import Message
from aioshard.serde.side_records import (
    Coordinates,
    DeadLetterRecord,
    Failure,
    StorageKey,
    dead_letter,
    park,
    release,
    tombstone,
)
from tests.guarantees.checks import (
    CommitsAt,
    Guarantee,
    History,
    KeyOrder,
    NeverAhead,
    NothingLost,
    OneAtATimePerKey,
    OnlyUncommittedAgain,
    verify,
)
from tests.guarantees.observations import Kind, Seen
from tests.guarantees.side_topics import (
    DeadLettersExact,
    OneDeadLetterPerOwnership,
    ParkedExactly,
    live,
    requests,
    there,
)

S, F, X = Kind.STARTED, Kind.FINISHED, Kind.EXHAUSTED
KEYS = {(0, 0): "bad", (0, 1): "bad", (0, 2): "good"}
ORIGINALS = {
    record_id: Record("orders", *record_id, key.encode(), b"v", (("h", b"1"),), 1_700_000_000.5)
    for record_id, key in KEYS.items()
}
WHY = Failure("group", "handler", 4, "ValueError", "no", 1_700_000_001.0)


def seen(*steps: tuple[int, str, Kind, int, int]) -> tuple[Seen, ...]:
    """Steps are time, process, what happened, offset, epoch."""
    return tuple(
        Seen(at, process, kind, 0, offset, epoch, KEYS[0, offset]) for at, process, kind, offset, epoch in steps
    )


def stored(*messages: Message) -> list[Record]:
    """Messages as their topic has them, in one partition."""
    return [
        Record(message.topic, 0, offset, message.key, message.value, message.headers, message.timestamp or 0.0)
        for offset, message in enumerate(messages)
    ]


def dead_letters(*offsets: int) -> list[Record]:
    return stored(*(dead_letter("dlt", ORIGINALS[0, offset], WHY) for offset in offsets))


def broken(guarantee: Guarantee, observed: History) -> str:
    """Return the error of the check for a history that must not pass."""
    with pytest.raises(AssertionError) as failure:
        verify(observed, guarantee)
    return str(failure.value)


DIVERTED = History(
    KEYS,
    seen(
        (10, "p", S, 0, 1),
        (11, "p", X, 0, 1),
        (20, "p", S, 1, 1),
        (21, "p", X, 1, 1),
        (22, "p", S, 2, 1),
        (23, "p", F, 2, 1),
    ),
    (CommitsAt(24, 25, {0: 1}), CommitsAt(34, 35, {0: 3})),
    {0: 3},
    passed={(0, 0): 25, (0, 1): 35},
    let_go={(0, 0): 15, (0, 1): 25},
)
"""Both records of the key fail, and are skipped or dead-lettered; the other one finishes."""


def test_a_diverted_record_is_not_lost_and_may_be_passed() -> None:
    verify(DIVERTED, NothingLost(), KeyOrder(), OneAtATimePerKey(), NeverAhead(), OnlyUncommittedAgain())


def test_a_failed_record_that_was_not_diverted_is_lost() -> None:
    assert "0/1 (key bad) never finished" in broken(NothingLost(), replace(DIVERTED, let_go={(0, 0): 15}))


def test_a_follower_that_starts_before_the_diversion_breaks_the_order() -> None:
    early = replace(DIVERTED, let_go={(0, 0): 21, (0, 1): 25})

    assert "p started 0/1 (key bad)" in broken(KeyOrder(), early)


def test_a_follower_of_a_parked_record_that_starts_breaks_the_order() -> None:
    """Parking lets a commit pass, and not the key."""
    assert "0/0 of the same key has never finished" in broken(KeyOrder(), replace(DIVERTED, let_go={}))


def test_a_permanently_failed_attempt_has_ended() -> None:
    still = replace(DIVERTED, seen=tuple(observation for observation in DIVERTED.seen if observation.at != 11))

    assert "while 0/0 of the same key ran" in broken(OneAtATimePerKey(), still)


def test_a_commit_before_the_record_reached_the_side_topic_is_ahead() -> None:
    late = replace(DIVERTED, passed={(0, 0): 35, (0, 1): 35})

    assert "partition 0 was committed at 1" in broken(NeverAhead(), late)
    assert "record 0/1 never finished" in broken(NeverAhead(), replace(DIVERTED, passed={(0, 0): 25}))


def test_a_parked_record_may_run_after_it_was_committed() -> None:
    again = replace(DIVERTED, seen=(*DIVERTED.seen, *seen((40, "p", S, 0, 2))))

    assert "p started 0/0" in broken(OnlyUncommittedAgain(), again)
    verify(again, OnlyUncommittedAgain(apart_from={(0, 0)}))


# When something was there -----------------------------------------------------------------


def test_a_side_topic_record_appeared_between_two_samples() -> None:
    samples = [CommitsAt(10 * n, 10 * n + 1, {}, {0: end}) for n, end in enumerate([0, 0, 2, 2, 3])]
    when = there(samples)

    assert when(0, 0) == when(0, 1) == (11, 21)
    assert when(0, 2) == (31, 41)
    assert when(0, 3) is None


def test_a_side_topic_created_later_was_not_there_before() -> None:
    samples = [CommitsAt(0, 1, {}), CommitsAt(10, 11, {}), CommitsAt(20, 21, {}, {0: 1})]

    assert there(samples)(0, 0) == (11, 21)


# Dead letters -----------------------------------------------------------------------------


def exact(found: list[Record]) -> DeadLettersExact:
    return DeadLettersExact(found, ORIGINALS, {(0, 0), (0, 1)}, lambda letter: letter.failure == WHY)


def test_exactly_the_failed_records_have_dead_letters() -> None:
    verify(DIVERTED, exact(dead_letters(0, 1)))
    verify(DIVERTED, exact(dead_letters(0, 1, 1)))
    assert "records without a dead letter: 1: 0/1" in broken(exact(dead_letters(0)), DIVERTED)
    assert "records dead-lettered by mistake: 1: 0/2" in broken(exact(dead_letters(0, 1, 2)), DIVERTED)


@pytest.mark.parametrize(
    "tampered",
    [
        lambda letter: letter._replace(value=b"w"),
        lambda letter: letter._replace(key=None),
        lambda letter: letter._replace(timestamp=1.0),
        lambda letter: letter._replace(headers=letter.headers[1:]),
    ],
    ids=["value", "key", "timestamp", "headers"],
)
def test_a_dead_letter_that_differs_from_its_original_is_found(tampered: object) -> None:
    assert callable(tampered)
    first, second = dead_letters(0, 1)

    assert "the dead letter of 0/0" in broken(exact([tampered(first), second]), DIVERTED)


def test_a_dead_letter_with_another_reason_is_found() -> None:
    def says_otherwise(letter: DeadLetterRecord) -> bool:
        return letter.failure.attempts == 5

    assert "says Failure" in broken(replace(exact(dead_letters(0, 1)), says=says_otherwise), DIVERTED)


def test_a_second_dead_letter_needs_a_second_owner() -> None:
    verify(DIVERTED, OneDeadLetterPerOwnership(dead_letters(0, 1)))
    assert "record 0/0 has 2 dead letters" in broken(OneDeadLetterPerOwnership(dead_letters(0, 0, 1)), DIVERTED)
    moved = replace(DIVERTED, seen=(*DIVERTED.seen, *seen((40, "q", S, 0, 1), (41, "q", X, 0, 1))))
    verify(moved, OneDeadLetterPerOwnership(dead_letters(0, 0, 1)))
    twice = replace(DIVERTED, seen=(*DIVERTED.seen, *seen((40, "p", S, 0, 1), (41, "p", X, 0, 1))))
    assert "twice in one ownership" in broken(OneDeadLetterPerOwnership(dead_letters(0, 0, 1)), twice)


# Parked records ---------------------------------------------------------------------------


def parked(offset: int, generation: int = 3) -> Message:
    return park("parked", ORIGINALS[0, offset], WHY, due=1.0, generation=generation)


def test_parked_records_are_those_not_removed_since() -> None:
    first = Coordinates("orders", 0, 0)
    records = stored(parked(0), parked(1), tombstone("parked", StorageKey(first, 3)), release("parked", first))

    assert live(records).keys() == {"orders/0/1@3"}
    assert list(requests(records)) == ["release/orders/0/0"]
    assert not requests([*records, *stored(release("parked", first, answered=True))])
    verify(DIVERTED, ParkedExactly(records, ORIGINALS, {(0, 1)}))


def test_missing_and_surplus_parked_records_are_found() -> None:
    records = stored(parked(0))

    assert "records not parked: 1: 0/1" in broken(ParkedExactly(records, ORIGINALS, {(0, 0), (0, 1)}), DIVERTED)
    assert "records parked by mistake: 1: 0/0" in broken(ParkedExactly(records, ORIGINALS, ()), DIVERTED)
    twice = ParkedExactly(stored(parked(0), parked(0, generation=4)), ORIGINALS, {(0, 0)})
    assert "2 parked records are stored for 1 records" in broken(twice, DIVERTED)
    other = {**ORIGINALS, (0, 0): ORIGINALS[0, 0]._replace(value=b"w")}
    assert "what is parked of 0/0 holds" in broken(ParkedExactly(records, other, {(0, 0)}), DIVERTED)
