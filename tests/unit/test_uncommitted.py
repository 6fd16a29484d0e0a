"""The finished records of a partition that are not committed, as a stop reports them."""

from aioshard.engine.commits import Uncommitted
from aioshard.engine.epoch import Outputs
from aioshard.engine.partition import Partition
from aioshard.ports import Committed, Message
from tests.engine.deliveries import make_partition


def make_after(before: Uncommitted, completed: int) -> Partition:
    """A partition in its second epoch, in which some records have completed and are committed."""
    partition, deliveries = make_partition([b"k"] * 4)
    partition.commits.before = before
    partition.commits.acknowledged = before.acknowledged
    for delivery in deliveries[:completed]:
        partition.complete(delivery)
    partition.commits.acknowledge(partition.commits.due(0))
    return partition


def test_records_whose_messages_are_not_published_count() -> None:
    """No transaction could cover them, so that nothing is due."""
    partition, (delivery, _) = make_partition([b"k"] * 2)
    delivery.outgoing = [Message("out", b"value")]
    partition.complete(delivery)
    partition.send_later(Outputs.of(delivery))

    partition.commits.count_uncommitted(is_due=False)

    assert partition.commits.uncommitted == 1


def test_records_that_have_run_again_beyond_a_gap_do_not_count() -> None:
    partition = make_after(Uncommitted(3, 0, 4, "the client was lost"), 0)
    _, *rest = tuple(partition.tracker.values())
    for delivery in rest:
        partition.complete(delivery)
    partition.commits.acknowledge(partition.commits.due(4_096))

    partition.commits.count_uncommitted(is_due=False)

    assert partition.commits.acknowledged == Committed(0, "").offset
    assert partition.commits.uncommitted == 0


def test_records_that_have_not_run_again_count() -> None:
    partition = make_after(Uncommitted(4, 0, 4, "the client was lost"), 1)

    partition.commits.count_uncommitted(is_due=False)

    assert partition.commits.uncommitted == 3
