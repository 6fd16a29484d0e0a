"""What `aioshard.ports.Transport` promises, asked of an implementation.

The tests know a client only as the port. Another implementation takes part with a harness of its own.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from aioshard.errors import CommitRefusedError, OffsetOutOfRangeError
from aioshard.ports import (
    Allowance,
    Batch,
    Committed,
    Fault,
    LogRange,
    Membership,
    Oversized,
    Transport,
    record_size,
)
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport
from tests.testing.recording import Assigned, RecordingListener, Revoked, nothing, poll_batches, take, unlimited

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)


class Harness(Protocol):
    """One topic "orders" with two partitions, and what a test does from outside the client."""

    def client(self) -> Transport: ...

    async def publish(self, partition: TopicPartition, *values: bytes) -> None: ...

    async def leave_hole(self, partition: TopicPartition, count: int) -> None: ...

    async def rebalance(self) -> None: ...

    async def forget(self, member_id: str) -> None: ...

    async def aclose(self) -> None: ...


class InMemoryHarness:
    def __init__(self) -> None:
        self.broker = InMemoryBroker(clock=lambda: 0.0)
        self.broker.create_topic("orders", 2)
        self.clients: list[InMemoryTransport] = []

    def client(self) -> InMemoryTransport:
        self.clients.append(InMemoryTransport(self.broker, "billing"))
        return self.clients[-1]

    async def publish(self, partition: TopicPartition, *values: bytes) -> None:
        for value in values:
            self.broker.publish(partition.topic, value, partition=partition.partition)

    async def leave_hole(self, partition: TopicPartition, count: int) -> None:
        self.broker.skip(*partition, count)

    async def rebalance(self) -> None:
        self.broker.rebalance()

    async def forget(self, member_id: str) -> None:
        self.broker.group("billing").lose(member_id)

    async def aclose(self) -> None:
        for client in self.clients:
            await client.close()


@pytest.fixture(params=[InMemoryHarness])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    one: Harness = request.param()
    yield one
    await one.aclose()


async def started(harness: Harness, *, opening: bool = True) -> tuple[Transport, RecordingListener, Membership]:
    """A client with its first assignment."""
    client = harness.client()
    listener = RecordingListener(client, opening=opening)
    await client.start(["orders"], None, listener)
    assigned = await listener.assignments.get()
    return client, listener, assigned.membership


# Assignment ------------------------------------------------------------------------------


async def test_the_first_assignment_names_all_partitions_and_the_membership(harness: Harness) -> None:
    client, listener, membership = await started(harness)

    assert listener.events == [Assigned((ONE, TWO), membership)]
    assert membership.member_id
    assert membership.generation >= 0
    assert client.membership() == membership


async def test_an_assigned_partition_is_paused_until_it_is_resumed(harness: Harness) -> None:
    await harness.publish(ONE, b"a")
    client, _, _ = await started(harness, opening=False)
    client.seek(ONE, 0)

    before = await client.poll(unlimited, 0.01)
    client.resume([ONE])

    assert before == []
    assert [record.value for record in await take(client, 1)] == [b"a"]


async def test_a_seek_inside_assigned_decides_the_first_record(harness: Harness) -> None:
    await harness.publish(ONE, b"a", b"b", b"c")
    client, _, _ = await started(harness, opening=False)

    client.seek(ONE, 2)
    client.resume([ONE])

    assert [record.value for record in await take(client, 1)] == [b"c"]


# Records ---------------------------------------------------------------------------------


async def test_a_batch_has_its_records_in_order_their_sizes_and_the_position_after_them(harness: Harness) -> None:
    await harness.publish(ONE, b"a", b"bb")
    client, _, _ = await started(harness)

    [batch] = await client.poll(unlimited, 1.0)

    assert isinstance(batch, Batch)
    assert batch.topic_partition == ONE
    assert [(record.offset, record.value) for record in batch.records] == [(0, b"a"), (1, b"bb")]
    assert list(batch.sizes) == [record_size(r.key, r.value, r.headers) for r in batch.records]
    assert batch.next_offset == 2
    assert client.position(ONE) == 2


async def test_the_position_passes_offsets_without_a_record(harness: Harness) -> None:
    """With them, or in a batch without records: else the lag never reaches 0 (I10)."""
    await harness.publish(ONE, b"a")
    await harness.leave_hole(ONE, 3)
    await harness.publish(ONE, b"b")
    await harness.leave_hole(ONE, 2)
    client, _, _ = await started(harness)

    batches: list[Batch] = []
    while client.position(ONE) != 7:
        batches += await poll_batches(client)

    assert [record.offset for batch in batches for record in batch.records] == [0, 4]
    assert batches[-1].next_offset == 7


async def test_a_hole_that_comes_later_moves_the_position_without_records(harness: Harness) -> None:
    await harness.publish(ONE, b"a")
    client, _, _ = await started(harness)
    await take(client, 1)

    await harness.leave_hole(ONE, 2)
    [batch] = await client.poll(unlimited, 1.0)

    assert batch == Batch(ONE, [], [], 3)


async def test_no_more_records_than_allowed_and_none_twice(harness: Harness) -> None:
    await harness.publish(ONE, b"a", b"b", b"c")
    client, _, _ = await started(harness)

    polls = [await poll_batches(client, lambda _: Allowance(1, 1 << 20)) for _ in range(3)]

    assert [[record.value for record in batch.records] for [batch] in polls] == [[b"a"], [b"b"], [b"c"]]
    assert [batch.next_offset for [batch] in polls] == [1, 2, 3]


async def test_what_one_partition_takes_counts_against_the_others(harness: Harness) -> None:
    """Allowances are as of the start of a poll, so together they may not exceed the greatest (I6)."""
    await harness.publish(ONE, b"a", b"b")
    await harness.publish(TWO, b"c", b"d")
    client, _, _ = await started(harness)

    first = await poll_batches(client, lambda _: Allowance(3, 1 << 20))

    assert sum(len(batch.records) for batch in first) == 3


async def test_no_more_bytes_than_allowed(harness: Harness) -> None:
    await harness.publish(ONE, b"a" * 100, b"b" * 100, b"c" * 100)
    client, _, _ = await started(harness)

    [batch] = await poll_batches(client, lambda _: Allowance(10, 1250))

    assert [(record.value or b"")[:1] for record in batch.records] == [b"a", b"b"]
    assert batch.next_offset == 2


async def test_a_record_that_does_not_fit_is_reported_and_stays(harness: Harness) -> None:
    await harness.publish(ONE, b"a" * 1000)
    client, _, _ = await started(harness)

    reported = await client.poll(lambda _: Allowance(10, 600), 1.0)

    assert reported == [Oversized(ONE, 1500)]
    assert client.position(ONE) == 0
    assert len(await take(client, 1)) == 1


async def test_a_record_that_does_not_fit_ends_a_poll_once(harness: Harness) -> None:
    """A caller that has no room yet would spin otherwise."""
    await harness.publish(ONE, b"a" * 1000)
    client, _, _ = await started(harness)
    await client.poll(lambda _: Allowance(10, 600), 1.0)
    clock = asyncio.get_running_loop().time
    before = clock()

    again = await client.poll(lambda _: Allowance(10, 600), 0.05)

    assert again == [Oversized(ONE, 1500)]
    assert clock() - before >= 0.045


async def test_alone_takes_the_first_record_whatever_its_size(harness: Harness) -> None:
    await harness.publish(ONE, b"a" * 1000, b"b" * 1000)
    client, _, _ = await started(harness)

    [batch] = await poll_batches(client, lambda _: Allowance(10, 600, alone=True))

    assert [(record.value or b"")[:1] for record in batch.records] == [b"a"]


async def test_a_partition_without_allowance_keeps_its_records(harness: Harness) -> None:
    await harness.publish(ONE, b"a")
    await harness.publish(TWO, b"b")
    client, _, _ = await started(harness)

    [batch] = await client.poll(lambda tp: Allowance(int(tp == TWO), 1 << 20), 1.0)
    rest = await client.poll(nothing, 0.01)

    assert batch.topic_partition == TWO
    assert rest == []
    assert client.position(ONE) == 0
    assert [record.value for record in await take(client, 1)] == [b"a"]


async def test_wake_ends_a_waiting_poll(harness: Harness) -> None:
    client, _, _ = await started(harness)
    polling = asyncio.ensure_future(client.poll(unlimited, 60.0))
    await asyncio.sleep(0)

    client.wake()

    async with asyncio.timeout(5.0):
        assert await polling == []


async def test_a_waiting_poll_returns_when_a_record_comes(harness: Harness) -> None:
    client, _, _ = await started(harness)
    polling = asyncio.ensure_future(poll_batches(client, timeout=60.0))
    await asyncio.sleep(0)

    await harness.publish(ONE, b"a")

    async with asyncio.timeout(5.0):
        [batch] = await polling
    assert [record.value for record in batch.records] == [b"a"]


async def test_a_cancelled_poll_loses_nothing(harness: Harness) -> None:
    client, _, _ = await started(harness)
    polling = asyncio.ensure_future(client.poll(unlimited, 60.0))
    await asyncio.sleep(0)

    await harness.publish(ONE, b"a")
    polling.cancel()
    await asyncio.wait([polling])

    assert polling.cancelled()
    assert [record.value for record in await take(client, 1)] == [b"a"]


async def test_a_paused_partition_hands_out_nothing_and_goes_on_where_it_was(harness: Harness) -> None:
    await harness.publish(ONE, b"a", b"b")
    client, _, _ = await started(harness)
    await client.poll(lambda _: Allowance(1, 1 << 20), 1.0)

    client.pause([ONE])
    while_paused = await client.poll(unlimited, 0.01)
    client.resume([ONE])

    assert while_paused == []
    assert [record.value for record in await take(client, 1)] == [b"b"]


async def test_a_seek_back_hands_out_again(harness: Harness) -> None:
    await harness.publish(ONE, b"a", b"b")
    client, _, _ = await started(harness)
    await take(client, 2)

    client.seek(ONE, 1)

    assert client.position(ONE) == 1
    assert [record.value for record in await take(client, 1)] == [b"b"]


async def test_a_position_outside_the_log_is_a_fault_of_that_partition_alone(harness: Harness) -> None:
    await harness.publish(TWO, b"b")
    client, _, _ = await started(harness, opening=False)
    client.seek(ONE, 5)
    client.seek(TWO, 0)
    client.resume([ONE, TWO])

    found: list[Batch | Fault | Oversized] = []
    while len(found) < 2:
        found += await client.poll(unlimited, 1.0)

    [fault] = [item for item in found if isinstance(item, Fault)]
    assert fault.topic_partition == ONE
    assert isinstance(fault.error, OffsetOutOfRangeError)
    assert fault.error.position == 5
    assert [item.topic_partition for item in found if isinstance(item, Batch)] == [TWO]


async def test_synchronous_calls_for_a_partition_that_is_not_assigned_do_nothing(harness: Harness) -> None:
    client, _, _ = await started(harness)
    other = TopicPartition("orders", 99)

    client.pause([other])
    client.resume([other])
    client.seek(other, 3)

    assert client.position(other) is None
    assert client.end_offset(other) is None


# Questions and commits -------------------------------------------------------------------


async def test_log_ranges_partitions_and_ends_are_those_of_the_log(harness: Harness) -> None:
    await harness.publish(ONE, b"a", b"b")
    client, _, _ = await started(harness)
    await take(client, 2)

    assert await client.log_ranges([ONE, TWO]) == {ONE: LogRange(0, 2), TWO: LogRange(0, 0)}
    assert await client.partitions("orders") == {0, 1}
    assert await client.partitions("nowhere") == frozenset()
    assert client.end_offset(ONE) == 2


async def test_a_commit_is_stored_with_its_metadata(harness: Harness) -> None:
    await harness.publish(ONE, b"a")
    client, _, membership = await started(harness)

    await client.commit({ONE: Committed(1, "note")}, membership)

    assert await client.committed([ONE, TWO]) == {ONE: Committed(1, "note"), TWO: None}


@pytest.mark.parametrize("wrong", ["generation", "member"])
async def test_a_commit_under_another_membership_is_refused(harness: Harness, wrong: str) -> None:
    client, _, (member_id, generation) = await started(harness)
    other = Membership(member_id, generation + 1) if wrong == "generation" else Membership("somebody", generation)

    with pytest.raises(CommitRefusedError):
        await client.commit({ONE: Committed(0, "")}, other)

    assert await client.committed([ONE]) == {ONE: None}


# Rebalances ------------------------------------------------------------------------------


async def test_a_rebalance_keeps_the_member_id_and_takes_the_generation_up_by_one(harness: Harness) -> None:
    client, listener, before = await started(harness)

    await harness.rebalance()
    after = await listener.assignments.get()

    assert [type(event) for event in listener.events] == [Assigned, Revoked, Assigned]
    assert listener.events[1] == Revoked((ONE, TWO), lost=False)
    assert after.membership == Membership(before.member_id, before.generation + 1)
    assert client.membership() == after.membership


async def test_the_group_waits_for_revoked_and_accepts_commits_until_it_returns(harness: Harness) -> None:
    await harness.publish(ONE, b"a")
    client, listener, membership = await started(harness)
    inside = asyncio.Event()
    go_on = asyncio.Event()

    async def drain() -> None:
        inside.set()
        await go_on.wait()
        await client.commit({ONE: Committed(1, "")}, client.membership())

    listener.on_revoked = drain
    await harness.rebalance()
    await inside.wait()
    while_revoking = await client.poll(unlimited, 0.01)
    still = client.membership()
    go_on.set()
    await listener.assignments.get()

    assert while_revoking == []
    assert still == membership
    assert await client.committed([ONE]) == {ONE: Committed(1, "")}


async def test_after_a_rebalance_a_partition_is_paused_again(harness: Harness) -> None:
    await harness.publish(ONE, b"a", b"b")
    client, listener, _ = await started(harness)
    await client.poll(lambda _: Allowance(1, 1 << 20), 1.0)
    listener._opening = False

    await harness.rebalance()
    await listener.assignments.get()

    assert await client.poll(unlimited, 0.01) == []


async def test_an_old_generation_is_refused_after_a_rebalance(harness: Harness) -> None:
    client, listener, old = await started(harness)
    await harness.rebalance()
    await listener.assignments.get()

    with pytest.raises(CommitRefusedError):
        await client.commit({ONE: Committed(0, "")}, old)


async def test_a_lost_membership_is_told_and_nothing_can_be_committed(harness: Harness) -> None:
    client, listener, before = await started(harness)
    refusals: list[CommitRefusedError] = []

    async def try_to_commit() -> None:
        try:
            await client.commit({ONE: Committed(0, "")}, before)
        except CommitRefusedError as error:
            refusals.append(error)

    listener.on_revoked = try_to_commit
    await harness.forget(before.member_id)
    after = await listener.assignments.get()

    assert listener.events[1] == Revoked((ONE, TWO), lost=True)
    assert len(refusals) == 1
    assert after.membership.member_id != before.member_id
    assert client.membership() == after.membership


async def test_two_members_share_the_partitions_and_the_rest_inherits(harness: Harness) -> None:
    one, listener, _ = await started(harness)
    two, other, _ = await started(harness)
    shared = await listener.assignments.get()
    mine, others = set(shared.partitions), {tp for event in other.events for tp in event.partitions}

    await two.close()
    alone = await listener.assignments.get()

    assert mine | others == {ONE, TWO}
    assert not mine & others
    assert alone.partitions == (ONE, TWO)
    assert all(isinstance(event, Assigned) for event in other.events), "close calls no listener"
    assert one.membership() == alone.membership
