"""The commit coordinator with a scripted client."""

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.core.flow import Usage
from aioshard.engine.buffer import Buffer
from aioshard.engine.committer import Committer
from aioshard.engine.epoch import Delivery
from aioshard.engine.partition import Partition
from aioshard.errors import CommitError, CommitRefusedError, MetadataRefusedError
from aioshard.ports import NOT_A_MEMBER, Committed, FetchedBatch, Membership, Message
from aioshard.records import Record, TopicPartition
from aioshard.testing import run
from tests.engine.deliveries import make_partition
from tests.engine.running import until
from tests.support.offsets import runs_of

MEMBER = Membership("member-1", 4)


class Client:
    """Takes commits; everything else of the port is not asked for."""

    def __init__(self) -> None:
        self.member = MEMBER
        self.sent: list[tuple[float, dict[int, int], Membership]] = []
        self.commits: list[Mapping[TopicPartition, Committed]] = []
        self.messages: list[list[Message]] = []
        self.answers: list[BaseException] = []
        self.takes = 0.0
        self.under_way = 0
        self.most_under_way = 0

    def membership(self) -> Membership:
        return self.member

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None = None,
    ) -> None:
        now = asyncio.get_running_loop().time()
        self.sent.append((now, {tp.partition: due.offset for tp, due in offsets.items()}, membership))
        self.commits.append(offsets)
        self.messages.append(list(messages or ()))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.takes)
        finally:
            self.under_way -= 1
        if self.answers:
            raise self.answers.pop(0)


class Desk:
    """A committer at work, and partitions whose records the test completes."""

    def __init__(
        self,
        interval: float = 1.0,
        records: int | None = None,
        aborted: Callable[[Collection[Partition], str], object] | None = None,
    ) -> None:
        self.client = Client()
        self.committer = Committer(interval, 5.0, asyncio.get_running_loop().time, records=records, aborted=aborted)
        self.buffer = Buffer(Usage(1000, 10**6), lambda: None)
        self.task = asyncio.create_task(self.committer.run(self.client), name="committer")  # type: ignore[arg-type]

    def epoch(self, partition: int = 0, records: int = 5) -> tuple[Partition, list[Delivery]]:
        epoch, _ = make_partition(partition=partition, buffer=self.buffer)
        tp = epoch.topic_partition
        epoch.acknowledged = 0
        found = [Record(*tp, offset, b"k", b"", (), 0.0) for offset in range(records)]
        deliveries = [Delivery(record, epoch, None, 1, 0.0) for record in found]
        epoch.take_in(FetchedBatch(tp, found, [1] * records, records), deliveries)
        self.committer.own(epoch)
        return epoch, deliveries

    @property
    def noted(self) -> list[list[Run]]:
        """The completions stored with each commit of the first partition."""
        return [
            list(CommitMetadata.read(due.metadata, due.offset).finished)
            for commit in self.client.commits
            for partition, due in commit.items()
            if partition.partition == 0
        ]

    @property
    def offsets(self) -> list[dict[int, int]]:
        return [offsets for _, offsets, _ in self.client.sent]

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


def with_desk(test: Any) -> Any:
    """Run an async test with a desk under virtual time."""

    def wrapped() -> None:
        async def live() -> None:
            desk = Desk()
            await asyncio.sleep(0)  # the committer's task begins
            await test(desk)
            await desk.close()

        run(live())

    wrapped.__name__ = test.__name__
    wrapped.__doc__ = test.__doc__
    return wrapped


@with_desk
async def test_only_the_completed_prefix_is_committed(desk: Desk) -> None:
    epoch, deliveries = desk.epoch()
    for delivery in (deliveries[1], deliveries[2]):
        epoch.complete(delivery)
    await asyncio.sleep(5.0)
    assert desk.offsets == [{0: 0}], "what is finished beyond it is noted, once"
    assert desk.noted[-1] == [Run(1, 3)]

    epoch.complete(deliveries[0])
    await asyncio.sleep(5.0)

    assert desk.offsets == [{0: 0}, {0: 3}]
    assert desk.noted[-1] == []
    assert epoch.acknowledged == 3


def with_early_commits(test: Any) -> Any:
    """Run an async test with a desk that commits every 100 s, or after 10 records."""

    def wrapped() -> None:
        async def live() -> None:
            desk = Desk(interval=100.0, records=10)
            await asyncio.sleep(1.0)
            await test(desk)
            await desk.close()

        run(live())

    wrapped.__name__ = test.__name__
    return wrapped


@with_early_commits
async def test_the_first_completions_of_an_epoch_are_committed_at_once(desk: Desk) -> None:
    for partition in (0, 1):
        epoch, deliveries = desk.epoch(partition)
        epoch.complete(deliveries[0])
        await asyncio.sleep(0.1)
        epoch.complete(deliveries[1])
        await asyncio.sleep(20.0)
    assert desk.offsets == [{0: 1}, {0: 2, 1: 1}], "the second record of each waits"


@with_early_commits
async def test_enough_completions_are_committed_before_the_interval_has_passed(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=30)
    for delivery in deliveries[:10]:
        epoch.complete(delivery)
    await asyncio.sleep(1.0)
    assert desk.offsets == [{0: 10}]

    for delivery in deliveries[10:19]:
        epoch.complete(delivery)
    await asyncio.sleep(1.0)
    assert desk.offsets == [{0: 10}]
    epoch.complete(deliveries[19])
    await asyncio.sleep(1.0)

    assert desk.offsets == [{0: 10}, {0: 20}]


@with_early_commits
async def test_completions_beyond_a_stuck_record_are_enough_too(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=30)
    for delivery in deliveries[1:20]:
        epoch.complete(delivery)
    await asyncio.sleep(1.0)
    assert (desk.offsets, desk.noted) == ([{0: 0}], [[Run(1, 20)]])


@with_early_commits
async def test_early_commits_keep_a_minimum_pause(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=1000)
    for delivery in deliveries:
        epoch.complete(delivery)
        await asyncio.sleep(0.001)
    await asyncio.sleep(1.0)

    times = [time for time, _, _ in desk.client.sent]
    assert desk.offsets[-1][0] > 990, "the last ones wait"
    assert len(times) > 20
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.03


@with_early_commits
async def test_slow_metadata_is_not_built_for_early_commits(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=30)
    epoch.finished_ahead = runs_of(random.Random(1).sample(range(40, 20_000), 5_000))
    epoch.complete(deliveries[0])
    await asyncio.sleep(1.0)
    assert len(desk.offsets) == 1
    for delivery in deliveries[1:]:
        epoch.complete(delivery)
    await asyncio.sleep(90.0)
    assert len(desk.offsets) == 1
    await asyncio.sleep(20.0)

    assert desk.offsets[1:] == [{0: 30}]


@with_early_commits
async def test_a_refused_commit_is_retried_after_the_interval(desk: Desk) -> None:
    desk.client.answers = [CommitError("not now")]
    epoch, deliveries = desk.epoch(records=30)
    for delivery in deliveries:
        epoch.complete(delivery)
    await asyncio.sleep(90.0)
    assert len(desk.client.sent) == 1
    await asyncio.sleep(20.0)

    assert epoch.acknowledged == 30


@with_desk
async def test_completions_within_an_interval_share_one_commit(desk: Desk) -> None:
    epoch, deliveries = desk.epoch()
    for delivery in deliveries:
        epoch.complete(delivery)
        await asyncio.sleep(0.15)
    await asyncio.sleep(3.0)

    times = [time for time, _, _ in desk.client.sent]
    assert desk.offsets[-1] == {0: 5}
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(times))


def test_an_interval_shorter_than_the_retry_pause_is_kept() -> None:
    async def test() -> None:
        desk = Desk(interval=0.02)
        await asyncio.sleep(0)
        epoch, deliveries = desk.epoch(records=20)
        for delivery in deliveries:
            epoch.complete(delivery)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        await desk.close()

        times = [time for time, _, _ in desk.client.sent]
        assert desk.offsets[-1] == {0: 20}
        assert all(later - earlier == pytest.approx(0.02) for earlier, later in itertools.pairwise(times))

    run(test())


@with_desk
async def test_one_commit_request_is_in_flight_at_a_time(desk: Desk) -> None:
    desk.client.takes = 2.5
    epoch, deliveries = desk.epoch()
    other, others = desk.epoch(partition=1)
    for delivery in (*deliveries, *others):
        delivery.epoch.complete(delivery)
        await asyncio.sleep(0.4)
    assert await desk.committer.flush([epoch, other], 20.0)

    assert desk.client.most_under_way == 1
    assert (epoch.acknowledged, other.acknowledged) == (5, 5)


@with_desk
async def test_nothing_is_committed_without_a_membership(desk: Desk) -> None:
    desk.client.member = NOT_A_MEMBER
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    assert not await desk.committer.flush([epoch], 5.0)
    assert desk.client.sent == []

    desk.client.member = MEMBER
    assert await desk.committer.flush([epoch], 5.0)
    assert desk.offsets == [{0: 1}]


@with_desk
async def test_an_unacknowledged_commit_is_recomputed(desk: Desk) -> None:
    """The first request failed; meanwhile more has completed, and the second says so (I9)."""
    desk.client.answers = [CommitError("no time")]
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    await asyncio.sleep(0.5)
    assert (desk.committer.failure_durations.counts().count, epoch.acknowledged) == (1, 0)
    assert desk.committer.trouble.why == "no time"

    desk.client.member = Membership("member-1", 5)
    epoch.complete(deliveries[1])
    await asyncio.sleep(2.0)

    assert [(offsets, membership.generation) for _, offsets, membership in desk.client.sent] == [
        ({0: 1}, 4),
        ({0: 2}, 5),
    ]
    assert desk.committer.trouble.why is None


@with_desk
async def test_a_commit_that_times_out_stays_due(desk: Desk) -> None:
    desk.client.takes = 60.0
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    await asyncio.sleep(5.5)

    assert desk.committer.failure_durations.counts().count == 1
    assert "commit_timeout" in str(desk.committer.trouble.why)
    assert epoch.acknowledged == 0
    desk.client.takes = 0.0
    await asyncio.sleep(2.0)
    assert epoch.acknowledged == 1


@with_desk
async def test_a_commit_cancelled_by_the_client_stays_due(desk: Desk) -> None:
    desk.client.answers = [asyncio.CancelledError()]
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])

    await until(lambda: desk.committer.durations.counts().count == 1)

    assert epoch.acknowledged == 1
    assert desk.committer.failure_durations.counts().count == 1
    assert not desk.task.done()


@with_desk
async def test_a_disowned_partition_is_not_committed(desk: Desk) -> None:
    epoch, deliveries = desk.epoch()
    desk.committer.disown(epoch)
    epoch.complete(deliveries[0])
    await asyncio.sleep(5.0)

    assert desk.offsets == []
    assert await desk.committer.flush([epoch], 1.0), "nothing of it is due"


@with_desk
async def test_an_ended_epoch_accepts_no_completion(desk: Desk) -> None:
    """The partition may have come back in another epoch: a dead result changes nothing (I5)."""
    epoch, deliveries = desk.epoch()
    epoch.end()
    held = (desk.buffer.records, desk.buffer.bytes)

    assert not epoch.complete(deliveries[0])

    assert (desk.buffer.records, desk.buffer.bytes) == held == (0, 0)


@with_desk
async def test_nothing_is_committed_while_not_a_member(desk: Desk) -> None:
    desk.client.member = NOT_A_MEMBER
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    await asyncio.sleep(5.0)
    assert desk.offsets == []

    desk.client.member = MEMBER
    await asyncio.sleep(2.0)
    assert desk.offsets == [{0: 1}]


@with_desk
async def test_a_refusal_does_not_stop_later_commits(desk: Desk) -> None:
    """The broker said once that the group had moved on, and it had not."""
    desk.client.answers = [CommitRefusedError("the group has moved on")]
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    await asyncio.sleep(5.0)

    assert epoch.acknowledged == 1


@with_desk
async def test_a_flush_does_not_wait_for_the_interval(desk: Desk) -> None:
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    await asyncio.sleep(0.01)
    epoch.complete(deliveries[1])
    began = asyncio.get_running_loop().time()

    assert await desk.committer.flush([epoch], 5.0)

    assert asyncio.get_running_loop().time() - began < 0.2
    assert epoch.acknowledged == 2


@with_desk
async def test_a_flush_gives_up_at_its_deadline(desk: Desk) -> None:
    desk.client.answers = [CommitError("no time")] * 1000
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    began = asyncio.get_running_loop().time()

    assert not await desk.committer.flush([epoch], 3.0)

    assert asyncio.get_running_loop().time() - began == pytest.approx(3.0, abs=0.2)


@with_desk
async def test_a_position_that_moves_over_a_hole_is_committed(desk: Desk) -> None:
    """A transaction marker at the end: lag reaches 0 (I10)."""
    epoch, _ = desk.epoch(records=0)
    epoch.take_in(FetchedBatch(epoch.topic_partition, [], [], 7), [])
    await asyncio.sleep(2.0)

    assert epoch.acknowledged == 7


@with_desk
async def test_a_quiet_partition_commits_its_next_record(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=1)
    epoch.complete(deliveries[0])
    await asyncio.sleep(60.0)
    tp = epoch.topic_partition
    record = Record(*tp, 1, b"k", b"", (), 0.0)
    delivery = Delivery(record, epoch, None, 1, 0.0)
    epoch.take_in(FetchedBatch(tp, [record], [1], 2), [delivery])
    await asyncio.sleep(60.0)
    epoch.complete(delivery)
    await asyncio.sleep(2.0)

    assert epoch.acknowledged == 2


@with_desk
async def test_a_waiting_flush_learns_that_the_client_is_gone(desk: Desk) -> None:
    desk.client.takes = 60.0
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    flushing = asyncio.create_task(desk.committer.flush([epoch], 30.0), name="flush")
    await asyncio.sleep(0.5)
    began = asyncio.get_running_loop().time()
    await desk.close()

    assert not await flushing
    assert asyncio.get_running_loop().time() - began < 1.0


@with_desk
async def test_a_position_that_moves_over_a_hole_later_is_committed(desk: Desk) -> None:
    """Nothing is incomplete then whose completion could tell."""
    epoch, _ = desk.epoch(records=0)
    await asyncio.sleep(60.0)
    epoch.take_in(FetchedBatch(epoch.topic_partition, [], [], 7), [])
    await asyncio.sleep(2.0)

    assert epoch.acknowledged == 7


@with_desk
async def test_an_evicted_record_missing_on_refetch_is_a_hole(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=3)
    epoch.evict(deliveries)
    await asyncio.sleep(60.0)
    assert epoch.readmit(FetchedBatch(epoch.topic_partition, [], [], 3), 60.0) == []
    await asyncio.sleep(2.0)

    assert epoch.acknowledged == 3


@with_desk
async def test_a_hole_at_the_end_is_committed_at_once(desk: Desk) -> None:
    epoch, _ = desk.epoch(records=0)
    await asyncio.sleep(60.25)
    epoch.take_in(FetchedBatch(epoch.topic_partition, [], [], 7), [])
    await asyncio.sleep(0.1)

    assert epoch.acknowledged == 7


@with_desk
async def test_a_hole_left_by_evicted_records_is_committed_at_once(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=3)
    epoch.evict(deliveries)
    await asyncio.sleep(60.25)
    epoch.readmit(FetchedBatch(epoch.topic_partition, [], [], 3), 60.25)
    await asyncio.sleep(0.1)

    assert epoch.acknowledged == 3


@with_desk
async def test_a_partition_disowned_in_flight_is_not_resent_with_shorter_metadata(desk: Desk) -> None:
    desk.client.takes = 0.5
    desk.client.answers = [MetadataRefusedError("too long")]
    epochs = []
    for partition in range(2):
        epoch, deliveries = desk.epoch(partition)
        epoch.complete(deliveries[0])
        epoch.complete(deliveries[2])
        epochs.append(epoch)
    await until(lambda: desk.client.under_way == 1)
    assert desk.offsets == [{0: 1, 1: 1}]

    desk.committer.disown(epochs[0])
    await asyncio.sleep(5.0)

    assert desk.offsets[1:] == [{1: 1}]


@with_desk
async def test_due_commits_are_checked_periodically_while_not_a_member(desk: Desk) -> None:
    """And not in every turn of the loop."""
    looks = 0

    def membership() -> Membership:
        nonlocal looks
        looks += 1
        return NOT_A_MEMBER

    desk.client.membership = membership  # type: ignore[method-assign]
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    await asyncio.sleep(10.0)

    assert 10 <= looks <= 110


@with_desk
async def test_commits_keep_the_interval_after_a_failed_flush(desk: Desk) -> None:
    desk.client.answers = [CommitError("no time")] * 1000
    epoch, deliveries = desk.epoch()
    epoch.complete(deliveries[0])
    assert not await desk.committer.flush([epoch], 1.0)
    before = len(desk.client.sent)
    await asyncio.sleep(10.0)

    assert 9 <= len(desk.client.sent) - before <= 11


# Completions beyond the committed offset --------------------------------------------------


@with_desk
async def test_completions_beyond_the_oldest_record_are_stored_once_per_interval(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=9)
    for delivery in deliveries[2:]:
        epoch.complete(delivery)
        await asyncio.sleep(0.4)
    await asyncio.sleep(3.0)

    times = [time for time, _, _ in desk.client.sent]
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(times))
    assert desk.noted[-1] == [Run(2, 9)]
    sent = len(times)

    await asyncio.sleep(10.0)

    assert len(desk.client.sent) == sent, "what was noted is not noted again"


@with_desk
async def test_completions_beyond_a_record_that_arrived_later_are_stored(desk: Desk) -> None:
    epoch, _ = desk.epoch(records=0)
    await asyncio.sleep(2.5)
    found = [Record("orders", 0, offset, b"k", b"", (), 0.0) for offset in range(5)]
    deliveries = [Delivery(record, epoch, None, 1, 0.0) for record in found]
    epoch.take_in(FetchedBatch(epoch.topic_partition, found, [1] * 5, 5), deliveries)
    epoch.complete(deliveries[1])

    await asyncio.sleep(2.5)

    assert desk.noted == [[Run(1, 2)]]


@with_desk
async def test_completions_during_a_commit_are_stored_with_the_next(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=9)
    desk.client.takes = 0.5
    epoch.complete(deliveries[2])
    await until(lambda: desk.client.under_way == 1)
    epoch.complete(deliveries[4])
    await asyncio.sleep(5.0)

    assert desk.noted == [[Run(2, 3)], [Run(2, 3), Run(4, 5)]]


@pytest.mark.slow
@with_desk
async def test_partitions_lost_in_between_are_not_sent_with_the_second_part(desk: Desk) -> None:
    desk.client.takes = 0.5
    epochs = []
    for partition in range(70):
        epoch, deliveries = desk.epoch(partition, records=1)
        epoch.finished_ahead = scattered(20_000)
        epoch.complete(deliveries[0])
        epochs.append(epoch)
    await until(lambda: desk.client.under_way == 1)
    sent = set(desk.offsets[0])
    for epoch in epochs:
        if epoch.topic_partition.partition not in sent:
            desk.committer.disown(epoch)
    await asyncio.sleep(5.0)

    assert len(sent) < 70
    assert {partition for commit in desk.offsets for partition in commit} == sent


@with_desk
async def test_completions_of_an_earlier_owner_stay_stored(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=5)
    epoch.finished_ahead = (Run(5, 7), Run(20, 90))
    epoch.complete(deliveries[1])
    await asyncio.sleep(3.0)
    assert desk.noted[-1] == [Run(1, 2), Run(5, 7), Run(20, 90)]

    for delivery in (deliveries[0], *deliveries[2:]):
        epoch.complete(delivery)
    await asyncio.sleep(3.0)

    assert desk.offsets[-1] == {0: 5}
    assert desk.noted[-1] == [Run(5, 7), Run(20, 90)]


@with_desk
async def test_rejected_metadata_never_holds_back_the_offset(desk: Desk) -> None:
    epoch, deliveries = desk.epoch(records=9)
    desk.client.answers = [MetadataRefusedError("too long") for _ in range(20)]
    for delivery in (deliveries[0], deliveries[5]):
        epoch.complete(delivery)
    await asyncio.sleep(0.5)

    with_text, without = (due.metadata for commit in desk.client.commits for due in commit.values())
    assert with_text
    assert not without
    assert epoch.acknowledged == 0, "the broker had another reason, it seems"
    desk.client.answers.clear()

    await asyncio.sleep(3.0)

    assert epoch.acknowledged == 1
    assert desk.committer.metadata_limit == 0


@with_desk
async def test_metadata_shrinks_until_the_broker_accepts_it(desk: Desk) -> None:
    chosen = random.Random(7).sample(range(1, 60_000), 30_000)
    epoch, deliveries = desk.epoch(records=60_000)
    for place in chosen:
        epoch.complete(deliveries[place])
    desk.client.answers = [MetadataRefusedError("too long")]
    await asyncio.sleep(3.0)

    lengths = [len(due.metadata) for commit in desk.client.commits for due in commit.values()]
    assert MOST_UNITS // 2 < lengths[0] <= MOST_UNITS
    assert 0 < lengths[1] <= MOST_UNITS // 2
    assert epoch.committed_completions == len(chosen)
    assert desk.committer.failure_durations.counts().count == 0


@functools.cache
@functools.cache
def scattered(count: int) -> tuple[Run, ...]:
    """Finished offsets without a pattern, whose text is as long as that of so many can be."""
    return runs_of(random.Random(count).sample(range(2, 60_000), count))


@pytest.mark.slow
@with_desk
async def test_oversized_commit_requests_are_split(desk: Desk) -> None:
    """96 partitions, each with as much as its text holds: 1.1 MiB, and brokers take less than 1 MiB."""
    desk.buffer.bounds = Usage(10**9, 10**9)
    epochs = []
    for partition in range(96):
        epoch, deliveries = desk.epoch(partition, records=1)
        epoch.finished_ahead = scattered(20_000)
        epoch.complete(deliveries[0])
        epochs.append(epoch)
    await asyncio.sleep(5.0)

    sizes = [sum(len(due.metadata.encode()) for due in commit.values()) for commit in desk.client.commits]
    assert sum(sizes) > 1 << 20
    assert max(sizes) <= 768 * 1024
    assert {partition for commit in desk.offsets for partition in commit} == set(range(96))
    assert all(epoch.acknowledged == 1 for epoch in epochs)
    assert desk.client.most_under_way == 1


# Transactions -----------------------------------------------------------------------------


class ExactlyOnceDesk(Desk):
    """Commits in transactions. A partition in one that fails begins again, and all its records complete at once."""

    def __init__(self, interval: float) -> None:
        super().__init__(interval, aborted=self.begin_again)
        self.failed: list[tuple[set[int], str]] = []
        self.current: dict[int, Partition] = {}

    def begin_again(self, partitions: Collection[Partition], why: str) -> None:
        self.failed.append(({partition.topic_partition.partition for partition in partitions}, why))
        for partition in partitions:
            self.committer.disown(partition)
            partition.end()
            self.begin(partition.topic_partition.partition)

    def begin(self, partition: int, *, text: int = 0) -> Partition:
        """Own a partition whose only record has completed and published; *text* makes its metadata long."""
        epoch, (delivery,) = self.epoch(partition, records=1)
        if text:
            epoch.finished_ahead = scattered(text)
        epoch.complete(delivery)
        epoch.send_later([Message("out", b"%d" % partition)])
        self.current[partition] = epoch
        return epoch

    @property
    def published(self) -> list[list[bytes | None]]:
        return [[message.value for message in messages] for messages in self.client.messages]

    @property
    def times(self) -> list[float]:
        return [time for time, _, _ in self.client.sent]


def in_transactions(test: Callable[[ExactlyOnceDesk], Any], interval: float) -> None:
    """Run a test with transactions under virtual time."""

    async def live() -> None:
        desk = ExactlyOnceDesk(interval)
        await asyncio.sleep(0)
        await test(desk)
        await desk.close()

    run(live())


def test_messages_without_new_offsets_start_a_transaction() -> None:
    """A parked record that runs again publishes, and its offset was committed long ago."""

    async def test(desk: ExactlyOnceDesk) -> None:
        epoch = desk.begin(0)
        assert await desk.committer.flush([epoch], 5.0)
        await asyncio.sleep(5.0)
        epoch.send_later([Message("out", b"replayed")])
        assert await desk.committer.flush([epoch], 5.0)
        assert (desk.offsets, desk.published) == ([{0: 1}, {0: 1}], [[b"0"], [b"replayed"]])
        epoch.send_later([Message("out", b"again")])
        await asyncio.sleep(1.5)
        assert desk.published[2:] == [[b"again"]]

    in_transactions(test, 1.0)


def test_messages_hold_their_bytes_until_their_transaction_ends() -> None:
    async def test(desk: ExactlyOnceDesk) -> None:
        desk.client.takes = 1.0
        epoch = desk.begin(0)
        held = desk.buffer.bytes
        flushed = asyncio.create_task(desk.committer.flush([epoch], 5.0))
        await asyncio.sleep(0.5)
        epoch.send_later([Message("out", b"x")])
        assert desk.buffer.bytes == 2 * held
        await asyncio.sleep(0.6)
        assert desk.buffer.bytes == held
        assert await flushed
        assert (desk.published, desk.buffer.bytes) == ([[b"0"], [b"x"]], 0)

    in_transactions(test, 100.0)


def test_repeated_transaction_failures_back_off() -> None:
    async def test(desk: ExactlyOnceDesk) -> None:
        desk.client.answers = [CommitError("no")] * 8
        desk.begin(0)
        await asyncio.sleep(60.0)
        gaps = [later - earlier for earlier, later in itertools.pairwise(desk.times)]
        assert gaps == pytest.approx([0.3, 0.5, 0.9, 1.7, 3.3, 5.1, 5.1, 5.1])
        assert desk.failed == [({0}, "its transaction failed: no")] * 8
        assert desk.current[0].acknowledged == 1
        desk.client.answers = [CommitError("no")]
        desk.begin(1)
        await asyncio.sleep(60.0)
        assert desk.times[-1] - desk.times[-2] == pytest.approx(0.3), "a success resets the count"

    in_transactions(test, 0.1)


def test_a_flush_skips_the_backoff_after_failed_transactions() -> None:
    """The group waits for it."""

    async def test(desk: ExactlyOnceDesk) -> None:
        desk.client.answers = [CommitError("no")] * 7
        desk.begin(0)
        await until(lambda: len(desk.failed) == 7)
        began = asyncio.get_running_loop().time()
        assert await desk.committer.flush([desk.current[0]], 5.0)
        assert asyncio.get_running_loop().time() - began < 0.2

    in_transactions(test, 0.1)


def test_a_full_output_buffer_does_not_shorten_the_backoff() -> None:
    """They fill it all the time while transactions fail: that must not make more of them."""

    async def test(desk: ExactlyOnceDesk) -> None:
        desk.begin(0)
        await asyncio.sleep(10.0)
        desk.begin(1)
        await asyncio.sleep(1.0)
        desk.committer.hurry()
        await asyncio.sleep(0.1)
        assert desk.times == pytest.approx([0.0, 11.0], abs=0.05), "without a failure, it does not wait"
        desk.client.answers = [CommitError("no")] * 4
        desk.begin(2)
        desk.committer.hurry()
        await asyncio.sleep(0.1)
        for _ in range(2_000):
            desk.committer.hurry()
            await asyncio.sleep(0.1)
        gaps = [later - earlier for earlier, later in itertools.pairwise(desk.times[2:])]
        assert gaps == pytest.approx([30.2, 30.4, 30.8, 31.6])

    in_transactions(test, 30.0)


def test_a_transaction_with_refused_metadata_is_retried_with_a_shorter_one() -> None:
    async def test(desk: ExactlyOnceDesk) -> None:
        desk.client.answers = [MetadataRefusedError("too long")]
        desk.buffer.bounds = Usage(10**9, 10**9)
        desk.begin(0, text=6_000)
        await until(lambda: desk.failed)
        (partition,) = desk.current.values()
        partition.finished_ahead = runs_of(random.Random(0).sample(range(2, 60_000), 6_000))
        await until(lambda: partition.acknowledged == 1)
        first, second = (len(due.metadata) for commit in desk.client.commits for due in commit.values())
        assert 0 < second <= first // 2
        assert desk.committer.metadata_limit == first // 2
        assert desk.committer.failure_durations.counts().count == 1

    in_transactions(test, 1.0)


def test_partitions_that_do_not_fit_move_to_the_next_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioshard.engine.committer._MOST_BYTES", 1_000)

    async def test(desk: ExactlyOnceDesk) -> None:
        for number in range(20):
            desk.begin(number)
        assert await desk.committer.flush(list(desk.current.values()), 30.0)
        assert 2 < len(desk.offsets) < 6
        for offsets, messages in zip(desk.offsets, desk.published, strict=True):
            assert messages == [b"%d" % partition for partition in offsets]
            assert len(offsets) * (len("orders") + 100) <= 1_000
        assert sorted(partition for offsets in desk.offsets for partition in offsets) == list(range(20))
        assert desk.buffer.bytes == 0

    in_transactions(test, 1.0)


def test_a_partition_too_large_for_a_request_is_sent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshard.engine.committer._MOST_BYTES", 10)

    async def test(desk: ExactlyOnceDesk) -> None:
        for number in range(3):
            desk.begin(number)
        assert await desk.committer.flush(list(desk.current.values()), 30.0)
        assert (desk.offsets, desk.published) == ([{0: 1}, {1: 1}, {2: 1}], [[b"0"], [b"1"], [b"2"]])

    in_transactions(test, 1.0)


def test_only_partitions_of_a_failed_transaction_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshard.engine.committer._MOST_BYTES", 10)

    async def test(desk: ExactlyOnceDesk) -> None:
        first, second = desk.begin(0), desk.begin(1)
        desk.client.answers = [CommitError("the coordinator has moved")]
        assert await desk.committer.flush([second], 30.0)
        assert desk.failed == [({0}, "its transaction failed: the coordinator has moved")]
        assert first is not desk.current[0]
        assert second is desk.current[1]
        statistics = desk.committer.transactions()
        assert statistics is not None
        assert (statistics.fenced, statistics.open_seconds) == (0, None)

    in_transactions(test, 1.0)


def test_a_refused_transaction_is_resent_in_order_and_keeps_its_bytes() -> None:
    """Messages of the same key would otherwise change places."""

    async def test(desk: ExactlyOnceDesk) -> None:
        desk.client.takes, desk.client.answers = 1.0, [CommitRefusedError("the group has moved on")]
        epoch = desk.begin(0)
        held = desk.buffer.bytes
        await asyncio.sleep(0.5)
        epoch.send_later([Message("out", b"x")])
        await asyncio.sleep(0.6)
        assert (desk.buffer.bytes, desk.failed) == (2 * held, [])
        statistics = desk.committer.transactions()
        assert statistics is not None
        assert (statistics.fenced, statistics.messages) == (1, 0)
        assert await desk.committer.flush([epoch], 5.0)
        assert (desk.published, desk.buffer.bytes) == ([[b"0"], [b"0", b"x"]], 0)

    in_transactions(test, 100.0)


def test_a_transaction_that_times_out_has_failed() -> None:
    async def test(desk: ExactlyOnceDesk) -> None:
        desk.client.takes = 60.0
        desk.begin(0)
        await asyncio.sleep(2.0)
        statistics = desk.committer.transactions()
        assert statistics is not None
        assert statistics.open_seconds == pytest.approx(2.0, abs=0.2)
        await asyncio.sleep(3.5)
        ((partitions, why),) = desk.failed
        assert partitions == {0}
        assert "commit_timeout" in why

    in_transactions(test, 0.1)
