"""Parked records are selected by all of their content, although only a part of it is kept."""

from aioshard.dead_letters.filters import EVERYTHING, Filters, HeaderFilter
from aioshard.dead_letters.parked import ParkedTopic, key_as_object
from aioshard.ports import Message
from aioshard.serde.side_records import Coordinates, StorageKey, park, release, tombstone
from tests.support.dead_letters import failure, record, stored

TOPIC = "orders.parked"


def parked_topic(filters: Filters, *messages: Message) -> ParkedTopic:
    parked = ParkedTopic(filters)
    for offset, message in enumerate(messages):
        parked.add(stored(message, message.partition or 0, offset))
    return parked


def parked_message(number: int, *, generation: int = 1, **fields: object) -> Message:
    original = record(number, headers=(("tenant", b"acme"),))._replace(**fields)  # type: ignore[arg-type]
    return park(TOPIC, original, failure(number), generation=generation, due=1.0)


def selected(filters: Filters, *messages: Message) -> list[int]:
    return [found.coordinates.offset for found in parked_topic(filters, *messages).selected()]


def test_values_and_headers_select_although_they_are_not_kept() -> None:
    messages = [parked_message(1), parked_message(2, value=b"needle"), parked_message(3, headers=())]

    assert selected(Filters(text="needle"), *messages) == [2]
    assert selected(Filters(headers=(HeaderFilter("tenant", "acme"),)), *messages) == [1, 2]
    assert all(found.original.value is None for found in parked_topic(EVERYTHING, *messages).latest())


def test_a_key_is_selected_with_all_its_records() -> None:
    messages = [parked_message(1), parked_message(2, value=b"needle"), parked_message(3, key=b"bob")]

    (key,) = parked_topic(Filters(text="needle"), *messages).keys()

    assert [found.coordinates.offset for found in key] == [1, 2]


def test_the_latest_copy_of_a_record_decides() -> None:
    before = parked_message(1, value=b"needle")
    after = parked_message(1)

    assert selected(Filters(text="needle"), before, after) == []
    assert selected(Filters(text="needle"), after, before) == [1]
    assert selected(Filters(text="needle"), before, parked_message(1, generation=2)) == []


def test_removed_records_and_answered_requests_are_gone() -> None:
    at = Coordinates("orders", 0, 1)
    messages = [parked_message(1), parked_message(2), release(TOPIC, at)]
    requested = parked_topic(EVERYTHING, *messages)
    answered = parked_topic(EVERYTHING, *messages, release(TOPIC, at, answered=True))
    removed = parked_topic(EVERYTHING, *messages, tombstone(TOPIC, StorageKey(at, 1)))

    assert requested.is_requested(requested.keys()[0])
    assert not answered.is_requested(answered.keys()[0])
    assert [found.coordinates.offset for found in removed.latest()] == [2]


def test_a_hidden_payload_has_no_key_and_no_message() -> None:
    parked = parked_topic(EVERYTHING, parked_message(1, key=b"secret"))

    shown = key_as_object(parked, parked.keys()[0], payload=False)

    assert (shown["key"], shown["message"], shown["error"]) == (None, None, "ValueError")
