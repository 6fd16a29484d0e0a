"""The commit coordinator with a scripted client."""

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from aioshard.core.commit_metadata import MOST_UNITS, CommitMetadata
from aioshard.core.finished_offsets import Run
from aioshard.core.flow import Usage
from aioshard.engine import committer as committing
from aioshard.engine.commits import FailedTransactions
from aioshard.engine.committer import CommitFailure, Committer
from aioshard.engine.epoch import Delivery
from aioshard.engine.late_commits import LONGEST_DELAY
from aioshard.engine.partition import Partition
from aioshard.errors import (
    AuthorizationError,
    CommitError,
    CommitRefusedError,
    MessageRefusedError,
    MessagesRefusedError,
    MetadataRefusedError,
    TopicsRefusedError,
    TransportError,
)
from aioshard.ports import NOT_A_MEMBER, Committed, FetchedBatch, Membership, Message, TransactionCounts
from aioshard.records import Record, TopicPartition
from aioshard.testing import run
from tests.engine.deliveries import crowd, make_buffer, make_partition, unsent
from tests.engine.live_apps import until
from tests.support.offsets import runs_of

MEMBER = Membership("member-1", 4)


class Client:
    """Takes commits; everything else of the port is not asked for."""

    hang = None

    def __init__(self) -> None:
        self.transaction_counts = TransactionCounts()
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


class Harness:
    """A committer at work, and partitions whose records the test completes."""

    transactional = False

    def __init__(self, interval: float = 1.0, records: int | None = None) -> None:
        self.client = Client()
        self.buffer = make_buffer()
        self.committer = Committer(
            self.buffer,
            asyncio.get_running_loop().time,
            interval=interval,
            timeout=5.0,
            records=records,
            transactional=self.transactional,
        )
        self.failures: list[CommitFailure] = []
        self.task = asyncio.create_task(self.commit(), name="committer")

    async def commit(self) -> None:
        """Commit until cancelled, as the engine does."""
        try:
            while True:
                failure = await self.committer.run(self.client)  # type: ignore[arg-type]
                self.failures.append(failure)
                self.act_on(failure)
        finally:
            self.committer.stop()

    def act_on(self, failure: CommitFailure) -> None:
        """Do what follows from a failed commit: nothing, without transactions."""

    def partition(
        self, number: int = 0, records: int = 5, failed: FailedTransactions | None = None
    ) -> tuple[Partition, list[Delivery]]:
        partition, _ = make_partition(partition=number, buffer=self.buffer)
        partition.commits.failed_transactions = failed
        tp = partition.topic_partition
        partition.commits.acknowledged = 0
        found = [Record(*tp, offset, b"k", b"", (), 0.0) for offset in range(records)]
        deliveries = [Delivery(record, partition, None, 1, 0.0) for record in found]
        partition.take_in(FetchedBatch(tp, found, [1] * records, records), deliveries)
        self.committer.own(partition)
        return partition, deliveries

    @property
    def stored_completions(self) -> list[list[Run]]:
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


def with_committer(test: Any) -> Any:
    """Run an async test with a committer under virtual time."""

    def wrapped() -> None:
        async def live() -> None:
            harness = Harness()
            await asyncio.sleep(0)  # the committer's task begins
            await test(harness)
            await harness.close()

        run(live())

    wrapped.__name__ = test.__name__
    wrapped.__doc__ = test.__doc__
    return wrapped


@with_committer
async def test_only_the_completed_prefix_is_committed(harness: Harness) -> None:
    partition, deliveries = harness.partition()
    for delivery in (deliveries[1], deliveries[2]):
        partition.complete(delivery)
    await asyncio.sleep(5.0)
    assert harness.offsets == [{0: 0}], "the completions beyond it are stored, once"
    assert harness.stored_completions[-1] == [Run(1, 3)]

    partition.complete(deliveries[0])
    await asyncio.sleep(5.0)

    assert harness.offsets == [{0: 0}, {0: 3}]
    assert harness.stored_completions[-1] == []
    assert partition.commits.acknowledged == 3


def with_early_commits(test: Any) -> Any:
    """Run an async test with a committer that commits every 100 s, or after 10 records."""

    def wrapped() -> None:
        async def live() -> None:
            harness = Harness(interval=100.0, records=10)
            await asyncio.sleep(1.0)
            await test(harness)
            await harness.close()

        run(live())

    wrapped.__name__ = test.__name__
    return wrapped


@with_early_commits
async def test_the_first_completions_of_an_epoch_are_committed_at_once(harness: Harness) -> None:
    for number in (0, 1):
        partition, deliveries = harness.partition(number)
        partition.complete(deliveries[0])
        await asyncio.sleep(0.1)
        partition.complete(deliveries[1])
        await asyncio.sleep(20.0)
    assert harness.offsets == [{0: 1}, {0: 2, 1: 1}], "the second record of each waits"


@with_early_commits
async def test_enough_completions_are_committed_before_the_interval_has_passed(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=30)
    for delivery in deliveries[:10]:
        partition.complete(delivery)
    await asyncio.sleep(1.0)
    assert harness.offsets == [{0: 10}]

    for delivery in deliveries[10:19]:
        partition.complete(delivery)
    await asyncio.sleep(1.0)
    assert harness.offsets == [{0: 10}]
    partition.complete(deliveries[19])
    await asyncio.sleep(1.0)

    assert harness.offsets == [{0: 10}, {0: 20}]


@with_early_commits
async def test_completions_beyond_a_stuck_record_are_enough_too(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=30)
    for delivery in deliveries[1:20]:
        partition.complete(delivery)
    await asyncio.sleep(1.0)
    assert (harness.offsets, harness.stored_completions) == ([{0: 0}], [[Run(1, 20)]])


@with_early_commits
async def test_early_commits_keep_a_minimum_pause(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=1000)
    for delivery in deliveries:
        partition.complete(delivery)
        await asyncio.sleep(0.001)
    await asyncio.sleep(1.0)

    times = [time for time, _, _ in harness.client.sent]
    assert harness.offsets[-1][0] > 990, "the last ones wait"
    assert len(times) > 20
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.03


@with_early_commits
async def test_slow_metadata_is_not_built_for_early_commits(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=30)
    partition.finished_ahead = runs_of(random.Random(1).sample(range(40, 20_000), 5_000))
    partition.complete(deliveries[0])
    await asyncio.sleep(1.0)
    assert len(harness.offsets) == 1
    for delivery in deliveries[1:]:
        partition.complete(delivery)
    await asyncio.sleep(90.0)
    assert len(harness.offsets) == 1
    await asyncio.sleep(20.0)

    assert harness.offsets[1:] == [{0: 30}]


@with_early_commits
async def test_a_refused_commit_is_retried_after_the_interval(harness: Harness) -> None:
    harness.client.answers = [CommitError("not now")]
    partition, deliveries = harness.partition(records=30)
    for delivery in deliveries:
        partition.complete(delivery)
    await asyncio.sleep(90.0)
    assert len(harness.client.sent) == 1
    await asyncio.sleep(20.0)

    assert partition.commits.acknowledged == 30


@with_committer
async def test_completions_within_an_interval_share_one_commit(harness: Harness) -> None:
    partition, deliveries = harness.partition()
    for delivery in deliveries:
        partition.complete(delivery)
        await asyncio.sleep(0.15)
    await asyncio.sleep(3.0)

    times = [time for time, _, _ in harness.client.sent]
    assert harness.offsets[-1] == {0: 5}
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(times))


def test_an_interval_shorter_than_the_retry_pause_is_kept() -> None:
    async def test() -> None:
        harness = Harness(interval=0.02)
        await asyncio.sleep(0)
        partition, deliveries = harness.partition(records=20)
        for delivery in deliveries:
            partition.complete(delivery)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        await harness.close()

        times = [time for time, _, _ in harness.client.sent]
        assert harness.offsets[-1] == {0: 20}
        assert all(later - earlier == pytest.approx(0.02) for earlier, later in itertools.pairwise(times))

    run(test())


@with_committer
async def test_one_commit_request_is_in_flight_at_a_time(harness: Harness) -> None:
    harness.client.takes = 2.5
    partition, deliveries = harness.partition()
    other, others = harness.partition(1)
    for delivery in (*deliveries, *others):
        delivery.epoch.complete(delivery)
        await asyncio.sleep(0.4)
    assert await harness.committer.flush([partition, other], 20.0)

    assert harness.client.most_under_way == 1
    assert (partition.commits.acknowledged, other.commits.acknowledged) == (5, 5)


@with_committer
async def test_nothing_is_committed_without_a_membership(harness: Harness) -> None:
    harness.client.member = NOT_A_MEMBER
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    assert not await harness.committer.flush([partition], 5.0)
    assert harness.client.sent == []

    harness.client.member = MEMBER
    assert await harness.committer.flush([partition], 5.0)
    assert harness.offsets == [{0: 1}]


@with_committer
async def test_an_unacknowledged_commit_is_recomputed(harness: Harness) -> None:
    """The first request failed; meanwhile more has completed, and the second says so (I9)."""
    harness.client.answers = [CommitError("no time")]
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    await asyncio.sleep(0.5)
    assert (harness.committer.failure_durations.counts().count, partition.commits.acknowledged) == (1, 0)
    assert harness.committer.trouble.why == "no time"

    harness.client.member = Membership("member-1", 5)
    partition.complete(deliveries[1])
    await asyncio.sleep(2.0)

    assert [(offsets, membership.generation) for _, offsets, membership in harness.client.sent] == [
        ({0: 1}, 4),
        ({0: 2}, 5),
    ]
    assert harness.committer.trouble.why is None


@with_committer
async def test_a_commit_that_times_out_stays_due(harness: Harness) -> None:
    harness.client.takes = 60.0
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    await asyncio.sleep(5.5)

    assert harness.committer.failure_durations.counts().count == 1
    assert "commit_timeout" in str(harness.committer.trouble.why)
    assert partition.commits.acknowledged == 0
    harness.client.takes = 0.0
    await asyncio.sleep(2.0)
    assert partition.commits.acknowledged == 1


@with_committer
async def test_a_commit_cancelled_by_the_client_stays_due(harness: Harness) -> None:
    harness.client.answers = [asyncio.CancelledError()]
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])

    await until(lambda: harness.committer.durations.counts().count == 1)

    assert partition.commits.acknowledged == 1
    assert harness.committer.failure_durations.counts().count == 1
    assert not harness.task.done()


@with_committer
async def test_a_commit_cancelled_by_the_client_may_still_arrive(harness: Harness) -> None:
    """The offset is committed once more, when nothing can put it back."""
    harness.client.answers = [asyncio.CancelledError()]
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    await until(lambda: harness.committer.durations.counts().count == 1)
    sent = len(harness.offsets)

    await asyncio.sleep(LONGEST_DELAY + 2.0)

    assert harness.offsets[sent:] == [{0: 1}]


@with_committer
async def test_a_disowned_partition_is_not_committed(harness: Harness) -> None:
    partition, deliveries = harness.partition()
    harness.committer.disown(partition)
    partition.complete(deliveries[0])
    await asyncio.sleep(5.0)

    assert harness.offsets == []
    assert await harness.committer.flush([partition], 1.0), "nothing of it is due"


@with_committer
async def test_an_ended_epoch_accepts_no_completion(harness: Harness) -> None:
    """The partition may have come back in another epoch: a dead result changes nothing (I5)."""
    partition, deliveries = harness.partition()
    partition.end()
    held = (harness.buffer.records, harness.buffer.bytes)

    assert not partition.complete(deliveries[0])

    assert (harness.buffer.records, harness.buffer.bytes) == held == (0, 0)


@with_committer
async def test_nothing_is_committed_while_not_a_member(harness: Harness) -> None:
    harness.client.member = NOT_A_MEMBER
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    await asyncio.sleep(5.0)
    assert harness.offsets == []

    harness.client.member = MEMBER
    await asyncio.sleep(2.0)
    assert harness.offsets == [{0: 1}]


@with_committer
async def test_a_refusal_does_not_stop_later_commits(harness: Harness) -> None:
    """The broker said once that the group had moved on, and it had not."""
    harness.client.answers = [CommitRefusedError("the group has moved on")]
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    await asyncio.sleep(5.0)

    assert partition.commits.acknowledged == 1


@with_committer
async def test_a_flush_does_not_wait_for_the_interval(harness: Harness) -> None:
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    await asyncio.sleep(0.01)
    partition.complete(deliveries[1])
    began = asyncio.get_running_loop().time()

    assert await harness.committer.flush([partition], 5.0)

    assert asyncio.get_running_loop().time() - began < 0.2
    assert partition.commits.acknowledged == 2


@with_committer
async def test_a_flush_gives_up_at_its_deadline(harness: Harness) -> None:
    harness.client.answers = [CommitError("no time")] * 1000
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    began = asyncio.get_running_loop().time()

    assert not await harness.committer.flush([partition], 3.0)

    assert asyncio.get_running_loop().time() - began == pytest.approx(3.0, abs=0.2)


# Topics that the brokers refuse -----------------------------------------------------------


def refusing(number: int, reason: TransportError) -> TopicsRefusedError:
    return TopicsRefusedError({TopicPartition("orders", number): reason})


UNKNOWN = CommitError("the brokers do not know the topic")
DENIED = AuthorizationError("the brokers do not allow the topic")


@pytest.mark.parametrize("reason", [UNKNOWN, DENIED], ids=["unknown", "denied"])
def test_a_refused_topic_does_not_hold_back_the_others(reason: TransportError) -> None:
    @with_committer
    async def test(harness: Harness) -> None:
        harness.client.answers = [refusing(0, reason), refusing(0, reason)]
        one, ones = harness.partition(0)
        two, twos = harness.partition(1)
        one.complete(ones[0])
        two.complete(twos[0])
        await asyncio.sleep(0.5)
        assert (one.commits.acknowledged, two.commits.acknowledged) == (0, 1)
        assert str(reason) in str(harness.committer.trouble.why)
        two.complete(twos[1])
        assert await harness.committer.flush([two], 0.5)
        assert two.commits.acknowledged == 2

        await asyncio.sleep(2.0)
        assert one.commits.acknowledged == 1
        assert harness.committer.trouble.why is None

    test()


@with_committer
async def test_a_flush_does_not_wait_for_a_refused_topic(harness: Harness) -> None:
    harness.client.answers = [refusing(0, UNKNOWN)] * 1000
    one, ones = harness.partition(0)
    two, twos = harness.partition(1)
    one.complete(ones[0])
    two.complete(twos[0])
    began = asyncio.get_running_loop().time()

    assert not await harness.committer.flush([one, two], 5.0)

    assert asyncio.get_running_loop().time() - began < 1.0
    assert two.commits.acknowledged == 1


@with_committer
async def test_a_topic_that_stays_unknown_is_given_up(harness: Harness) -> None:
    harness.client.answers = [refusing(0, UNKNOWN)] * 1000
    one, ones = harness.partition(0)
    one.complete(ones[0])
    await asyncio.sleep(40.0)
    given_up_after = len(harness.client.sent)
    assert given_up_after > 20, "the brokers may only be behind"
    assert harness.committer.trouble.why is None
    await asyncio.sleep(100.0)
    assert len(harness.client.sent) == given_up_after

    harness.client.answers.clear()
    one.complete(ones[1])
    await asyncio.sleep(2.0)
    assert one.commits.acknowledged == 2, "more has completed: it exists"


@with_committer
async def test_a_topic_that_stays_denied_is_not_given_up(harness: Harness) -> None:
    harness.client.answers = [refusing(0, DENIED)] * 100
    one, ones = harness.partition(0)
    one.complete(ones[0])
    await asyncio.sleep(200.0)
    assert one.commits.acknowledged == 1


@with_committer
async def test_a_late_commit_of_a_topic_that_was_refused_meanwhile_is_put_right(harness: Harness) -> None:
    harness.client.answers = [CommitError("the connection was lost"), refusing(0, DENIED)]
    one, ones = harness.partition(0)
    one.complete(ones[0])
    await asyncio.sleep(4.0)
    assert one.commits.acknowledged == 1
    sent = len(harness.client.sent)
    await asyncio.sleep(100.0)
    assert len(harness.client.sent) == sent + 1


@with_committer
async def test_a_late_commit_of_a_deleted_topic_is_not_waited_for(harness: Harness) -> None:
    harness.client.answers = [CommitError("the connection was lost")]
    one, ones = harness.partition(0)
    one.complete(ones[0])
    await asyncio.sleep(4.0)
    harness.client.answers = [refusing(0, UNKNOWN)] * 1000
    await asyncio.sleep(80.0)
    sent = len(harness.client.sent)
    await asyncio.sleep(100.0)
    assert len(harness.client.sent) == sent
    assert await harness.committer.flush([one], 1.0)


@with_committer
async def test_a_refused_topic_does_not_hold_back_later_requests(harness: Harness) -> None:
    """Each commit needs two requests."""
    harness.client.answers = [refusing(0, UNKNOWN)]
    partitions = [harness.partition(number, records=1) for number in range(2)]
    for partition, deliveries in partitions:
        partition.complete(deliveries[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(committing, "_MOST_BYTES", 1)
        await asyncio.sleep(0.5)
    assert harness.offsets == [{0: 1}, {1: 1}]
    assert partitions[1][0].commits.acknowledged == 1


@with_committer
async def test_a_position_that_moves_over_a_hole_is_committed(harness: Harness) -> None:
    """A transaction marker at the end: lag reaches 0 (I10)."""
    partition, _ = harness.partition(records=0)
    partition.take_in(FetchedBatch(partition.topic_partition, [], [], 7), [])
    await asyncio.sleep(2.0)

    assert partition.commits.acknowledged == 7


@with_committer
async def test_a_quiet_partition_commits_its_next_record(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=1)
    partition.complete(deliveries[0])
    await asyncio.sleep(60.0)
    tp = partition.topic_partition
    record = Record(*tp, 1, b"k", b"", (), 0.0)
    delivery = Delivery(record, partition, None, 1, 0.0)
    partition.take_in(FetchedBatch(tp, [record], [1], 2), [delivery])
    await asyncio.sleep(60.0)
    partition.complete(delivery)
    await asyncio.sleep(2.0)

    assert partition.commits.acknowledged == 2


@with_committer
async def test_a_waiting_flush_learns_that_the_client_is_gone(harness: Harness) -> None:
    harness.client.takes = 60.0
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    flushing = asyncio.create_task(harness.committer.flush([partition], 30.0), name="flush")
    await asyncio.sleep(0.5)
    began = asyncio.get_running_loop().time()
    await harness.close()

    assert not await flushing
    assert asyncio.get_running_loop().time() - began < 1.0


@with_committer
async def test_a_position_that_moves_over_a_hole_later_is_committed(harness: Harness) -> None:
    """Nothing is incomplete then whose completion could tell."""
    partition, _ = harness.partition(records=0)
    await asyncio.sleep(60.0)
    partition.take_in(FetchedBatch(partition.topic_partition, [], [], 7), [])
    await asyncio.sleep(2.0)

    assert partition.commits.acknowledged == 7


@with_committer
async def test_an_evicted_record_missing_on_refetch_is_a_hole(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=3)
    partition.evict(deliveries)
    await asyncio.sleep(60.0)
    assert partition.readmit(FetchedBatch(partition.topic_partition, [], [], 3), 60.0) == []
    await asyncio.sleep(2.0)

    assert partition.commits.acknowledged == 3


@with_committer
async def test_a_hole_at_the_end_is_committed_at_once(harness: Harness) -> None:
    partition, _ = harness.partition(records=0)
    await asyncio.sleep(60.25)
    partition.take_in(FetchedBatch(partition.topic_partition, [], [], 7), [])
    await asyncio.sleep(0.1)

    assert partition.commits.acknowledged == 7


@with_committer
async def test_a_hole_left_by_evicted_records_is_committed_at_once(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=3)
    partition.evict(deliveries)
    await asyncio.sleep(60.25)
    partition.readmit(FetchedBatch(partition.topic_partition, [], [], 3), 60.25)
    await asyncio.sleep(0.1)

    assert partition.commits.acknowledged == 3


@with_committer
async def test_a_partition_disowned_in_flight_is_not_resent_with_shorter_metadata(harness: Harness) -> None:
    harness.client.takes = 0.5
    harness.client.answers = [MetadataRefusedError("too long")]
    partitions = []
    for number in range(2):
        partition, deliveries = harness.partition(number)
        partition.complete(deliveries[0])
        partition.complete(deliveries[2])
        partitions.append(partition)
    await until(lambda: harness.client.under_way == 1)
    assert harness.offsets == [{0: 1, 1: 1}]

    harness.committer.disown(partitions[0])
    await asyncio.sleep(5.0)

    assert harness.offsets[1:] == [{1: 1}]


@with_committer
async def test_due_commits_are_checked_periodically_while_not_a_member(harness: Harness) -> None:
    """And not in every turn of the loop."""
    looks = 0

    def membership() -> Membership:
        nonlocal looks
        looks += 1
        return NOT_A_MEMBER

    harness.client.membership = membership  # type: ignore[method-assign]
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    await asyncio.sleep(10.0)

    assert 10 <= looks <= 110


@with_committer
async def test_commits_keep_the_interval_after_a_failed_flush(harness: Harness) -> None:
    harness.client.answers = [CommitError("no time")] * 1000
    partition, deliveries = harness.partition()
    partition.complete(deliveries[0])
    assert not await harness.committer.flush([partition], 1.0)
    before = len(harness.client.sent)
    await asyncio.sleep(10.0)

    assert 9 <= len(harness.client.sent) - before <= 11


# Completions beyond the committed offset --------------------------------------------------


@with_committer
async def test_completions_beyond_the_oldest_record_are_stored_once_per_interval(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=9)
    for delivery in deliveries[2:]:
        partition.complete(delivery)
        await asyncio.sleep(0.4)
    await asyncio.sleep(3.0)

    times = [time for time, _, _ in harness.client.sent]
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(times))
    assert harness.stored_completions[-1] == [Run(2, 9)]
    sent = len(times)

    await asyncio.sleep(10.0)

    assert len(harness.client.sent) == sent, "stored completions are not sent again"


@with_committer
async def test_completions_beyond_a_record_that_arrived_later_are_stored(harness: Harness) -> None:
    partition, _ = harness.partition(records=0)
    await asyncio.sleep(2.5)
    found = [Record("orders", 0, offset, b"k", b"", (), 0.0) for offset in range(5)]
    deliveries = [Delivery(record, partition, None, 1, 0.0) for record in found]
    partition.take_in(FetchedBatch(partition.topic_partition, found, [1] * 5, 5), deliveries)
    partition.complete(deliveries[1])

    await asyncio.sleep(2.5)

    assert harness.stored_completions == [[Run(1, 2)]]


@with_committer
async def test_completions_during_a_commit_are_stored_with_the_next(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=9)
    harness.client.takes = 0.5
    partition.complete(deliveries[2])
    await until(lambda: harness.client.under_way == 1)
    partition.complete(deliveries[4])
    await asyncio.sleep(5.0)

    assert harness.stored_completions == [[Run(2, 3)], [Run(2, 3), Run(4, 5)]]


@pytest.mark.slow
@with_committer
async def test_partitions_lost_in_between_are_not_sent_with_the_second_part(harness: Harness) -> None:
    harness.client.takes = 0.5
    partitions = []
    for number in range(70):
        partition, deliveries = harness.partition(number, records=1)
        partition.finished_ahead = scattered(20_000)
        partition.complete(deliveries[0])
        partitions.append(partition)
    await until(lambda: harness.client.under_way == 1)
    sent = set(harness.offsets[0])
    for partition in partitions:
        if partition.topic_partition.partition not in sent:
            harness.committer.disown(partition)
    await asyncio.sleep(5.0)

    assert len(sent) < 70
    assert {number for commit in harness.offsets for number in commit} == sent


@with_committer
async def test_completions_of_an_earlier_owner_stay_stored(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=5)
    partition.finished_ahead = (Run(5, 7), Run(20, 90))
    partition.complete(deliveries[1])
    await asyncio.sleep(3.0)
    assert harness.stored_completions[-1] == [Run(1, 2), Run(5, 7), Run(20, 90)]

    for delivery in (deliveries[0], *deliveries[2:]):
        partition.complete(delivery)
    await asyncio.sleep(3.0)

    assert harness.offsets[-1] == {0: 5}
    assert harness.stored_completions[-1] == [Run(5, 7), Run(20, 90)]


@with_committer
async def test_rejected_metadata_never_holds_back_the_offset(harness: Harness) -> None:
    partition, deliveries = harness.partition(records=9)
    harness.client.answers = [MetadataRefusedError("too long") for _ in range(20)]
    for delivery in (deliveries[0], deliveries[5]):
        partition.complete(delivery)
    await asyncio.sleep(0.5)

    with_text, without = (due.metadata for commit in harness.client.commits for due in commit.values())
    assert with_text
    assert not without
    assert partition.commits.acknowledged == 0, "the broker had another reason, it seems"
    harness.client.answers.clear()

    await asyncio.sleep(3.0)

    assert partition.commits.acknowledged == 1
    assert harness.committer.metadata_limit == 0


@with_committer
async def test_metadata_shrinks_until_the_broker_accepts_it(harness: Harness) -> None:
    chosen = random.Random(7).sample(range(1, 60_000), 30_000)
    partition, deliveries = harness.partition(records=60_000)
    for number in chosen:
        partition.complete(deliveries[number])
    harness.client.answers = [MetadataRefusedError("too long")]
    await asyncio.sleep(3.0)

    lengths = [len(due.metadata) for commit in harness.client.commits for due in commit.values()]
    assert MOST_UNITS // 2 < lengths[0] <= MOST_UNITS
    assert 0 < lengths[1] <= MOST_UNITS // 2
    assert partition.commits.completed == len(chosen)
    assert harness.committer.failure_durations.counts().count == 0


@functools.cache
def scattered(count: int) -> tuple[Run, ...]:
    """Finished offsets without a pattern, which have the longest text for that count."""
    return runs_of(random.Random(count).sample(range(2, 60_000), count))


@pytest.mark.slow
@with_committer
async def test_oversized_commit_requests_are_split(harness: Harness) -> None:
    """96 partitions, each with as much as its text holds: 1.1 MiB, and brokers take less than 1 MiB."""
    harness.buffer.bounds = Usage(10**9, 10**9)
    partitions = []
    for number in range(96):
        partition, deliveries = harness.partition(number, records=1)
        partition.finished_ahead = scattered(20_000)
        partition.complete(deliveries[0])
        partitions.append(partition)
    await asyncio.sleep(5.0)

    sizes = [sum(len(due.metadata.encode()) for due in commit.values()) for commit in harness.client.commits]
    assert sum(sizes) > 1 << 20
    assert max(sizes) <= 768 * 1024
    assert {number for commit in harness.offsets for number in commit} == set(range(96))
    assert all(partition.commits.acknowledged == 1 for partition in partitions)
    assert harness.client.most_under_way == 1


# Transactions -----------------------------------------------------------------------------


class TransactionalHarness(Harness):
    """Commits in transactions. A partition in one that fails begins again, and all its records complete immediately."""

    transactional = True

    def __init__(self, interval: float) -> None:
        super().__init__(interval)
        self.failed: list[tuple[set[int], str]] = []
        self.refused: list[dict[int, list[int]]] = []
        """Offsets of the records with refused messages, by partition, of each failure."""
        self.current: dict[int, Partition] = {}

    def act_on(self, failure: CommitFailure) -> None:
        if not failure.restarts:
            return
        self.refused.append(
            {owned.topic_partition.partition: sorted(refused) for owned, refused in failure.restarts.items() if refused}
        )
        self.failed.append(({owned.topic_partition.partition for owned in failure.restarts}, failure.why))
        for owned in failure.restarts:
            self.committer.disown(owned)
            owned.end()
            failed = owned.commits.with_failed_transaction(failure.why)
            self.begin(owned.topic_partition.partition, failed=failed)

    def begin(self, number: int, *, text: int = 0, failed: FailedTransactions | None = None) -> Partition:
        """Own a partition whose only record has completed and published; *text* makes its metadata long."""
        partition, (delivery,) = self.partition(number, records=1, failed=failed)
        if text:
            partition.finished_ahead = scattered(text)
        partition.complete(delivery)
        partition.send_later(unsent([Message("out", b"%d" % number)]))
        self.current[number] = partition
        return partition

    @property
    def published(self) -> list[list[bytes | None]]:
        return [[message.value for message in messages] for messages in self.client.messages]

    @property
    def times(self) -> list[float]:
        return [time for time, _, _ in self.client.sent]


def in_transactions(test: Callable[[TransactionalHarness], Any], interval: float) -> None:
    """Run a test with transactions under virtual time."""

    async def live() -> None:
        harness = TransactionalHarness(interval)
        await asyncio.sleep(0)
        await test(harness)
        await harness.close()

    run(live())


def test_messages_without_new_offsets_start_a_transaction() -> None:
    """A parked record that runs again publishes, and its offset was committed long ago."""

    async def test(harness: TransactionalHarness) -> None:
        partition = harness.begin(0)
        assert await harness.committer.flush([partition], 5.0)
        await asyncio.sleep(5.0)
        partition.send_later(unsent([Message("out", b"replayed")]))
        assert await harness.committer.flush([partition], 5.0)
        assert (harness.offsets, harness.published) == ([{0: 1}, {0: 1}], [[b"0"], [b"replayed"]])
        partition.send_later(unsent([Message("out", b"again")]))
        await asyncio.sleep(1.5)
        assert harness.published[2:] == [[b"again"]]

    in_transactions(test, 1.0)


def test_messages_hold_their_bytes_until_their_transaction_ends() -> None:
    async def test(harness: TransactionalHarness) -> None:
        harness.client.takes = 1.0
        partition = harness.begin(0)
        held = harness.buffer.bytes
        flushed = asyncio.create_task(harness.committer.flush([partition], 5.0))
        await asyncio.sleep(0.5)
        partition.send_later(unsent([Message("out", b"x")]))
        assert harness.buffer.bytes == 2 * held
        await asyncio.sleep(0.6)
        assert harness.buffer.bytes == held
        assert await flushed
        assert (harness.published, harness.buffer.bytes) == ([[b"0"], [b"x"]], 0)

    in_transactions(test, 100.0)


def test_repeated_transaction_failures_back_off() -> None:
    async def test(harness: TransactionalHarness) -> None:
        harness.client.answers = [CommitError("no")] * 8
        harness.begin(0)
        await asyncio.sleep(60.0)
        gaps = [later - earlier for earlier, later in itertools.pairwise(harness.times)]
        assert gaps == pytest.approx([0.3, 0.5, 0.9, 1.7, 3.3, 5.1, 5.1, 5.1])
        assert harness.failed == [({0}, "no")] * 8
        assert harness.current[0].commits.acknowledged == 1
        harness.client.answers = [CommitError("no")]
        harness.begin(1)
        await asyncio.sleep(60.0)
        assert harness.times[-1] - harness.times[-2] == pytest.approx(0.3), "a success resets the count"

    in_transactions(test, 0.1)


def test_a_flush_skips_the_backoff_after_failed_transactions() -> None:
    """The group waits for it."""

    async def test(harness: TransactionalHarness) -> None:
        harness.client.answers = [CommitError("no")] * 7
        harness.begin(0)
        await until(lambda: len(harness.failed) == 7)
        began = asyncio.get_running_loop().time()
        assert await harness.committer.flush([harness.current[0]], 5.0)
        assert asyncio.get_running_loop().time() - began < 0.2

    in_transactions(test, 0.1)


def test_a_full_output_buffer_does_not_shorten_the_backoff() -> None:
    """They fill it all the time while transactions fail: that must not make more of them."""

    async def test(harness: TransactionalHarness) -> None:
        harness.begin(0)
        await asyncio.sleep(10.0)
        harness.begin(1)
        await asyncio.sleep(1.0)
        crowd(harness.buffer)
        await asyncio.sleep(0.1)
        assert harness.times == pytest.approx([0.0, 11.0], abs=0.05), "without a failure, it does not wait"
        harness.client.answers = [CommitError("no")] * 4
        harness.begin(2)
        crowd(harness.buffer)
        await asyncio.sleep(0.1)
        for _ in range(2_000):
            crowd(harness.buffer)
            await asyncio.sleep(0.1)
        gaps = [later - earlier for earlier, later in itertools.pairwise(harness.times[2:])]
        assert gaps == pytest.approx([30.2, 30.4, 30.8, 31.6])

    in_transactions(test, 30.0)


def test_a_transaction_with_refused_metadata_is_retried_with_a_shorter_one() -> None:
    async def test(harness: TransactionalHarness) -> None:
        harness.client.answers = [MetadataRefusedError("too long")]
        harness.buffer.bounds = Usage(10**9, 10**9)
        harness.begin(0, text=6_000)
        await until(lambda: harness.failed)
        (partition,) = harness.current.values()
        partition.finished_ahead = runs_of(random.Random(0).sample(range(2, 60_000), 6_000))
        await until(lambda: partition.commits.acknowledged == 1)
        first, second = (len(due.metadata) for commit in harness.client.commits for due in commit.values())
        assert 0 < second <= first // 2
        assert harness.committer.metadata_limit == first // 2
        assert harness.committer.failure_durations.counts().count == 1

    in_transactions(test, 1.0)


def test_partitions_that_do_not_fit_move_to_the_next_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioshard.engine.committer._MOST_BYTES", 1_000)

    async def test(harness: TransactionalHarness) -> None:
        for number in range(20):
            harness.begin(number)
        assert await harness.committer.flush(list(harness.current.values()), 30.0)
        assert 2 < len(harness.offsets) < 6
        for offsets, messages in zip(harness.offsets, harness.published, strict=True):
            assert messages == [b"%d" % partition for partition in offsets]
            assert len(offsets) * (len("orders") + 100) <= 1_000
        assert sorted(partition for offsets in harness.offsets for partition in offsets) == list(range(20))
        assert harness.buffer.bytes == 0

    in_transactions(test, 1.0)


def test_a_partition_too_large_for_a_request_is_sent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshard.engine.committer._MOST_BYTES", 10)

    async def test(harness: TransactionalHarness) -> None:
        for number in range(3):
            harness.begin(number)
        assert await harness.committer.flush(list(harness.current.values()), 30.0)
        assert (harness.offsets, harness.published) == ([{0: 1}, {1: 1}, {2: 1}], [[b"0"], [b"1"], [b"2"]])

    in_transactions(test, 1.0)


def test_only_partitions_of_a_failed_transaction_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshard.engine.committer._MOST_BYTES", 10)

    async def test(harness: TransactionalHarness) -> None:
        first, second = harness.begin(0), harness.begin(1)
        harness.client.answers = [CommitError("the coordinator has moved")]
        assert await harness.committer.flush([second], 30.0)
        assert harness.failed == [({0}, "the coordinator has moved")]
        assert first is not harness.current[0]
        assert second is harness.current[1]
        statistics = harness.committer.transactions()
        assert statistics is not None
        assert (statistics.fenced, statistics.open_seconds) == (0, None)

    in_transactions(test, 1.0)


def test_a_refused_transaction_is_resent_in_order_and_keeps_its_bytes() -> None:
    """Messages of the same key would otherwise change places."""

    async def test(harness: TransactionalHarness) -> None:
        harness.client.takes, harness.client.answers = 1.0, [CommitRefusedError("the group has moved on")]
        partition = harness.begin(0)
        held = harness.buffer.bytes
        await asyncio.sleep(0.5)
        partition.send_later(unsent([Message("out", b"x")]))
        await asyncio.sleep(0.6)
        assert (harness.buffer.bytes, harness.failed) == (2 * held, [])
        statistics = harness.committer.transactions()
        assert statistics is not None
        assert (statistics.fenced, statistics.messages) == (1, 0)
        assert await harness.committer.flush([partition], 5.0)
        assert (harness.published, harness.buffer.bytes) == ([[b"0"], [b"0", b"x"]], 0)

    in_transactions(test, 100.0)


def test_a_transaction_is_resent_without_the_records_of_refused_messages() -> None:
    async def test(harness: TransactionalHarness) -> None:
        first, second = harness.begin(0), harness.begin(1)
        first.send_later(unsent([Message("out", b"x"), Message("out", b"poison")], 7))
        first.send_later(unsent([Message("out", b"y")], 8, 9))
        harness.client.answers = [
            MessagesRefusedError({index: MessageRefusedError("no such partition") for index in (2, 3)})
        ]
        assert await harness.committer.flush([second], 5.0)
        assert harness.refused == [{0: [7, 8, 9]}]
        assert second is harness.current[1]
        assert harness.published == [[b"0", b"x", b"poison", b"y", b"1"], [b"1", b"0"]]
        assert harness.committer.trouble.why is None

    in_transactions(test, 0.1)


def test_a_transaction_whose_batches_become_smaller_is_resent_as_it_is() -> None:
    async def test(harness: TransactionalHarness) -> None:
        partition = harness.begin(0)
        harness.client.answers = [MessagesRefusedError({})]
        assert await harness.committer.flush([partition], 5.0)
        assert (harness.failed, harness.published) == ([], [[b"0"], [b"0"]])

    in_transactions(test, 0.1)


def test_the_trouble_of_failing_transactions_lasts_until_one_succeeds() -> None:
    """The epochs end with each of them, so that nothing is due until records have completed again."""

    async def test(harness: TransactionalHarness) -> None:
        partition = harness.begin(0)
        harness.committer.trouble.report("the coordinator is away")
        began = harness.committer.trouble.since
        harness.client.answers = [CommitError("no"), CommitError("no")]
        await until(lambda: len(harness.failed) == 1)
        partition = harness.current[0]
        harness.committer.disown(partition)
        await asyncio.sleep(10.0)
        assert (harness.committer.trouble.why, harness.committer.trouble.since) == ("no", began)
        harness.committer.own(partition)
        await until(lambda: len(harness.failed) == 2)
        assert harness.committer.trouble.since == began
        await until(lambda: harness.committer.trouble.why is None)
        assert harness.current[0].commits.acknowledged == 1

    in_transactions(test, 0.1)


def test_a_transaction_that_times_out_has_failed() -> None:
    async def test(harness: TransactionalHarness) -> None:
        harness.client.takes = 60.0
        harness.begin(0)
        await asyncio.sleep(2.0)
        statistics = harness.committer.transactions()
        assert statistics is not None
        assert statistics.open_seconds == pytest.approx(2.0, abs=0.2)
        await asyncio.sleep(3.5)
        ((partitions, why),) = harness.failed
        assert partitions == {0}
        assert "commit_timeout" in why

    in_transactions(test, 0.1)
