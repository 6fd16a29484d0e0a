"""Transforms return values, records or messages; anything that cannot be sent is refused."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from aioshard import Message, message
from aioshard.dead_letters.audit import positions_as_text
from aioshard.dead_letters.edits import ANY_PARTITION, transformed, with_value
from aioshard.errors import MessageError
from aioshard.records import Record
from tests.support.dead_letters import record

ORIGINAL = record(41, partition=3)


class Order(BaseModel):
    total: int


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (b"raw", b"raw"),
        ("text", b"text"),
        ({"total": 7}, b'{"total":7}'),
        (Order(total=7), b'{"total":7}'),
        ([1], b"[1]"),
    ],
)
def test_a_returned_value_replaces_the_value_only(result: object, value: bytes) -> None:
    assert asyncio.run(transformed(ORIGINAL, lambda _: result)) == ORIGINAL._replace(value=value)


def test_none_leaves_a_dead_letter_alone() -> None:
    assert asyncio.run(transformed(ORIGINAL, lambda _: None)) is None


def test_a_returned_record_replaces_key_value_and_headers_but_not_the_position() -> None:
    def fix(original: Record) -> Record:
        return original._replace(key=b"bob", value=None, headers=(), offset=7, partition=9)

    assert asyncio.run(transformed(ORIGINAL, fix)) == ORIGINAL._replace(key=b"bob", value=None, headers=())


@pytest.mark.parametrize(
    ("result", "topic", "partition"),
    [
        (message("orders", b"v", key="bob"), "orders", 3),
        (message("refunds", b"v", key="bob"), "refunds", ANY_PARTITION),
        (message("refunds", b"v", key="bob", partition=2), "refunds", 2),
    ],
)
def test_a_returned_message_chooses_topic_and_partition(result: Message, topic: str, partition: int) -> None:
    found = asyncio.run(transformed(ORIGINAL, lambda _: result))

    assert found == ORIGINAL._replace(topic=topic, partition=partition, key=b"bob", value=b"v", headers=())


def test_a_transform_may_be_a_coroutine_function() -> None:
    async def fix(original: Record) -> bytes:
        await asyncio.sleep(0)
        return (original.value or b"") + b"!"

    assert asyncio.run(transformed(ORIGINAL, fix)) == ORIGINAL._replace(value=b"41!")


NOT_BYTES: Any = "text"


@pytest.mark.parametrize("result", [ORIGINAL._replace(value=NOT_BYTES), Message("no topic!", b""), object()])
def test_a_result_that_cannot_be_sent_is_refused(result: object) -> None:
    with pytest.raises(MessageError):
        asyncio.run(transformed(ORIGINAL, lambda _: result))


def test_a_value_is_a_transform() -> None:
    assert asyncio.run(transformed(ORIGINAL, with_value(b"\xff"))) == ORIGINAL._replace(value=b"\xff")


def test_positions_in_the_audit_log_are_complete_and_short() -> None:
    assert positions_as_text([]) == ""
    assert positions_as_text([(1, 7), (0, 1), (0, 2), (0, 3), (0, 9), (1, 8), (0, 2)]) == "0/1-3,0/9,1/7-8"
