"""A dead-letter topic in a real broker is read page by page, and one dead letter by its position."""

import pytest

from aioshard import Settings
from aioshard.dead_letters.filters import Filters
from aioshard.dead_letters.pages import Cursor, read_page
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.errors import UnknownPartitionError
from aioshard.serde.side_records import dead_letter
from tests.support.brokers import SharedKafka
from tests.support.dead_letters import failure, record, write


async def test_pages_show_every_dead_letter_once_and_newest_first(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, 3, {"retention.ms": "-1"})
    await write(
        kafka.bootstrap,
        [dead_letter(topic, record(n), failure(n))._replace(partition=n % 3) for n in range(1000)],
    )
    shown: list[int] = []
    cursor: Cursor | None = None

    while True:
        async with DeadLetterTopic.opened(Settings(bootstrap_servers=kafka.bootstrap), topic) as dead_letters:
            page = await read_page(dead_letters, cursor=cursor, size=130)
        shown += [letter.original.offset for letter in page.dead_letters]
        cursor = page.cursor
        if cursor is None:
            break

    assert shown == list(range(999, -1, -1))


async def test_a_page_of_an_empty_topic_is_empty(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, 2)

    async with DeadLetterTopic.opened(Settings(bootstrap_servers=kafka.bootstrap), topic) as dead_letters:
        assert await read_page(dead_letters) == ([], None)


async def test_one_dead_letter_is_read_by_its_position(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, 2, {"retention.ms": "-1"})
    letters = [dead_letter(topic, record(n), failure(n))._replace(partition=1) for n in range(50)]
    await write(kafka.bootstrap, letters)

    async with DeadLetterTopic.opened(Settings(bootstrap_servers=kafka.bootstrap), topic) as dead_letters:
        found = await dead_letters.dead_letter(1, 17)
        missing = await dead_letters.dead_letter(1, 50)
        matching = [letter.at.offset async for letter in dead_letters.dead_letters(Filters(text="4"), {1: 40}, {1: 45})]

    assert found is not None
    assert (found.at, found.original) == ((topic, 1, 17), record(17))
    assert missing is None
    assert matching == [40, 41, 42, 43, 44]


async def test_an_unknown_partition_is_named(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, 2)

    with pytest.raises(UnknownPartitionError, match="has no partition 2: it has 0 to 1"):
        async with DeadLetterTopic.opened(Settings(bootstrap_servers=kafka.bootstrap), topic, [2]):
            pass
