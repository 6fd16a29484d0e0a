"""Which side-topic records a partition adopts and which it ignores, without a broker."""

import math

import pytest

from aioshard.core.finished_offsets import Run
from aioshard.core.parking import NEVER, ParkedEntry
from aioshard.engine.epoch import Delivery, Epoch
from aioshard.engine.parked_partition import ParkedPartition
from aioshard.ports import UNKNOWN_OFFSET, FetchedBatch, Message
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import (
    Coordinates,
    Failure,
    Removed,
    StorageKey,
    park,
    read_parked,
    release,
    tombstone,
)
from tests.engine.deliveries import make_buffer

ORDERS = TopicPartition("orders", 0)
STORED_IN = TopicPartition("parked", 0)
FAILURE = Failure("g", "h", 1, "ValueError", "no", 0.0)


def original(offset: int, key: bytes = b"k") -> Record:
    return Record("orders", 0, offset, key, b"", (), 0.0)


def parked(
    offset: int,
    at: int,
    generation: int,
    key: bytes = b"k",
    *,
    failure: Failure = FAILURE,
    due: float = 60.0,
    retries: int = 0,
) -> Record:
    message = park("parked", original(offset, key), failure, generation=generation, due=due, retries=retries)
    return stored(message, at)


def removed(offset: int, at: int, generation: int, *, by: int | None = None) -> Record:
    return stored(tombstone("parked", StorageKey(Coordinates("orders", 0, offset), generation), by=by), at)


def stored(message: Message, at: int) -> Record:
    return Record("parked", 0, at, message.key, message.value, tuple(message.headers), 0.0)


def restored(
    *before: Record,
    start: int = 100,
    generation: int = 7,
    exactly_once: bool = False,
    finished_ahead: tuple[Run, ...] = (),
) -> tuple[ParkedPartition, list[Message]]:
    """The parked records of an assigned partition; *before* are the records in its side topic."""
    buffer = make_buffer(1_000, 1 << 20)
    epoch = Epoch(ORDERS, 1, start, buffer)
    epoch.finished_ahead = finished_ahead
    made = ParkedPartition(
        epoch,
        STORED_IN.topic,
        generation,
        buffer=buffer,
        identity=lambda record: record.key,
        exactly_once=exactly_once,
    )
    for record in before:
        made.restore(record)
    made.finish_restoring(newest=generation)
    answers = made.outgoing()
    made.read_to = before[-1].offset + 1 if before else 0
    return made, answers


def offsets(of: ParkedPartition) -> list[int]:
    return sorted(entry.offset for entry in of.keys)


def arrive(at: ParkedPartition, offset: int) -> Delivery:
    """A record of the partition itself is delivered."""
    delivery = Delivery(original(offset), at.source, b"k", 1, 0.0)
    at.source.take_in(FetchedBatch(ORDERS, [delivery.record], [1], offset + 1), [delivery])
    return delivery


def entry_of(offset: int, *, generation: int, stored_at: int) -> ParkedEntry:
    return ParkedEntry(offset, original(offset).key, generation=generation, stored_at=stored_at, due=60.0, retries=0)


def acknowledged(at: ParkedPartition, offset: int, stored_at: int) -> None:
    at.add(entry_of(offset, generation=at.generation, stored_at=stored_at), FAILURE)


def test_redelivered_records_are_removed_from_the_park_topic() -> None:
    made, answers = restored(parked(3, 0, 5), parked(4, 1, 5), parked(5, 2, 6), start=4)
    assert offsets(made) == [3]
    assert [read_parked(stored(answer, 9)) for answer in reversed(answers)] == [
        Removed(StorageKey(Coordinates("orders", 0, 4), 5), by=7),
        Removed(StorageKey(Coordinates("orders", 0, 5), 6), by=7),
    ]


def test_a_tombstone_of_another_generation_removes_nothing() -> None:
    made, _ = restored(parked(3, 0, 5), removed(3, 1, 4))
    made.read(removed(3, 2, 6))
    assert offsets(made) == [3]
    made.read(removed(3, 3, 5))
    assert offsets(made) == []


def test_a_removal_by_a_later_owner_is_ignored_here() -> None:
    """A stale member must not continue with the key: the owner runs the record first."""
    made, _ = restored(parked(3, 0, 5), parked(4, 1, 5))
    made.read(removed(3, 2, 5, by=8))
    assert offsets(made) == [3, 4]
    made.read(removed(3, 3, 5, by=6))
    made.read(removed(4, 4, 5))
    assert offsets(made) == []


def test_a_tombstone_older_than_the_parked_record_removes_nothing() -> None:
    """It is read after the park was acknowledged, though it lies before it."""
    made, _ = restored()
    acknowledged(made, 3, stored_at=10)
    made.read(removed(3, 9, 7, by=7))
    assert offsets(made) == [3]
    made.read(removed(3, 11, 7, by=7))
    assert offsets(made) == []


@pytest.mark.parametrize("stored_at", [3, UNKNOWN_OFFSET], ids=["acknowledged", "being written"])
@pytest.mark.parametrize("exactly_once", [False, True])
def test_an_operator_drops_a_record_also_if_it_is_parked_again_after_the_tombstone(
    stored_at: int, exactly_once: bool
) -> None:
    """Otherwise the later copy would be parked for the next owner, which would run the record."""
    made, _ = restored(parked(3, 0, 5), parked(4, 1, 5), exactly_once=exactly_once)
    (entry, _) = made.keys
    entry.stored_at = stored_at
    made.read(removed(3, 2, 5))
    assert offsets(made) == [4]
    assert made.outgoing() == [], "the copy may not be visible yet"
    made.read(parked(3, 3, 5, retries=1))
    assert [read_parked(stored(message, 4)) for message in made.outgoing()] == [
        Removed(StorageKey(Coordinates("orders", 0, 3), 5), by=7)
    ]
    assert offsets(made) == [4]


def test_a_tombstone_of_an_owner_does_not_remove_a_record_that_is_being_written() -> None:
    """It may be from before a seek, after which the record was delivered again and failed again."""
    made, _ = restored()
    acknowledged(made, 3, stored_at=UNKNOWN_OFFSET)
    made.read(removed(3, 1, 7, by=7))
    made.read(parked(3, 2, 7))
    assert [(entry.offset, entry.stored_at) for entry in made.keys] == [(3, 2)]


def test_an_operator_may_drop_a_record_before_its_park_is_acknowledged() -> None:
    """Otherwise its key would wait for a record that is not in the side topic."""
    made, _ = restored()
    delivery = arrive(made, 100)
    made.source.open()
    made.read(parked(100, 0, 7))
    made.read(removed(100, 1, 7))
    acknowledged(made, 100, stored_at=0)
    assert offsets(made) == []
    made.source.complete(delivery)
    assert [message.key for message in made.outgoing()] == [b"orders/0/100@7"]


def test_records_parked_in_a_later_generation_belong_to_another_owner() -> None:
    made, answers = restored(parked(3, 0, 8))
    assert offsets(made) == []
    assert answers == []
    made.read(parked(4, 1, 8))
    assert made.outgoing() == []


def test_a_record_that_finished_beyond_the_committed_offset_stays_parked() -> None:
    """The partition does not deliver it again: a commit lists it as complete."""
    made, answers = restored(parked(3, 0, 5), parked(5, 1, 5), parked(6, 2, 5), start=4, finished_ahead=(Run(5, 6),))
    assert offsets(made) == [3, 5]
    assert [answer.key for answer in answers] == [b"orders/0/6@5"]


def test_a_late_copy_of_a_stale_member_is_removed_while_the_record_is_parked() -> None:
    """Left there it would be a parked record once the one that counts is finished."""
    made, _ = restored(parked(3, 0, 6))
    made.read(parked(3, 1, 5))
    assert [message.key for message in made.outgoing()] == [b"orders/0/3@5"]
    assert [(entry.generation, entry.stored_at) for entry in made.keys] == [(6, 0)]


def test_the_latest_copy_is_read_although_an_earlier_one_is_seen_after_its_acknowledgment() -> None:
    """An earlier write was stored too, and its acknowledgment was lost."""
    made, _ = restored()
    acknowledged(made, 3, stored_at=10)
    made.read(parked(3, 8, 7))
    assert [entry.stored_at for entry in made.keys] == [10]


def test_records_count_that_are_written_after_the_side_topic_was_truncated() -> None:
    """Its leader has lost the last records, and new ones have their offsets."""
    made, _ = restored(parked(3, 0, 5))
    made.read(parked(100, 9, 7))
    made.read(removed(3, 5, 5))
    assert offsets(made) == []


def test_after_a_group_reset_records_of_later_generations_are_adopted() -> None:
    before = [parked(3, 0, 8), parked(4, 1, 9), removed(4, 2, 9), parked(5, 3, 6), parked(5, 4, 8), parked(100, 5, 8)]
    made, answers = restored(*before)
    assert made.in_doubt
    assert offsets(made) == [5]
    assert answers == []

    made.finish_restoring(newest=math.inf)

    assert not made.in_doubt
    assert offsets(made) == [3, 5]
    taken_out = [answer.key for answer in made.outgoing()]
    assert taken_out == [b"orders/0/5@8", b"orders/0/100@8"], "what is parked twice, and what comes again by itself"
    assert made.outgoing() == []
    made.read(removed(3, 9, 8))
    assert offsets(made) == [5]


def test_a_record_that_was_dropped_while_it_was_in_doubt_is_not_adopted() -> None:
    made, _ = restored(parked(3, 0, 8), parked(4, 1, 8))
    made.read(removed(3, 2, 8))
    made.finish_restoring(newest=math.inf)
    assert offsets(made) == [4]


def test_the_last_copy_of_a_record_parked_twice_counts() -> None:
    made, _ = restored(parked(3, 0, 6), parked(3, 1, 5))
    (entry,) = made.keys
    assert (entry.generation, entry.stored_at) == (6, 0)


EARLIER, LATER = parked(3, 0, 5, due=50.0), parked(3, 1, 6)


@pytest.mark.parametrize(
    "before",
    [[EARLIER, LATER], [LATER, parked(3, 2, 5, due=50.0)], [EARLIER, LATER, parked(3, 2, 5), parked(3, 3, 6)]],
    ids=["before it", "after it", "both again"],
)
def test_copies_of_an_earlier_generation_are_removed(before: list[Record]) -> None:
    """Left there it is a parked record for who reads the topic when the one that counts is gone from it."""
    made, answers = restored(*before)
    assert [entry.generation for entry in made.keys] == [6]
    assert {answer.key for answer in answers} == {b"orders/0/3@5"}


def test_all_copies_of_a_redelivered_record_are_removed() -> None:
    made, answers = restored(EARLIER, LATER, parked(3, 2, 4), start=3)
    assert offsets(made) == []
    assert sorted(answer.key or b"" for answer in answers) == [b"orders/0/3@4", b"orders/0/3@5", b"orders/0/3@6"]


@pytest.mark.parametrize("gone", [4, 5, 6])
def test_after_one_removal_the_latest_remaining_copy_counts(gone: int) -> None:
    """The others may be only traces of it, or not: twice is better than not at all."""
    made, answers = restored(EARLIER, LATER, parked(3, 2, 4), removed(3, 3, gone))
    kept, *others = sorted({4, 5, 6} - {gone}, reverse=True)
    assert [entry.generation for entry in made.keys] == [kept]
    assert [answer.key for answer in answers] == [f"orders/0/3@{other}".encode() for other in others]
    assert made.failures == {b"k": FAILURE}


def test_a_record_parked_again_is_due_as_last_written() -> None:
    """Else a key that has used up its attempts would have them again after each restart."""
    again = FAILURE._replace(message="again")
    made, answers = restored(parked(3, 0, 5), parked(4, 1, 5), parked(3, 2, 5, failure=again, due=NEVER, retries=2))
    assert [(entry.offset, entry.due, entry.retries, entry.stored_at) for entry in made.keys] == [
        (3, NEVER, 2, 2),
        (4, 60.0, 0, 1),
    ]
    assert made.keys.next_due == NEVER
    assert made.failures == {b"k": again}
    assert answers == []


def test_an_unacknowledged_park_is_removed_when_its_record_ends_otherwise() -> None:
    made, _ = restored()
    delivery = arrive(made, 100)
    made.source.open()
    made.read(parked(100, 0, 7))
    assert made.outgoing() == [], "it failed, and is going to be tried again"
    made.source.complete(delivery)
    assert [answer.key for answer in made.outgoing()] == [b"orders/0/100@7"]
    assert made.outgoing() == []


def test_with_exactly_once_only_a_transaction_removes_a_record() -> None:
    """The reader may be late: the tombstone of the record is in a transaction that has not ended."""
    made, _ = restored(exactly_once=True)
    made.read(parked(3, 0, 7))
    made.read(parked(4, 1, 6))  # parked again by the next owner, if we are not the owner any more
    assert made.outgoing() == []


def test_a_park_that_is_seen_before_it_is_acknowledged_stays() -> None:
    made, _ = restored()
    delivery = arrive(made, 100)
    made.read(parked(100, 0, 7))
    assert made.outgoing() == [], "its write is on its way"
    acknowledged(made, 100, stored_at=0)
    made.source.complete(delivery)
    assert made.outgoing() == []
    assert offsets(made) == [100]


def test_a_release_does_not_run_a_key_twice_at_once() -> None:
    made, _ = restored(parked(3, 0, 5), parked(4, 1, 5))
    entry = made.keys.take_due(60.0)
    assert entry is not None
    made.keys.release(b"k")
    assert made.keys.take_due(60.0) is None, "it was released while it was fetched to be run again"
    made.replay(entry, original(3), b"k", 0.0)
    made.keys.release(b"k")
    assert made.keys.take_due(60.0) is None, "it was released while it ran again"
    made.remove(3)
    following = made.keys.take_due(60.0)
    assert following is not None
    assert following.offset == 4


def test_a_waiting_key_can_be_released() -> None:
    made, _ = restored(parked(3, 0, 5))
    assert made.keys.take_due(0.0) is None
    made.keys.release(b"k")
    assert made.keys.take_due(0.0) is not None


def test_a_release_is_answered_only_once_it_is_done() -> None:
    made, _ = restored(parked(3, 0, 5))
    made.read(stored(release("parked", Coordinates("orders", 0, 3)), 1))
    assert made.outgoing() == [], "its key waits for its turn: the next owner would have to do it"
    entry = made.keys.take_due(0.0)
    assert entry is not None
    made.replay(entry, original(3), b"k", 0.0)
    assert made.outgoing() == [], "its key runs"
    assert made.remove(3) == [release("parked", Coordinates("orders", 0, 3), answered=True)]
    assert made.remove(3) == made.outgoing() == [], "it was answered"


def test_an_answered_release_is_not_repeated_by_the_next_owner() -> None:
    """Both are in the side topic until it is compacted."""
    named = Coordinates("orders", 0, 3)
    asked, answer = release("parked", named), release("parked", named, answered=True)
    made, _ = restored(parked(3, 0, 5, due=NEVER), stored(asked, 1), stored(answer, 2))
    assert made.keys.next_due == NEVER


def test_an_owner_ignores_answers_to_releases() -> None:
    """Otherwise its own answer would release a key that has failed again, without end."""
    made, _ = restored(parked(3, 0, 5))
    made.read(stored(release("parked", Coordinates("orders", 0, 3), answered=True), 1))
    assert made.keys.next_due == 60.0
    assert made.outgoing() == []


def test_all_releases_of_a_key_are_answered() -> None:
    made, _ = restored(parked(3, 0, 5), parked(4, 1, 5))
    for number, offset in enumerate((3, 4), start=2):
        made.read(stored(release("parked", Coordinates("orders", 0, offset)), number))
    assert made.remove(3) == [], "the other one has not run"
    assert made.remove(4) == [release("parked", Coordinates("orders", 0, n), answered=True) for n in (3, 4)]


def test_a_key_that_fails_again_has_its_latest_reason_and_due_time() -> None:
    made, _ = restored(parked(3, 0, 5))
    made.read(stored(release("parked", Coordinates("orders", 0, 3)), 1))
    again = FAILURE._replace(message="again")
    entry = made.keys.take_due(60.0)
    assert entry is not None
    entry.due = 90.0
    answers = made.failed_again(entry, again)
    assert made.failures == {b"k": again}
    assert made.keys.next_due == 90.0
    assert answers == [release("parked", Coordinates("orders", 0, 3), answered=True)]


def test_a_release_stays_unanswered_until_its_key_can_run() -> None:
    made, _ = restored(parked(3, 0, 5), parked(4, 1, 5))
    made.read(stored(release("parked", Coordinates("orders", 0, 3)), 2))
    assert made.keys.take_due(0.0) is not None
    made.keys.postpone(b"k", 1.0)  # its payload could not be read, or its partition is being revoked
    assert made.outgoing() == [], "the next owner would have to do it"
    assert made.remove(3) == [], "the records behind it are released with it"
    made.keys.postpone(b"k", 2.0)
    assert made.outgoing() == [], "the next owner would have to do it"


def test_the_next_owner_continues_a_started_release() -> None:
    asked = release("parked", Coordinates("orders", 0, 3))
    removed = tombstone("parked", StorageKey(Coordinates("orders", 0, 3), 5), by=6)
    made, _ = restored(parked(3, 0, 5), parked(4, 1, 5), stored(asked, 2), stored(removed, 3))
    assert made.outgoing() == [], "the record that it names has run, the one behind it has not"
    entry = made.keys.take_due(0.0)
    assert entry is not None
    assert entry.offset == 4


def test_a_key_parked_again_has_a_new_reason() -> None:
    made, _ = restored(parked(3, 0, 5))
    made.remove(3)
    entry = entry_of(101, generation=7, stored_at=1)
    made.add(entry, FAILURE._replace(message="another"))
    assert made.failures[b"k"].message == "another"


def test_a_drain_does_not_wait_for_a_replay_that_is_only_queued() -> None:
    """The commit of its partition lists no parked record, so nothing would run twice."""
    held, _ = restored(parked(1, at=0, generation=6))
    held.open()
    entry = held.keys.take_due(1_000.0)
    assert entry is not None
    held.replay(entry, original(1), b"k", 0.0)
    held.highest_started = held.tracker.position

    held.close(below=True)

    assert held.drained.is_set()
