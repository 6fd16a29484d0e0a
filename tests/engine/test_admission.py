"""How much of a partition is taken in, where chance rarely comes."""

from collections.abc import Callable

from aioshard.core.flow import Usage, minimum
from aioshard.engine.admission import Admission
from aioshard.engine.buffer import Buffer
from aioshard.engine.epoch import Epoch
from aioshard.engine.notes import Notes
from aioshard.engine.outcomes import Block
from aioshard.ports import NOTHING, Oversized
from tests.engine.deliveries import make_buffer, make_epoch

HALTED = Block(halted=True, error="ValueError", since=0.0)


class Partition:
    """A partition whose handler has enough to do for ever, or wants everything."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.wanted = 1_000_000
        self.told_no_room = False

    def when_wanted(self, wake: Callable[[], None]) -> int:  # noqa: ARG002
        return 1

    def no_room(self) -> None:
        self.told_no_room = True


def admission_of(*epochs: Epoch, buffer: Buffer) -> Admission:
    return Admission(buffer, {one.topic_partition: Partition(one) for one in epochs}, lambda: 0.0, 60.0, Notes())


def test_nothing_is_taken_in_of_a_partition_whose_gate_is_closed() -> None:
    buffer = make_buffer()
    epoch, _ = make_epoch([], buffer=buffer)
    admission = admission_of(epoch, buffer=buffer)
    assert admission.allowance(epoch.topic_partition).records
    epoch.close()
    assert admission.allowance(epoch.topic_partition) == NOTHING


def test_what_was_given_back_is_fetched_as_far_as_the_minimum_goes_while_the_partition_cannot_advance() -> None:
    buffer = make_buffer()
    epoch, deliveries = make_epoch(["a"] * 5, buffer=buffer)
    admission = admission_of(epoch, buffer=buffer)
    epoch.give_back(deliveries[3:])
    assert admission.allowance(epoch.topic_partition) == NOTHING, "the client has not been sent back"
    epoch.fetching_again = True
    assert admission.allowance(epoch.topic_partition).records
    deliveries[0].block = HALTED
    assert admission.allowance(epoch.topic_partition).records == minimum(buffer.bounds).records - 3


def test_a_record_larger_than_the_buffer_does_not_wait_for_what_cannot_advance() -> None:
    """It would wait for ever."""
    buffer = make_buffer(size=1_000)
    stuck, deliveries = make_epoch(["a"], buffer=buffer)
    epoch, _ = make_epoch([], partition=1, buffer=buffer)
    admission = admission_of(stuck, epoch, buffer=buffer)
    admission.keep_room_for(Oversized(epoch.topic_partition, 5_000), epoch)
    assert admission.allowance(epoch.topic_partition) == NOTHING, "what is held may soon be complete"
    deliveries[0].block = HALTED
    assert admission.allowance(epoch.topic_partition).alone


def test_one_record_may_be_held_where_the_bound_is_one() -> None:
    buffer = make_buffer(records=1)
    epoch, _ = make_epoch([], buffer=buffer)
    assert admission_of(epoch, buffer=buffer).allowance(epoch.topic_partition).records == 1


def test_who_waits_for_room_is_woken_when_records_complete_and_when_an_epoch_ends() -> None:
    woken: list[int] = []
    buffer = Buffer(Usage(100, 10_000), lambda: woken.append(buffer.records))
    first, deliveries = make_epoch([None] * 20, buffer=buffer)
    buffer.arm()
    for delivery in deliveries[:3]:
        first.complete(delivery)
    assert woken == [18], "a tenth of what was held is complete"
    first.end()
    assert woken == [18, 0]
