"""Responses about a group's offsets: an error never means "nothing is committed"."""

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors as kafka

from aioshard.kafka.aiokafka.answers import IncompleteAnswerError, stored_offsets
from aioshard.ports import Committed
from aioshard.records import TopicPartition

ORDERS = TopicPartition("orders", 0)
OTHERS = TopicPartition("orders", 1)


def _answer(*partitions: tuple[int, int, str | None, int], code: int = 0) -> Any:
    return SimpleNamespace(topics=[("orders", list(partitions))] if partitions else [], error_code=code)


def test_offsets_are_read_with_metadata_and_minus_one_is_none() -> None:
    answer = _answer((0, 7, "note", 0), (1, -1, None, 0))

    assert stored_offsets(answer, [ORDERS, OTHERS]) == {ORDERS: Committed(7, "note")}


def test_the_nul_of_a_c_string_is_not_part_of_the_metadata() -> None:
    """librdkafka commits one."""
    assert stored_offsets(_answer((0, 7, "note\0", 0)), [ORDERS]) == {ORDERS: Committed(7, "note")}


@pytest.mark.parametrize("code", [14, 15, 16, 30], ids=["loading", "unavailable", "moved", "denied"])
def test_an_error_of_the_whole_response_is_raised(code: int) -> None:
    """A broker that does not coordinate the group names no partition; that once counted as "nothing is committed"."""
    with pytest.raises(kafka.for_code(code)):
        stored_offsets(_answer(code=code), [ORDERS])


def test_an_error_of_one_partition_is_raised() -> None:
    with pytest.raises(kafka.UnknownTopicOrPartitionError):
        stored_offsets(_answer((0, 7, "", 0), (1, -1, "", 3)), [ORDERS, OTHERS])


def test_a_missing_partition_raises_a_retriable_error() -> None:
    with pytest.raises(IncompleteAnswerError) as raised:
        stored_offsets(_answer((0, 7, "", 0)), [ORDERS, OTHERS])

    assert raised.value.retriable


def test_a_request_for_all_offsets_has_no_missing_partition() -> None:
    assert stored_offsets(_answer(), ()) == {}
