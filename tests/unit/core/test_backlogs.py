"""When unequal backlogs are worth a rebalance."""

import pytest

from aioshard.core.assignment import Member, pays
from aioshard.records import TopicPartition

TOPIC = frozenset({"t"})


@pytest.mark.parametrize(
    ("backlogs", "worth"),
    [
        ((9_000, 8_000), True),
        ((900, 800), False),  # nearly half of the time, but only 800 records
        ((9_000, 2_000), False),  # 2,000 records, but not a third of the time
    ],
)
def test_a_rebalance_pays_if_it_saves_many_records_and_much_of_the_time(backlogs: tuple[int, int], worth: bool) -> None:
    had = {TopicPartition("t", number): backlog for number, backlog in enumerate(backlogs)}
    members = {"a": Member(TOPIC, tuple(had), 1, had), "b": Member(TOPIC)}

    assert pays(members, {"t": range(2)}) is worth
