"""Filters select dead letters by each of their fields, and by all that are given together."""

import pytest

from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.filters import EVERYTHING, Filters, HeaderFilter
from aioshard.serde.side_records import Coordinates
from tests.support.dead_letters import FAILED_AT, failure, record

RECORD = record(41, key=b"alice", value=b'{"city": "\xc3\x85lesund"}', headers=(("tenant", b"acme"), ("empty", None)))
FAILURE = failure(5)


@pytest.mark.parametrize(
    "filters",
    [
        EVERYTHING,
        Filters(handler="on_order", group="billing", error="ValueError", source="orders"),
        Filters(key="alice"),
        Filters(records=(Coordinates("orders", 0, 41), Coordinates("orders", 0, 42))),
        Filters(headers=(HeaderFilter("tenant"),)),
        Filters(headers=(HeaderFilter("tenant", "acme"), HeaderFilter("empty"))),
        Filters(text="lice"),
        Filters(text="Ålesund"),
        Filters(text="such customer"),
        Filters(since=FAILED_AT + 5, until=FAILED_AT + 5.001),
    ],
)
def test_a_record_that_matches_every_filter_is_taken(filters: Filters) -> None:
    assert filters.match(RECORD, FAILURE)


@pytest.mark.parametrize(
    "filters",
    [
        Filters(handler="on_refund"),
        Filters(group="accounts"),
        Filters(error="TimeoutError"),
        Filters(source="refunds"),
        Filters(key="bob"),
        Filters(records=(Coordinates("orders", 0, 42),)),
        Filters(headers=(HeaderFilter("tenant", "initech"),)),
        Filters(headers=(HeaderFilter("tenant", "acme"), HeaderFilter("trace"))),
        Filters(headers=(HeaderFilter("empty", ""),)),
        Filters(text="oslo"),
        Filters(since=FAILED_AT + 5.001),
        Filters(until=FAILED_AT + 5),
        Filters(error="ValueError", key="bob"),
    ],
)
def test_a_record_that_misses_one_filter_is_left_out(filters: Filters) -> None:
    assert not filters.match(RECORD, FAILURE)


def test_binary_keys_and_headers_match_as_they_are_printed() -> None:
    binary = record(1, key=b"\xff\x00", headers=(("id", b"\xfe"),))

    assert Filters(key="0xff00", headers=(HeaderFilter("id", "0xfe"),)).match(binary, FAILURE)


def test_a_header_filter_has_a_value_after_the_first_equals_sign() -> None:
    assert HeaderFilter.parse("a=b=c") == HeaderFilter("a", "b=c")
    assert HeaderFilter.parse("a=") == HeaderFilter("a", "")
    assert HeaderFilter.parse("a") == HeaderFilter("a", None)


@pytest.mark.parametrize("done", [False, True])
def test_dead_letters_are_selected_by_whether_they_are_done(done: bool) -> None:
    letter = StoredDeadLetter(Coordinates("orders.dlt", 0, 7), RECORD, FAILURE, done)

    assert letter.matches(EVERYTHING)
    assert letter.matches(Filters(done=done, at=frozenset({Coordinates("orders.dlt", 0, 7)})))
    assert not letter.matches(Filters(done=not done))
