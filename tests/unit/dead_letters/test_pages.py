"""Pages show each dead letter once, the newest first, and read no more than they need."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.dead_letters import pages
from aioshard.dead_letters.filters import EVERYTHING, Filters
from aioshard.dead_letters.pages import Cursor, Page, cursor_as_text, read_cursor, read_page
from aioshard.dead_letters.progress import ReplayProgress
from aioshard.dead_letters.reading import DeadLetterTopic, Survey
from aioshard.ports import Committed
from aioshard.records import Record
from aioshard.serde.side_records import Failure
from tests.support.dead_letters import FAILED_AT, dead_letters_in_memory, failure, record

At = tuple[int, int]


async def all_pages(topic: DeadLetterTopic, filters: Filters = EVERYTHING, size: int = 7) -> list[list[At]]:
    """The positions on each page, from the newest to the oldest."""
    found = []
    cursor: Cursor | None = None
    while True:
        page = await read_page(topic, filters, cursor=cursor, size=size)
        found.append([(letter.at.partition, letter.at.offset) for letter in page.dead_letters])
        if page.cursor is None:
            return found
        cursor = read_cursor(cursor_as_text(page.cursor))


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.booleans()), max_size=40), max_size=4),
    st.integers(1, 9),
    st.integers(1, 8),
)
def test_each_match_is_on_one_page_and_the_newest_come_first(
    partitions: list[list[tuple[int, int, bool]]], size: int, span: int
) -> None:
    """With gaps between the offsets, and times of failure in any order."""
    made: dict[int, list[tuple[int, Record, Failure]]] = {}
    expected: dict[int, list[At]] = {}
    for number, letters in enumerate(partitions):
        offset = 0
        made[number] = []
        for gap, failed_at, matches in letters:
            offset += gap + 1
            error = "ValueError" if matches else "TimeoutError"
            made[number].append((offset, record(offset, partition=number), failure(failed_at, error=error)))
            if matches:
                expected.setdefault(number, []).insert(0, (number, offset))
    topic, _ = dead_letters_in_memory("orders.dlt", made)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pages, "_LEAST_SPAN", span)
        shown = asyncio.run(all_pages(topic, Filters(error="ValueError"), size))

    ordered = [at for page in shown for at in page]
    assert {number: [at for at in ordered if at[0] == number] for number in expected} == expected
    assert len(ordered) == sum(map(len, expected.values()))
    assert all(len(page) == size for page in shown[:-1])


def test_partitions_are_merged_by_the_time_of_the_failure() -> None:
    times = {0: [1, 4, 9], 1: [2, 3, 8]}
    topic, _ = dead_letters_in_memory(
        "orders.dlt",
        {
            number: [(offset, record(offset), failure(second)) for offset, second in enumerate(seconds)]
            for number, seconds in times.items()
        },
    )

    (first, second) = asyncio.run(all_pages(topic, size=4))

    assert first + second == [(0, 2), (1, 2), (0, 1), (1, 1), (1, 0), (0, 0)]


def many(count: int, value: bytes = b"v") -> dict[int, list[tuple[int, Record, Failure]]]:
    return {0: [(offset, record(offset, value=value), failure(offset)) for offset in range(count)]}


def test_a_page_reads_only_the_end_of_the_topic() -> None:
    topic, reader = dead_letters_in_memory("orders.dlt", many(20_000))

    page = asyncio.run(read_page(topic, size=50))

    assert [letter.at.offset for letter in page.dead_letters] == list(range(19_999, 19_949, -1))
    assert reader.returned <= 200


def test_a_page_keeps_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead letters that were read and dropped are on a later page."""
    monkeypatch.setattr(pages, "_MOST_BYTES", 50_000)
    topic, _ = dead_letters_in_memory("orders.dlt", many(300, b"x" * 10_000))
    most = 0
    read_back = pages._read_back

    async def measured(*arguments: Any) -> None:
        nonlocal most
        await read_back(*arguments)
        most = max(most, *(len(part.dead_letters) for part in arguments[2].values()))

    monkeypatch.setattr(pages, "_read_back", measured)
    shown = asyncio.run(all_pages(topic, size=20))

    assert [offset for page in shown for _, offset in page] == list(range(299, -1, -1))
    assert most <= 5


async def one_page(topic: DeadLetterTopic, filters: Filters) -> Page:
    return await read_page(topic, filters, size=5)


def test_a_page_ends_early_if_few_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of a page does not wait for a whole topic; the next page continues there."""
    monkeypatch.setattr(pages, "_MOST_READ", 500)
    topic, reader = dead_letters_in_memory("orders.dlt", many(5000))

    page = asyncio.run(one_page(topic, Filters(key="nobody")))

    assert page.dead_letters == []
    assert page.cursor is not None
    assert 0 < page.cursor[0] < 5000
    assert reader.returned < 2000
    assert asyncio.run(all_pages(topic, Filters(text="17"), size=5))[-1] is not None


def test_a_page_says_which_are_done() -> None:
    topic, _ = dead_letters_in_memory("orders.dlt", many(10))
    topic.progress[0] = ReplayProgress(Committed(4, ""))

    page = asyncio.run(read_page(topic, size=10))

    assert [letter.at.offset for letter in page.dead_letters if letter.done] == [3, 2, 1, 0]


@pytest.mark.parametrize("text", ["", "0", "0:", "0:x", "0:1,", "-1:4", "0:1;1:2"])
def test_a_text_that_is_not_a_cursor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a cursor"):
        read_cursor(text)


def test_a_survey_counts_all_and_keeps_the_newest() -> None:
    topic, _ = dead_letters_in_memory("orders.dlt", many(1000))

    async def survey() -> Survey:
        await topic.survey()
        return await topic.survey(Filters(until=FAILED_AT + 19), newest=3)

    found = asyncio.run(survey())

    assert found.dead_letters == 1000
    assert found.selected == 19
    assert [letter.at.offset for letter in found.newest] == [16, 17, 18]
