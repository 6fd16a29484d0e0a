"""Which waiting deliveries a newer one of their key replaces."""

from aioshard.engine.epoch import Delivery
from aioshard.engine.freshness import Latest
from tests.engine.deliveries import make_epoch


def is_superseded(latest: Latest, delivery: Delivery) -> bool:
    latest.divert(delivery)
    return delivery.recovery is not None


def test_all_but_the_newest_of_a_key_are_superseded() -> None:
    latest = Latest()
    _, deliveries = make_epoch(["a", "b", "a", "a", None, None])
    latest.add(deliveries)
    assert [is_superseded(latest, delivery) for delivery in deliveries] == [True, False, True, False, False, False]


def test_a_key_takes_no_memory_once_its_newest_record_has_started() -> None:
    latest = Latest()
    epoch, deliveries = make_epoch(["a", "b"])
    latest.add(deliveries)
    for delivery in deliveries:
        latest.divert(delivery)
    assert latest._newest == {epoch: {}}
    latest.forget(epoch)
    assert latest._newest == {}


def test_a_newer_record_that_was_evicted_replaces_none() -> None:
    """Retention may have removed it when it is fetched again."""
    latest = Latest()
    epoch, deliveries = make_epoch(["a", "a"])
    latest.add(deliveries)
    older, newer = deliveries
    epoch.evict([newer])
    assert not is_superseded(latest, older)


def test_a_record_that_arrives_again_does_not_count_as_newer() -> None:
    latest = Latest()
    _, deliveries = make_epoch(["a", "a"])
    older, newer = deliveries
    latest.add([older, newer])
    latest.add([older])
    assert not is_superseded(latest, newer)


def test_a_record_of_another_partition_replaces_none() -> None:
    latest = Latest()
    queued = [delivery for partition in range(2) for delivery in make_epoch(["a"], partition=partition)[1]]
    for delivery in queued:
        latest.add([delivery])
    assert not any(is_superseded(latest, delivery) for delivery in queued)
