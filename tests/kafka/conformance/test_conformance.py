"""The contract of `aioshard.ports.Transport`, tested on each implementation.

The tests know a client only as the port. Another implementation takes part with its own harness.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest

from aioshard.errors import (
    ClientLostError,
    CommitRefusedError,
    OffsetOutOfRangeError,
    StateError,
    TopicRecreatedError,
)
from aioshard.kafka.group.transport import MemberTransport
from aioshard.ports import (
    NOT_A_MEMBER,
    Allowance,
    Committed,
    Fault,
    FetchedBatch,
    LogRange,
    Membership,
    Oversized,
    Transport,
    record_size,
)
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings
from aioshard.testing import InMemoryBroker, InMemoryTransport
from tests.engine.testing.recording import Assigned, RecordingListener, Revoked, nothing, poll_batches, take, unlimited
from tests.kafka.client.members import settings_for
from tests.support.brokers import SharedKafka
from tests.support.misnamed import Content, produce


class Harness(Protocol):
    """A topic with two partitions that only this test uses, and the actions of a test outside the client."""

    one: TopicPartition
    two: TopicPartition

    async def prepare(self) -> None: ...

    def client(self) -> Transport: ...

    async def publish(self, partition: TopicPartition, *values: bytes) -> None: ...

    async def publish_with_headers(self, partition: TopicPartition, contents: Sequence[Content]) -> None: ...

    async def leave_hole(self, partition: TopicPartition, count: int) -> None: ...

    async def recreate(self) -> None: ...

    async def rebalance(self) -> None: ...

    async def forget(self, member_id: str) -> None: ...

    async def aclose(self) -> None: ...


class InMemoryHarness:
    def __init__(self, request: pytest.FixtureRequest) -> None:
        del request
        self.one, self.two = TopicPartition("orders", 0), TopicPartition("orders", 1)
        self.broker = InMemoryBroker(clock=lambda: 0.0)
        self.clients: list[InMemoryTransport] = []

    async def prepare(self) -> None:
        self.broker.create_topic("orders", 2)

    def client(self) -> InMemoryTransport:
        self.clients.append(InMemoryTransport(self.broker, "billing"))
        return self.clients[-1]

    async def publish(self, partition: TopicPartition, *values: bytes) -> None:
        for value in values:
            self.broker.publish(partition.topic, value, partition=partition.partition)

    async def publish_with_headers(self, partition: TopicPartition, contents: Sequence[Content]) -> None:
        log = self.broker.log(*partition)
        for value, pairs in contents:
            headers = tuple((name.decode("utf-8", "surrogateescape"), content) for name, content in pairs)
            log.append(Record(*partition, log.end, None, value, headers, 0.0))

    async def leave_hole(self, partition: TopicPartition, count: int) -> None:
        self.broker.log(*partition).skip(count)

    async def recreate(self) -> None:
        self.broker.recreate("orders")

    async def rebalance(self) -> None:
        self.broker.group("billing").rebalance()

    async def forget(self, member_id: str) -> None:
        self.broker.group("billing").leave(member_id)

    async def aclose(self) -> None:
        for client in self.clients:
            await client.close()


class KafkaHarness:
    """The client on a real broker, from which the in-memory one must not differ; its rebalances take everything."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.kafka: SharedKafka = request.getfixturevalue("kafka")
        self.topic: str = request.getfixturevalue("topic")
        self.group: str = request.getfixturevalue("group")
        self.one, self.two = TopicPartition(self.topic, 0), TopicPartition(self.topic, 1)
        self.clients: list[Transport] = []

    async def prepare(self) -> None:
        await self.kafka.create_topic(self.topic, 2)

    def client(self) -> Transport:
        self.clients.append(MemberTransport(settings_for(self.kafka.bootstrap), self.group))
        return self.clients[-1]

    async def publish(self, partition: TopicPartition, *values: bytes) -> None:
        await self.kafka.produce(self.topic, [(None, value) for value in values], partition.partition)

    async def publish_with_headers(self, partition: TopicPartition, contents: Sequence[Content]) -> None:
        await produce(self.kafka.bootstrap, partition, contents)

    async def leave_hole(self, partition: TopicPartition, count: int) -> None:
        aborted = [(None, b"aborted")] * (count - 1)
        identity = f"{self.topic}-{partition.partition}"
        await self.kafka.produce_transaction(
            self.topic, aborted, partition.partition, abort=True, transactional_id=identity
        )

    async def recreate(self) -> None:
        await self.kafka.delete_topic(self.topic)
        await self.kafka.create_topic(self.topic, 2)

    async def rebalance(self) -> None:
        """Somebody who reads another topic joins: the partitions stay, and everybody gives them back."""
        await self.kafka.create_topic(f"{self.topic}-another", 1)
        other = self.client()
        await other.start([f"{self.topic}-another"], None, RecordingListener(other))

    async def forget(self, member_id: str) -> None:
        """As an administrator removes a member."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.bootstrap)
        await admin.start()
        try:
            coordinator = await admin.find_coordinator(self.group)
            answer = await admin._client.send(coordinator, LeaveGroupRequest(self.group, member_id))
            assert answer.error_code == 0
        finally:
            await admin.close()

    async def aclose(self) -> None:
        for client in reversed(self.clients):
            await client.close()


class IncrementalHarness(KafkaHarness):
    """The same with an assignor whose rebalances take only the partitions that move."""

    def client(self) -> Transport:
        settings = settings_for(self.kafka.bootstrap, assignor="cooperative-fair")
        self.clients.append(MemberTransport(settings, self.group))
        return self.clients[-1]


class ConsumerHarness(KafkaHarness):
    """The same with the protocol in which the broker assigns."""

    def client(self) -> Transport:
        settings = Settings(bootstrap_servers=self.kafka.bootstrap, group_protocol="consumer")
        self.clients.append(MemberTransport(settings, self.group))
        return self.clients[-1]


EAGER = [
    pytest.param(InMemoryHarness, id="in memory"),
    pytest.param(KafkaHarness, id="classic", marks=pytest.mark.kafka),
]
CONSUMER = pytest.param(ConsumerHarness, id="consumer", marks=pytest.mark.kafka)
when_everything_is_taken = pytest.mark.parametrize("unprepared", EAGER, indirect=True)
"""For eager rebalances, which revoke every partition, and give each a new generation."""
with_every_rebalance = pytest.mark.parametrize(
    "unprepared",
    [*EAGER, pytest.param(IncrementalHarness, id="incremental", marks=pytest.mark.kafka), CONSUMER],
    indirect=True,
)
"""For behavior that must not depend on which partitions a rebalance takes."""


@pytest.fixture(params=[*EAGER, CONSUMER])
def unprepared(request: pytest.FixtureRequest) -> Harness:
    """Not async: the broker's fixture is not."""
    made: Harness = request.param(request)
    return made


@pytest.fixture
async def harness(unprepared: Harness) -> AsyncIterator[Harness]:
    await unprepared.prepare()
    yield unprepared
    await unprepared.aclose()


async def started(harness: Harness, *, opening: bool = True) -> tuple[Transport, RecordingListener, Membership]:
    """A client with its first partitions; a group of the consumer protocol may not know a new topic yet."""
    client = harness.client()
    listener = RecordingListener(client, opening=opening)
    await client.start([harness.one.topic], None, listener)
    assigned = await listener.assignments.get()
    while not assigned.partitions:
        listener.events.remove(assigned)
        assigned = await listener.assignments.get()
    return client, listener, assigned.membership


# Assignment ------------------------------------------------------------------------------


async def test_the_first_assignment_names_all_partitions_and_the_membership(harness: Harness) -> None:
    client, listener, membership = await started(harness)

    assert listener.events == [Assigned((harness.one, harness.two), membership)]
    assert membership.member_id
    assert membership.generation >= 0
    assert client.membership() == membership


async def test_an_assigned_partition_is_paused_until_it_is_resumed(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    client, _, _ = await started(harness, opening=False)
    client.seek(harness.one, 0)

    before = await client.poll(unlimited, 0.01)
    client.resume([harness.one])

    assert before == []
    assert [record.value for record in await take(client, 1)] == [b"a"]


async def test_a_partition_cannot_resume_before_it_has_a_position(harness: Harness) -> None:
    client, _, _ = await started(harness, opening=False)

    assert client.position(harness.one) is None
    with pytest.raises(StateError, match="has no position"):
        client.resume([harness.one])


async def test_a_closed_client_returns_nothing_and_is_not_a_member(harness: Harness) -> None:
    client, _, _ = await started(harness)

    await client.close()

    assert client.membership() == NOT_A_MEMBER
    with pytest.raises(ClientLostError, match="closed"):
        await client.poll(unlimited, 5.0)


async def test_a_seek_inside_assigned_decides_the_first_record(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b", b"c")
    client, _, _ = await started(harness, opening=False)

    client.seek(harness.one, 2)
    client.resume([harness.one])

    assert [record.value for record in await take(client, 1)] == [b"c"]


# Records ---------------------------------------------------------------------------------


async def test_a_batch_has_ordered_records_their_sizes_and_the_next_position(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"bb")
    client, _, _ = await started(harness)

    [batch] = await client.poll(unlimited, 5.0)

    assert isinstance(batch, FetchedBatch)
    assert batch.topic_partition == harness.one
    assert [(record.offset, record.value) for record in batch.records] == [(0, b"a"), (1, b"bb")]
    assert list(batch.sizes) == [record_size(r.key, r.value, r.headers) for r in batch.records]
    assert batch.next_offset == 2
    assert client.position(harness.one) == 2


MISNAMED = [(b"a", b"1"), (b"\xff\xfe", None), (b"b", b"2")]


async def test_a_record_whose_header_name_is_not_utf_8_is_returned_and_marked(harness: Harness) -> None:
    client, _, _ = await started(harness)
    await harness.publish(harness.one, b"before")
    await harness.publish_with_headers(harness.one, [(b"misnamed", MISNAMED), (b"named", [(b"c", b"3")])])
    await harness.publish(harness.one, b"after")

    records: list[Record] = []
    marked: set[int] = set()
    async with asyncio.timeout(30):
        while len(records) < 4:
            for batch in await poll_batches(client):
                records.extend(batch.records)
                marked.update(batch.undecodable or ())

    assert [record.value for record in records] == [b"before", b"misnamed", b"named", b"after"]
    assert records[1].headers == (("a", b"1"), ("\udcff\udcfe", None), ("b", b"2"))
    assert records[2].headers == (("c", b"3"),)
    assert marked == {records[1].offset}


async def test_the_position_passes_offsets_without_a_record(harness: Harness) -> None:
    """With them, or in a batch without records: else the lag never reaches 0 (I10)."""
    await harness.publish(harness.one, b"a")
    await harness.leave_hole(harness.one, 3)
    await harness.publish(harness.one, b"b")
    await harness.leave_hole(harness.one, 2)
    client, _, _ = await started(harness)

    batches: list[FetchedBatch] = []
    while client.position(harness.one) != 7:
        batches += await poll_batches(client)

    assert [record.offset for batch in batches for record in batch.records] == [0, 4]
    assert batches[-1].next_offset == 7


async def test_a_later_hole_moves_the_position_without_records(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    client, _, _ = await started(harness)
    await take(client, 1)

    await harness.leave_hole(harness.one, 2)
    found: list[FetchedBatch] = []
    while client.position(harness.one) != 3:
        found += await poll_batches(client)

    assert [record for batch in found for record in batch.records] == []
    assert found[-1].next_offset == 3


async def test_polls_return_no_more_records_than_allowed_and_none_twice(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b", b"c")
    client, _, _ = await started(harness)

    polls = [await poll_batches(client, lambda _: Allowance(1, 1 << 20)) for _ in range(3)]

    assert [[record.value for record in batch.records] for [batch] in polls] == [[b"a"], [b"b"], [b"c"]]
    assert [batch.next_offset for [batch] in polls] == [1, 2, 3]


async def test_an_allowance_is_shared_by_all_partitions(harness: Harness) -> None:
    """Allowances are as of the start of a poll, so together they may not exceed the greatest (I6)."""
    await harness.publish(harness.one, b"a", b"b")
    await harness.publish(harness.two, b"c", b"d")
    client, _, _ = await started(harness)

    first = await poll_batches(client, lambda _: Allowance(3, 1 << 20))

    assert 0 < sum(len(batch.records) for batch in first) <= 3


async def test_the_byte_allowance_is_shared_by_all_partitions_too(harness: Harness) -> None:
    await harness.publish(harness.one, b"a" * 100)
    await harness.publish(harness.two, b"b" * 100)
    client, _, _ = await started(harness)

    polls = [await poll_batches(client, lambda _: Allowance(10, 1000)) for _ in range(2)]

    assert [len(batches) for batches in polls] == [1, 1]
    assert {batch.topic_partition for [batch] in polls} == {harness.one, harness.two}


async def test_every_partition_has_its_turn(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b", b"c")
    await harness.publish(harness.two, b"d", b"e", b"f")
    client, _, _ = await started(harness)
    await client.poll(nothing, 2.0)  # what a client fetches of several partitions may come one after the other

    turns = [await poll_batches(client, lambda _: Allowance(1, 1 << 20)) for _ in range(3)]

    assert {batch.topic_partition for [batch] in turns} == {harness.one, harness.two}


async def test_polls_return_no_more_bytes_than_allowed(harness: Harness) -> None:
    await harness.publish(harness.one, b"a" * 100, b"b" * 100, b"c" * 100)
    client, _, _ = await started(harness)

    [batch] = await poll_batches(client, lambda _: Allowance(10, 1250))

    assert [(record.value or b"")[:1] for record in batch.records] == [b"a", b"b"]
    assert batch.next_offset == 2


async def test_a_record_that_does_not_fit_is_reported_and_stays(harness: Harness) -> None:
    await harness.publish(harness.one, b"a" * 1000)
    client, _, _ = await started(harness)

    reported = await client.poll(lambda _: Allowance(10, 600), 5.0)

    assert reported == [Oversized(harness.one, 1500)]
    assert client.position(harness.one) == 0
    assert len(await take(client, 1)) == 1


async def test_a_record_that_does_not_fit_ends_a_poll_once(harness: Harness) -> None:
    """A caller that has no room yet would spin otherwise."""
    await harness.publish(harness.one, b"a" * 1000)
    client, _, _ = await started(harness)
    await client.poll(lambda _: Allowance(10, 600), 5.0)
    clock = asyncio.get_running_loop().time
    before = clock()

    again = await client.poll(lambda _: Allowance(10, 600), 0.05)

    assert again == [Oversized(harness.one, 1500)]
    assert clock() - before >= 0.045


async def test_alone_returns_the_first_record_of_any_size(harness: Harness) -> None:
    await harness.publish(harness.one, b"a" * 1000, b"b" * 1000)
    client, _, _ = await started(harness)

    [batch] = await poll_batches(client, lambda _: Allowance(10, 600, alone=True))

    assert [(record.value or b"")[:1] for record in batch.records] == [b"a"]


async def test_a_partition_without_allowance_keeps_its_records(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    await harness.publish(harness.two, b"b")
    client, _, _ = await started(harness)

    [batch] = await client.poll(lambda tp: Allowance(int(tp == harness.two), 1 << 20), 5.0)
    rest = await client.poll(nothing, 0.01)

    assert batch.topic_partition == harness.two
    assert rest == []
    assert client.position(harness.one) == 0
    assert [record.value for record in await take(client, 1)] == [b"a"]


async def test_wake_ends_a_waiting_poll(harness: Harness) -> None:
    client, _, _ = await started(harness)
    polling = asyncio.ensure_future(client.poll(unlimited, 60.0))
    await asyncio.sleep(0)

    client.wake()

    async with asyncio.timeout(5.0):
        assert await polling == []


async def test_a_waiting_poll_returns_when_a_record_arrives(harness: Harness) -> None:
    client, _, _ = await started(harness)
    polling = asyncio.ensure_future(poll_batches(client, timeout=60.0))
    await asyncio.sleep(0)

    await harness.publish(harness.one, b"a")

    async with asyncio.timeout(5.0):
        [batch] = await polling
    assert [record.value for record in batch.records] == [b"a"]


async def test_a_cancelled_poll_loses_nothing(harness: Harness) -> None:
    client, _, _ = await started(harness)
    polling = asyncio.ensure_future(poll_batches(client, timeout=60.0))
    await asyncio.sleep(0)

    await harness.publish(harness.one, b"a")
    polling.cancel()
    await asyncio.wait([polling])
    came_first = [] if polling.cancelled() else [record for batch in polling.result() for record in batch.records]

    assert [record.value for record in came_first or await take(client, 1)] == [b"a"]


async def test_a_paused_partition_returns_nothing_and_resumes_in_place(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b")
    client, _, _ = await started(harness)
    await client.poll(lambda _: Allowance(1, 1 << 20), 5.0)

    client.pause([harness.one])
    while_paused = await client.poll(unlimited, 0.01)
    client.resume([harness.one])

    assert while_paused == []
    assert [record.value for record in await take(client, 1)] == [b"b"]


async def test_a_seek_back_returns_records_again(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b")
    client, _, _ = await started(harness)
    await take(client, 2)

    client.seek(harness.one, 1)

    assert client.position(harness.one) == 1
    assert [record.value for record in await take(client, 1)] == [b"b"]


async def test_a_seek_back_while_records_arrive_returns_none_of_them(harness: Harness) -> None:
    """They follow the position before the seek, so the records between would be lost (I3)."""
    await harness.publish(harness.one, *(b"%d" % number for number in range(2_000)))
    client, _, _ = await started(harness)
    await take(client, 1)  # clients hand out a fetch in parts

    client.seek(harness.one, 0)

    again = [record.offset for record in await take(client, 1)]
    assert again == list(range(len(again)))


async def test_a_recreated_topic_is_reported_although_the_position_is_in_its_log(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b")
    client, _, _ = await started(harness)
    await take(client, 2)
    await harness.recreate()
    await harness.publish(harness.one, b"c", b"d", b"e")

    async with asyncio.timeout(30):
        while not (faults := [item for item in await client.poll(unlimited, 5.0) if isinstance(item, Fault)]):
            pass

    assert all(type(fault.error) is TopicRecreatedError for fault in faults)
    assert harness.one in [fault.topic_partition for fault in faults]


async def test_a_position_outside_the_log_faults_only_that_partition(harness: Harness) -> None:
    await harness.publish(harness.two, b"b")
    client, _, _ = await started(harness, opening=False)
    client.seek(harness.one, 5)
    client.seek(harness.two, 0)
    client.resume([harness.one, harness.two])

    found: list[FetchedBatch | Fault | Oversized] = []
    while len(found) < 2:
        found += await client.poll(unlimited, 5.0)

    [fault] = [item for item in found if isinstance(item, Fault)]
    assert fault.topic_partition == harness.one
    assert isinstance(fault.error, OffsetOutOfRangeError)
    assert fault.error.position == 5
    assert [item.topic_partition for item in found if isinstance(item, FetchedBatch)] == [harness.two]


async def test_a_seek_into_the_log_ends_the_fault_of_a_position_outside_it(harness: Harness) -> None:
    """The engine seeks there when retention has deleted what it was to read next."""
    await harness.publish(harness.one, b"a")
    client, _, _ = await started(harness, opening=False)
    client.seek(harness.one, 5)
    client.resume([harness.one])
    async with asyncio.timeout(30):
        while not (found := await client.poll(unlimited, 5.0)):
            pass
    assert [type(item) for item in found] == [Fault]

    client.seek(harness.one, 0)

    assert [record.value for record in await take(client, 1)] == [b"a"]


async def test_synchronous_calls_for_a_partition_that_is_not_assigned_do_nothing(harness: Harness) -> None:
    client, _, _ = await started(harness)
    other = TopicPartition(harness.one.topic, 99)

    client.pause([other])
    client.resume([other])
    client.seek(other, 3)

    assert client.position(other) is None
    assert client.end_offset(other) is None


# Questions and commits -------------------------------------------------------------------


async def test_log_ranges_partitions_and_ends_match_the_log(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b")
    client, _, _ = await started(harness)
    await take(client, 2)

    assert await client.log_ranges([harness.one, harness.two]) == {
        harness.one: LogRange(0, 2, 2),
        harness.two: LogRange(0, 0, 0),
    }
    assert (await client.partitions(harness.one.topic)).keys() == {0, 1}
    assert await client.partitions(f"{harness.one.topic}-nowhere") == {}
    assert client.end_offset(harness.one) == 2


async def test_topics_and_offsets_by_time_are_returned(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b")
    client, _, _ = await started(harness)

    assert harness.one.topic in await client.topics()
    assert "__consumer_offsets" not in await client.topics()
    assert await client.offset_at(harness.one, 0.0) == 0
    assert await client.offset_at(harness.one, 9e9) is None
    assert await client.offset_at(harness.two, 0.0) is None


async def test_a_commit_is_stored_with_its_metadata(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    client, _, membership = await started(harness)

    await client.commit({harness.one: Committed(1, "note")}, membership)

    assert await client.committed([harness.one, harness.two]) == {harness.one: Committed(1, "note"), harness.two: None}


@pytest.mark.parametrize("wrong", ["generation", "member"])
async def test_a_commit_under_another_membership_is_refused(harness: Harness, wrong: str) -> None:
    client, _, (member_id, generation) = await started(harness)
    other = Membership(member_id, generation + 1) if wrong == "generation" else Membership("somebody", generation)

    with pytest.raises(CommitRefusedError):
        await client.commit({harness.one: Committed(0, "")}, other)

    assert await client.committed([harness.one]) == {harness.one: None}


# Rebalances ------------------------------------------------------------------------------


@when_everything_is_taken
async def test_a_rebalance_keeps_the_member_id_and_increments_the_generation(harness: Harness) -> None:
    client, listener, before = await started(harness)

    await harness.rebalance()
    after = await listener.assignments.get()

    assert [type(event) for event in listener.events] == [Assigned, Revoked, Assigned]
    assert listener.events[1] == Revoked((harness.one, harness.two), lost=False)
    assert after.membership == Membership(before.member_id, before.generation + 1)
    assert client.membership() == after.membership


@when_everything_is_taken
async def test_the_group_waits_for_revoked_and_accepts_commits_until_it_returns(harness: Harness) -> None:
    await harness.publish(harness.one, b"a")
    client, listener, membership = await started(harness)
    inside = asyncio.Event()
    go_on = asyncio.Event()

    async def drain() -> None:
        inside.set()
        await go_on.wait()
        await client.commit({harness.one: Committed(1, "")}, client.membership())

    listener.on_revoked = drain
    await harness.rebalance()
    await inside.wait()
    while_revoking = await client.poll(unlimited, 0.01)
    still = client.membership()
    go_on.set()
    await listener.assignments.get()

    assert while_revoking == []
    assert still == membership
    assert await client.committed([harness.one]) == {harness.one: Committed(1, "")}


@when_everything_is_taken
async def test_after_a_rebalance_a_partition_is_paused_again(harness: Harness) -> None:
    await harness.publish(harness.one, b"a", b"b")
    client, listener, _ = await started(harness)
    await client.poll(lambda _: Allowance(1, 1 << 20), 5.0)
    listener._opening = False

    await harness.rebalance()
    await listener.assignments.get()

    assert await client.poll(unlimited, 0.01) == []


@when_everything_is_taken
async def test_an_old_generation_is_refused_after_a_rebalance(harness: Harness) -> None:
    client, listener, old = await started(harness)
    await harness.rebalance()
    await listener.assignments.get()

    with pytest.raises(CommitRefusedError):
        await client.commit({harness.one: Committed(0, "")}, old)


async def test_a_lost_membership_is_reported_and_blocks_commits(harness: Harness) -> None:
    client, listener, before = await started(harness)
    await harness.forget(before.member_id)

    assert await listener.revocations.get() == Revoked((harness.one, harness.two), lost=True)
    with pytest.raises(CommitRefusedError):
        await client.commit({harness.one: Committed(0, "")}, before)
    after = await listener.assignments.get()
    assert after.membership.member_id != before.member_id
    assert client.membership() == after.membership


@when_everything_is_taken
async def test_two_members_share_the_partitions_and_the_remaining_one_takes_over(harness: Harness) -> None:
    one, listener, _ = await started(harness)
    two, other, _ = await started(harness)
    shared = await listener.assignments.get()
    mine, others = set(shared.partitions), {tp for event in other.events for tp in event.partitions}

    await two.close()
    alone = await listener.assignments.get()

    assert mine | others == {harness.one, harness.two}
    assert not mine & others
    assert alone.partitions == (harness.one, harness.two)
    assert all(isinstance(event, Assigned) for event in other.events), "close calls no listener"
    assert one.membership() == alone.membership


@with_every_rebalance
async def test_a_partition_that_moves_is_read_by_the_member_that_joins(harness: Harness) -> None:
    """The group assigns it once the previous member has released it, without a third member that joins or leaves."""
    one, listener, _ = await started(harness)
    two = harness.client()
    other = RecordingListener(two)
    await two.start([harness.one.topic], None, other)

    theirs: tuple[TopicPartition, ...] = ()
    async with asyncio.timeout(30.0):
        while not theirs:  # with incremental rebalances, the first assignment has only partitions that were free
            theirs = (await other.assignments.get()).partitions

    (moved,) = theirs
    (kept,) = {harness.one, harness.two} - {moved}
    assert any(moved in revoked.partitions for revoked in listener.events if isinstance(revoked, Revoked))
    for partition in (moved, kept):
        await harness.publish(partition, b"a")
    assert [record.topic_partition for record in await take(two, 1)] == [moved]
    assert [record.topic_partition for record in await take(one, 1)] == [kept]
