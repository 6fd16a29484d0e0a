"""Records of side topics round-trip, and foreign records are never mistaken for ours."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.ports import Message
from aioshard.records import TOPIC_NAME, Record
from aioshard.serde.payloads import unwritable
from aioshard.serde.side_records import (
    LONGEST_MESSAGE,
    MESSAGE_ID,
    REPLAYED,
    Coordinates,
    DeadLetterRecord,
    Failure,
    ParkedRecord,
    ReleaseRequest,
    Removed,
    SchemaRef,
    StorageKey,
    dead_letter,
    failure_headers,
    park,
    read_dead_letter,
    read_parked,
    release,
    replay,
    tombstone,
)

MISNAMED = (("\udcff", b""),)
EXAMPLE = park("s", Record("t", 0, 0, b"", None, MISNAMED, 0.0), Failure("", "", 1, "", "", 0.0), generation=3, due=0.0)
OURS = [*(name for name, _ in EXAMPLE.headers[1:]), MESSAGE_ID, "aioshard.schema_id", "aioshard.subject"]

topics = st.from_regex(TOPIC_NAME, fullmatch=True)
offsets = st.integers(0, 2**63 - 1)
moments = st.integers(0, 2**42).map(lambda milliseconds: milliseconds / 1000)
payloads = st.none() | st.binary(max_size=50)
names = st.text(max_size=20)


def headers_of(header_names: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(header_names, payloads), max_size=6).map(tuple)


def records_with(headers: st.SearchStrategy[Any]) -> st.SearchStrategy[Record]:
    return st.builds(Record, topics, st.integers(0, 2**31 - 1), offsets, payloads, payloads, headers, moments)


foreign_names = names.filter(lambda name: name not in OURS) | st.sampled_from(["trace", "aioshard.own", REPLAYED])
misnamed = st.binary(max_size=6).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
records = records_with(headers_of(foreign_names))
records_with_any_names = records_with(headers_of(foreign_names | misnamed))
records_with_headers_like_ours = records_with(headers_of(foreign_names | st.sampled_from(OURS)))
failures = st.builds(
    Failure, names, names, st.integers(1, 10**6), names, st.text(max_size=LONGEST_MESSAGE), st.floats(0, 1e11)
)


def stored(message: Message, *, partition: int = 0, offset: int = 7) -> Record:
    """A message as a broker delivers it."""
    if message.partition is not None:
        partition = message.partition
    timestamp = 1.0 if message.timestamp is None else message.timestamp
    return Record(message.topic, partition, offset, message.key, message.value, message.headers, timestamp)


RECORD = Record("orders", 3, 41, b"alice", b"{}", (("trace", b"7"), ("trace", None)), 1700000000.125)
FAILURE = Failure("billing", "on_order", 5, "ValueError", "no such customer", 1700000009.5)


# Dead letters


@given(records, failures)
def test_a_dead_letter_is_read_as_it_was_written(record: Record, failure: Failure) -> None:
    assert read_dead_letter(stored(dead_letter("dlt", record, failure))) == DeadLetterRecord(record, failure)


def test_a_dead_letter_keeps_the_record_and_has_a_readable_reason() -> None:
    message = dead_letter("orders.dlt", RECORD, FAILURE)

    assert message == Message(
        topic="orders.dlt",
        value=b"{}",
        key=b"alice",
        headers=(
            ("trace", b"7"),
            ("trace", None),
            ("aioshard.topic", b"orders"),
            ("aioshard.partition", b"3"),
            ("aioshard.offset", b"41"),
            ("aioshard.timestamp", b"1700000000.125"),
            ("aioshard.group", b"billing"),
            ("aioshard.handler", b"on_order"),
            ("aioshard.attempts", b"5"),
            ("aioshard.error", b"ValueError"),
            ("aioshard.message", b"no such customer"),
            ("aioshard.failed_at", b"1700000009.5"),
        ),
        partition=None,
        timestamp=1700000000.125,
    )


@given(records, failures, failures)
def test_a_second_dead_letter_replaces_the_headers_of_the_first(
    record: Record, first: Failure, second: Failure
) -> None:
    """Also when something else sent the first one back with all its headers."""
    returned = stored(dead_letter("dlt", record, first), offset=99)

    again = dead_letter("dlt", returned, second)

    assert read_dead_letter(stored(again)) == DeadLetterRecord(returned._replace(headers=record.headers), second)
    assert len(again.headers) == len(record.headers) + 10


def test_headers_a_proxy_appended_belong_to_the_record() -> None:
    letter = stored(dead_letter("dlt", RECORD, FAILURE))

    read = read_dead_letter(letter._replace(headers=(*letter.headers, ("x-mirrored", b"yes"))))

    assert read is not None
    assert read.original.headers == (*RECORD.headers, ("x-mirrored", b"yes"))
    assert read.failure == FAILURE


def test_a_long_message_is_truncated() -> None:
    message = dead_letter("dlt", RECORD, FAILURE._replace(message="x" * 100_000))

    read = read_dead_letter(stored(message))

    assert read is not None
    assert read.failure.message == "x" * (LONGEST_MESSAGE - 1) + "…"


def test_a_non_unicode_message_does_not_prevent_the_write() -> None:
    """Names of files that are not UTF-8 come from the operating system like this."""
    message = dead_letter("dlt", RECORD, FAILURE._replace(message="no file 'caf\udce9'"))

    read = read_dead_letter(stored(message))

    assert read is not None
    assert read.failure.message == r"no file 'caf\udce9'"


@pytest.mark.parametrize("timestamp", [2**63 / 1000, FAILURE.failed_at + 3601, 1e300])
def test_a_dead_letter_of_a_record_from_the_future_has_the_time_of_writing(timestamp: float) -> None:
    """Brokers would refuse it for its time, however often it is sent; the header has the time of the record."""
    letter = dead_letter("dlt", RECORD._replace(timestamp=timestamp), FAILURE)
    assert letter.timestamp is None
    assert dict(letter.headers)["aioshard.timestamp"] == str(timestamp).encode()


def test_header_names_that_cannot_be_written_are_escaped() -> None:
    record = RECORD._replace(headers=(("x-\ud83d", b"1"), ("trace", None)))
    for copy in (dead_letter("dlt", record, FAILURE), park("parked", record, FAILURE, generation=1, due=2.0)):
        assert copy.headers[:2] == (("x-\\xed\\xa0\\xbd", b"1"), ("trace", None))
        assert unwritable(copy) is None


def test_a_record_without_a_timestamp_gets_one() -> None:
    """A record of Kafka's first format says -1 ms, which no broker takes."""
    assert dead_letter("dlt", RECORD._replace(timestamp=-0.001), FAILURE).timestamp is None


@pytest.mark.parametrize("name", OURS[:10])
def test_a_missing_empty_or_damaged_header_is_not_a_dead_letter(name: str) -> None:
    letter = stored(dead_letter("dlt", RECORD, FAILURE))
    without = tuple(header for header in letter.headers if header[0] != name)
    null = tuple((other, None if other == name else value) for other, value in letter.headers)

    assert read_dead_letter(letter._replace(headers=without)) is None
    assert read_dead_letter(letter._replace(headers=null)) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aioshard.topic", "no topic!"),
        ("aioshard.partition", "-1"),
        ("aioshard.offset", "1_000"),
        ("aioshard.offset", " 1"),
        ("aioshard.offset", "9" * 5000),
        ("aioshard.attempts", "five"),
        ("aioshard.timestamp", "nan"),
        ("aioshard.failed_at", "yesterday"),
    ],
)
def test_a_header_without_meaning_is_not_a_dead_letter(name: str, text: str) -> None:
    letter = stored(dead_letter("dlt", RECORD, FAILURE))
    headers = tuple((other, text.encode() if other == name else value) for other, value in letter.headers)

    assert read_dead_letter(letter._replace(headers=headers)) is None


@given(records_with_headers_like_ours)
def test_reading_any_record_raises_nothing(record: Record) -> None:
    read_dead_letter(record)
    read_parked(record)


def test_a_parked_record_is_not_a_dead_letter() -> None:
    """Sending it back to its topic would run it a second time, out of order."""
    assert read_dead_letter(stored(park("parked", RECORD, FAILURE, generation=3, due=1.0))) is None


# Sending back


@given(records, failures, offsets)
def test_a_replayed_dead_letter_is_the_original_with_its_coordinates(
    record: Record, failure: Failure, offset: int
) -> None:
    letter = read_dead_letter(stored(dead_letter("dlt", record, failure), offset=offset))
    assert letter is not None

    message = replay(letter, Coordinates("dlt", 0, offset), partition=record.partition, timestamp=record.timestamp)

    own = tuple(header for header in record.headers if header[0] != REPLAYED)
    assert message == Message(
        topic=record.topic,
        value=record.value,
        key=record.key,
        headers=(*own, (REPLAYED, f"dlt/0/{offset}".encode())),
        partition=record.partition,
        timestamp=record.timestamp,
    )


# Parked records


@given(records_with_headers_like_ours, failures, moments, st.integers(0, 1000))
def test_a_parked_record_is_read_as_it_was_written(record: Record, failure: Failure, due: float, retries: int) -> None:
    """Its handler gets it back, so even headers that are named like ours stay."""
    message = park("parked", record, failure, generation=3, due=due, retries=retries)

    read = read_parked(stored(message))

    assert read == ParkedRecord(record, failure, due, retries, 3)
    assert isinstance(read, ParkedRecord)
    assert read.coordinates == Coordinates.of(record)


def test_a_parked_record_can_be_a_dead_letter_in_processing() -> None:
    """As by an app that consumes a dead-letter topic: its handler reads those headers."""
    letter = stored(dead_letter("dlt", RECORD, FAILURE))
    letter = letter._replace(headers=(*letter.headers, ("own", b"1")))

    read = read_parked(stored(park("parked", letter, FAILURE._replace(error="KeyError"), generation=3, due=1.0)))

    assert isinstance(read, ParkedRecord)
    assert read.original == letter
    assert read.failure.error == "KeyError"


@given(records, failures)
def test_a_parked_record_is_not_a_tombstone_and_keeps_its_partition(record: Record, failure: Failure) -> None:
    message = park("parked", record, failure, generation=3, due=1.0)

    assert message.value is not None
    assert message.partition == record.partition
    assert message.key == str(StorageKey(Coordinates.of(record), 3)).encode()


@given(records)
def test_a_tombstone_and_a_request_name_their_target(record: Record) -> None:
    coordinates = Coordinates.of(record)

    assert read_parked(stored(tombstone("parked", StorageKey(coordinates, 3)))) == Removed(StorageKey(coordinates, 3))
    assert read_parked(stored(release("parked", coordinates))) == ReleaseRequest(coordinates)
    assert read_parked(stored(release("parked", coordinates, answered=True))) == ReleaseRequest(
        coordinates, answered=True
    )


@given(records, failures)
def test_compaction_keeps_the_latest_state_of_records_and_requests(record: Record, failure: Failure) -> None:
    """Compaction compares only keys."""
    coordinates = Coordinates.of(record)

    assert (
        tombstone("parked", StorageKey(coordinates, 3)).key
        == park("parked", record, failure, generation=3, due=1.0).key
    )
    assert release("parked", coordinates, answered=True).key == release("parked", coordinates).key
    assert release("parked", coordinates).key != tombstone("parked", StorageKey(coordinates, 3)).key


def test_a_topic_can_be_named_like_a_request() -> None:
    coordinates = Coordinates("release", 0, 5)

    assert read_parked(stored(tombstone("parked", StorageKey(coordinates, 3)))) == Removed(StorageKey(coordinates, 3))
    assert read_parked(stored(release("parked", coordinates))) == ReleaseRequest(coordinates)


@pytest.mark.parametrize(
    "key",
    [
        None,
        b"",
        b"alice",
        b"orders/3",
        b"orders/3/41/5",
        b"orders/3/-1",
        b"orders/03/41",
        b"orders/3/\xff",
        b"a b/3/41",
    ],
)
def test_records_with_another_key_are_foreign(key: bytes | None) -> None:
    parked = stored(park("parked", RECORD, FAILURE, generation=3, due=1.0))

    assert read_parked(parked._replace(key=key)) is None


def test_records_in_another_partition_are_foreign() -> None:
    """The owner of that partition does not read them."""
    parked = stored(park("parked", RECORD, FAILURE, generation=3, due=1.0))

    assert read_parked(parked._replace(partition=4)) is None


def test_records_with_headers_that_contradict_the_key_are_foreign() -> None:
    parked = stored(park("parked", RECORD, FAILURE, generation=3, due=1.0))

    assert read_parked(parked._replace(key=b"orders/3/42")) is None


@pytest.mark.parametrize(("name", "text"), [("aioshard.due", b"soon"), ("aioshard.retries", None)])
def test_records_with_a_damaged_header_are_foreign(name: str, text: bytes | None) -> None:
    parked = stored(park("parked", RECORD, FAILURE, generation=3, due=1.0))
    headers = tuple((other, text if other == name else value) for other, value in parked.headers)

    assert read_parked(parked._replace(headers=headers)) is None


# Coordinates


@given(topics, st.integers(0, 2**31 - 1), offsets)
def test_coordinates_round_trip(topic: str, partition: int, offset: int) -> None:
    coordinates = Coordinates(topic, partition, offset)

    assert Coordinates.parse(str(coordinates)) == coordinates


@given(records_with_any_names, failures)
def test_a_header_name_that_is_not_utf_8_is_written_as_text_and_restored_when_parked(
    record: Record, failure: Failure
) -> None:
    letter = dead_letter("dead", record, failure)
    parked = park("parked", record, failure, generation=1, due=1.0)
    again = replay(DeadLetterRecord(record, failure), Coordinates("dead", 0, 1), partition=None, timestamp=None)

    assert all(name.encode() for message in (letter, parked, again) for name, _ in message.headers if name)
    assert len(letter.headers) == len(failure_headers(record, failure)) + len(record.headers)
    decoded = read_parked(stored(parked))
    assert isinstance(decoded, ParkedRecord)
    assert decoded.original == record


def test_the_bytes_of_such_a_name_are_readable_in_a_dead_letter() -> None:
    name = b"a\xff\xfe".decode("utf-8", "surrogateescape")
    record = Record("orders", 0, 41, None, b"", ((name, b"1"), ("b", None)), 0.0)

    letter = dead_letter("dead", record, Failure("g", "h", 1, "DecodeError", "", 0.0))

    assert letter.headers[:2] == (("a\\xff\\xfe", b"1"), ("b", None))


@pytest.mark.parametrize("schema_id", [7, "0f6c6f52-7f3c-4a2b-9b0e-0a4c2f1d2e3b", None], ids=["number", "GUID", "none"])
def test_a_dead_letter_names_the_schema_of_its_value(schema_id: int | str | None) -> None:
    record = Record("orders", 0, 41, b"k", b"\0\0\0\0\7", (("trace", b"1"),), 1.0)
    failure = Failure("g", "h", 1, "ValueError", "no", 2.0)
    message = dead_letter("orders.dlt", record, failure, SchemaRef(schema_id, "orders-value"))
    letter = read_dead_letter(Record("orders.dlt", 0, 0, message.key, message.value, message.headers, 3.0))

    assert letter is not None
    assert letter.original == record
    assert (letter.schema_id, letter.subject) == (None if schema_id is None else str(schema_id), "orders-value")
