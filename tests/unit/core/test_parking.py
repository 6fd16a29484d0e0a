"""The parked keys of a partition, one situation each; `tests/unit/properties/` has random ones."""

from aioshard.core.parking import ParkedEntry, ParkedKeys


def entry(offset: int, due: float) -> ParkedEntry:
    return ParkedEntry(offset, b"k", generation=1, stored_at=offset, due=due, retries=0)


def test_a_key_that_is_being_retried_is_not_due_when_an_earlier_record_is_added() -> None:
    parked = ParkedKeys()
    parked.add(entry(9, due=10.0))
    assert parked.take_due(now=10.0) is not None

    assert parked.add(entry(7, due=20.0))

    assert parked.take_due(now=100.0) is None
    parked.remove(9)
    assert parked.heads(1)[0].offset == 7
