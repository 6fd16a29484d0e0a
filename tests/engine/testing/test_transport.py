"""The in-memory client beyond the port: latency, crashes, several members, scripted faults."""

import asyncio
import random
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest

from aioshard.errors import (
    ClientLostError,
    CommitError,
    CommitRefusedError,
    ConnectError,
    CorruptRecordError,
    StateError,
    TransportError,
)
from aioshard.ports import NOT_A_MEMBER, Committed, Fault, FetchedBatch, Membership
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryTransport, Operation, run
from tests.engine.testing.recording import Assigned, RecordingListener, Revoked, take, unlimited

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)


def make_broker() -> InMemoryBroker:
    broker = InMemoryBroker(clock=lambda: 0.0)
    broker.create_topic("orders", 2)
    return broker


async def started(broker: InMemoryBroker, **options: Any) -> tuple[InMemoryTransport, RecordingListener]:
    client = InMemoryTransport(broker, "billing", **options)
    listener = RecordingListener(client)
    await client.start(["orders"], None, listener)
    await listener.assignments.get()
    return client, listener


def takes(**seconds: float) -> Callable[[Operation], float]:
    return lambda operation: seconds.get(operation.replace(" ", "_"), 0.0)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_operations_take_the_configured_latency() -> None:
    async def scenario() -> list[float]:
        broker = make_broker()
        times = [now()]
        client, _ = await started(broker, latency=takes(start=1.0, join=2.0, commit=3.0, commit_reply=4.0, close=5.0))
        times.append(now())
        await client.commit({ONE: Committed(0, "")}, client.membership())
        times.append(now())
        await client.close()
        return [*times, now()]

    assert run(scenario()) == [0.0, 3.0, 10.0, 15.0]


def test_responses_with_records_take_the_fetch_latency() -> None:
    async def scenario() -> list[float]:
        broker = make_broker()
        client, _ = await started(broker, latency=takes(fetch=2.0), max_batch_records=1)
        for value in (b"a", b"b", b"c"):
            broker.publish("orders", value, partition=0)
        times = []
        for _ in range(3):
            await take(client, 1)
            times.append(now())
        await client.close()
        return times

    assert run(scenario()) == [0.0, 2.0, 4.0]


def test_a_woken_poll_keeps_its_fetch_in_flight() -> None:
    """Else a caller that wakes often enough would never get anything."""

    async def scenario() -> float:
        broker = make_broker()
        client, _ = await started(broker, latency=takes(fetch=1.0))
        broker.publish("orders", b"a", partition=0)
        await take(client, 1)
        broker.publish("orders", b"b", partition=0)
        for _ in range(3):
            polling = asyncio.ensure_future(client.poll(unlimited, 10.0))
            await asyncio.sleep(0.3)
            client.wake()
            assert await polling == []
        await take(client, 1)
        await client.close()
        return now()

    assert run(scenario()) == pytest.approx(1.0)


def test_a_commit_cancelled_after_it_was_applied_stays_applied() -> None:
    async def scenario() -> int | None:
        broker = make_broker()
        client, _ = await started(broker, latency=takes(commit_reply=60.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await client.commit({ONE: Committed(0, "")}, client.membership())
        await client.close()
        return broker.committed("billing", "orders", 0)

    assert run(scenario()) == 0


def test_a_long_hole_comes_as_batches_without_records() -> None:
    async def scenario() -> list[tuple[int, int]]:
        broker = make_broker()
        broker.log("orders", 0).skip(5)
        broker.publish("orders", b"a", partition=0)
        client, _ = await started(broker, max_fetch_offsets=2)
        found: list[tuple[int, int]] = []
        while client.position(ONE) != 6:
            for batch in await client.poll(unlimited, 1.0):
                assert isinstance(batch, FetchedBatch)
                found.append((len(batch.records), batch.next_offset))
        await client.close()
        return found

    assert run(scenario()) == [(0, 2), (0, 4), (1, 6)]


def test_only_read_uncommitted_sees_an_open_transaction() -> None:
    async def scenario() -> tuple[list[Any], int, list[int]]:
        broker = make_broker()
        broker.log("orders", 0).begin_transaction()
        broker.publish("orders", b"open", partition=0)
        careful, _ = await started(broker)
        unseen = list(await careful.poll(unlimited, 0.1))
        end = (await careful.log_ranges([ONE]))[ONE].end
        await careful.close()
        eager, _ = await started(broker, isolation_level="read_uncommitted")
        seen = [record.offset for record in await take(eager, 1)]
        await eager.close()
        return unseen, end, seen

    assert run(scenario()) == ([], 0, [0])


def test_all_members_release_concurrently() -> None:
    async def scenario() -> float:
        broker = make_broker()
        clients = [await started(broker) for _ in range(2)]
        await broker.until(lambda: not broker.group("billing").rebalancing)
        for _, listener in clients:
            listener.on_revoked = lambda: asyncio.sleep(3.0)
        before = now()
        broker.group("billing").rebalance()
        await broker.until(lambda: not broker.group("billing").rebalancing)
        took = now() - before
        for _, listener in clients:
            listener.on_revoked = None
        for client, _ in clients:
            await client.close()
        return took

    assert run(scenario()) == 3.0


def test_between_two_generations_a_client_is_not_a_member() -> None:
    """It has given its partitions back and waits for another, who has not: what it had may be taken already."""

    async def scenario() -> None:
        broker = make_broker()
        one, _ = await started(broker)
        two, slow = await started(broker)
        await broker.until(lambda: not broker.group("billing").rebalancing)
        membership = one.membership()
        slow.on_revoked = lambda: asyncio.sleep(10.0)
        broker.group("billing").rebalance()
        await asyncio.sleep(1.0)
        assert one.membership() == NOT_A_MEMBER
        with pytest.raises(CommitRefusedError):
            await one.commit({ONE: Committed(0, "")}, membership)
        slow.on_revoked = None
        await broker.until(lambda: not broker.group("billing").rebalancing)
        assert one.membership() == Membership(membership.member_id, membership.generation + 1)
        await two.close()
        await one.close()

    run(scenario())


def test_a_member_that_exceeds_the_rebalance_timeout_rejoins_under_a_new_id() -> None:
    async def scenario() -> tuple[bool, list[type]]:
        broker = make_broker()
        client, listener = await started(broker, rebalance_timeout=5.0)
        old = client.membership()
        errors = []

        async def hold_on() -> None:
            await asyncio.sleep(6.0)
            try:
                await client.commit({ONE: Committed(0, "")}, old)
            except CommitError as error:
                errors.append(type(error))

        listener.on_revoked = hold_on
        broker.group("billing").rebalance()
        new = (await listener.assignments.get()).membership
        await client.close()
        return new.member_id == old.member_id, errors

    same, errors = run(scenario())
    assert not same
    assert [error.__name__ for error in errors] == ["CommitRefusedError"]


def test_a_crashed_client_keeps_its_partitions_until_its_session_expires() -> None:
    async def scenario() -> tuple[list[float], int | None]:
        broker = make_broker()
        dead, _ = await started(broker, session_timeout=10.0)
        membership = dead.membership()
        dead.crash()
        with pytest.raises(CommitError):
            await dead.commit({ONE: Committed(9, "")}, membership)
        with pytest.raises(ClientLostError):
            await dead.poll(unlimited, 1.0)
        with pytest.raises(ConnectError):
            await dead.committed([ONE])
        times = [now()]
        alive, listener = await started(broker)
        times.append(now())
        assert listener.events[0].partitions == (ONE, TWO)
        await alive.close()
        await dead.close()
        return times, broker.committed("billing", "orders", 0)

    assert run(scenario()) == ([0.0, 10.0], None)


def test_a_killed_client_raises_on_every_call() -> None:
    async def scenario() -> None:
        broker = make_broker()
        client, _ = await started(broker)
        polling = asyncio.ensure_future(client.poll(unlimited, 60.0))
        await asyncio.sleep(0)
        client.kill()
        for attempt in (polling, client.poll(unlimited, 60.0)):
            with pytest.raises(ClientLostError):
                await attempt
        assert broker.group("billing").members
        await client.close()
        assert not broker.group("billing").members
        assert now() == 0.0

    run(scenario())


def test_a_scripted_poll_failure_ends_the_client() -> None:
    async def scenario() -> None:
        broker = make_broker()
        client, _ = await started(broker)
        broker.fail_next_poll(TransportError("fenced"))
        for _ in range(2):
            with pytest.raises(TransportError, match="fenced"):
                await client.poll(unlimited, 0.1)
        await client.close()

    run(scenario())


def test_an_unreadable_partition_is_reported_once_a_second() -> None:
    async def scenario() -> tuple[list[float], list[bytes | None]]:
        broker = make_broker()
        client, _ = await started(broker)
        broker.publish("orders", b"a", partition=0)
        broker.fail_fetches("orders", 0, CorruptRecordError("bad checksum"))
        times = []
        for _ in range(3):
            [fault] = await client.poll(unlimited, 60.0)
            assert isinstance(fault, Fault)
            times.append(now())
        broker.fail_fetches("orders", 0, None)
        values = [record.value for record in await take(client, 1)]
        await client.close()
        return times, values

    assert run(scenario()) == ([0.0, 1.0, 2.0], [b"a"])


def test_a_broker_outage_answers_nothing_and_loses_nothing() -> None:
    async def scenario() -> None:
        broker = make_broker()
        client, _ = await started(broker)
        broker.publish("orders", b"a", partition=0)
        broker.available = False
        assert await client.poll(unlimited, 0.1) == []
        with pytest.raises(CommitError):
            await client.commit({ONE: Committed(0, "")}, client.membership())
        with pytest.raises(ConnectError):
            await client.log_ranges([ONE])
        with pytest.raises(ConnectError):
            await InMemoryTransport(broker, "billing").start(["orders"], None, RecordingListener(client))
        broker.available = True
        assert len(await take(client, 1)) == 1
        await client.close()

    run(scenario())


def test_a_listener_that_raises_ends_the_client_with_that_error() -> None:
    async def scenario() -> BaseException | None:
        broker = make_broker()
        client, listener = await started(broker)

        async def fail() -> None:
            message = "a bug"
            raise RuntimeError(message)

        listener.on_revoked = fail
        broker.group("billing").rebalance()
        with pytest.raises(ClientLostError, match="the group listener raised RuntimeError: a bug") as caught:
            await client.poll(unlimited, 1.0)
        await client.close()
        return caught.value.__cause__

    assert isinstance(run(scenario()), RuntimeError)


def test_close_waits_for_revoked_and_leaves_even_when_cancelled() -> None:
    async def scenario() -> tuple[float, tuple[str, ...]]:
        broker = make_broker()
        client, listener = await started(broker)
        listener.on_revoked = lambda: asyncio.sleep(3.0)
        broker.group("billing").rebalance()
        await listener.revocations.get()
        await client.close()
        closed_at = now()

        client, listener = await started(broker)
        listener.on_revoked = lambda: asyncio.sleep(100.0)
        broker.group("billing").rebalance()
        await listener.revocations.get()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await client.close()
        return closed_at, broker.group("billing").members

    assert run(scenario()) == (3.0, ())


def test_a_client_is_started_once_and_closing_twice_is_harmless() -> None:
    async def scenario() -> None:
        client, listener = await started(make_broker())
        with pytest.raises(StateError, match="started before"):
            await client.start(["orders"], None, listener)
        await client.close()
        await client.close()
        assert client.membership() == NOT_A_MEMBER
        with pytest.raises(ClientLostError, match="the client is closed"):
            await client.poll(unlimited, 1.0)

    run(scenario())


class Owner(RecordingListener):
    """Checks that between its `assigned` and its `revoked` a member is the only owner of a partition."""

    def __init__(self, client: InMemoryTransport, rng: random.Random, owners: dict[TopicPartition, "Owner"]) -> None:
        super().__init__(client)
        self.shared: list[TopicPartition] = []
        self._rng = rng
        self._owners = owners

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        super().lost(partitions)
        self.release()

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        await asyncio.sleep(self._rng.choice([0.0, 0.5]))
        await super().revoked(partitions)
        self.release()

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        for partition in partitions:
            if partition in self._owners:
                self.shared.append(partition)
            self._owners[partition] = self
        super().assigned(partitions, membership)

    def release(self) -> None:
        for partition in [ONE, TWO]:
            if self._owners.get(partition) is self:
                del self._owners[partition]


@pytest.mark.parametrize("seed", range(20))
def test_a_partition_has_one_owner_under_any_latency(seed: int) -> None:
    rng = random.Random(seed)
    broker = make_broker()
    group = broker.group("billing")
    members: list[tuple[InMemoryTransport, Owner]] = []
    assignments: list[Assigned] = []

    async def join() -> None:
        client = InMemoryTransport(broker, "billing", latency=lambda _: rng.choice([0.0, 0.1, 0.7]))
        owner = Owner(client, rng, owners)
        await client.start(["orders"], None, owner)
        members.append((client, owner))

    async def leave() -> None:
        client, owner = members.pop(rng.randrange(len(members)))
        await client.close()
        owner.release()
        assert owner.shared == []
        assignments.extend(event for event in owner.events if isinstance(event, Assigned))

    async def scenario() -> None:
        for _ in range(40):
            if len(members) < 2 or (rng.random() < 0.2 and len(members) < 4):
                await join()
            elif rng.random() < 0.15:
                await leave()
            else:
                rng.choice(scripts)()
            await asyncio.sleep(rng.choice([0.0, 0.2, 1.0]))
        while members:
            await leave()

    owners: dict[TopicPartition, Owner] = {}
    scripts: list[Callable[[], None]] = [group.rebalance, partial(group.revoke, ONE), partial(group.assign, ONE)]
    run(scenario(), seed=seed)

    memberships = [event.membership for event in assignments]
    assert len(set(memberships)) == len(memberships) > 5


def test_events_alternate_between_assigned_and_revoked() -> None:
    async def scenario() -> list[Revoked | Assigned]:
        broker = make_broker()
        client, listener = await started(broker)
        broker.group("billing").revoke(TopicPartition("orders", 0))
        await listener.assignments.get()
        broker.group("billing").assign(TopicPartition("orders", 0))
        await listener.assignments.get()
        await client.close()
        return listener.events

    events = run(scenario())
    assert [event.partitions for event in events] == [(ONE, TWO), (ONE, TWO), (TWO,), (TWO,), (ONE, TWO)]


def test_a_cut_off_member_gives_up_its_partitions_when_its_session_expires() -> None:
    async def scenario() -> None:
        broker = make_broker()
        client, listener = await started(broker, session_timeout=6.0)
        before = client.membership()
        client.cut_off()
        broker.publish("orders", b"a", partition=0)
        assert await take(client, 1), "fetches continue"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await client.commit({ONE: Committed(1, "")}, before)
        assert await listener.revocations.get() == Revoked((ONE, TWO), lost=True)
        assert now() == pytest.approx(6.0)
        assert client.membership() == NOT_A_MEMBER
        assert before.member_id not in broker.group("billing").members
        assert broker.committed("billing", "orders", 0) is None
        client.reconnect()
        assigned = await listener.assignments.get()
        assert assigned.partitions == (ONE, TWO)
        assert client.membership().member_id not in ("", before.member_id)
        await client.close()

    run(scenario())


def test_the_group_does_not_notice_a_short_disconnection() -> None:
    async def scenario() -> None:
        broker = make_broker()
        client, _ = await started(broker, session_timeout=6.0)
        before = client.membership()
        client.cut_off()
        await asyncio.sleep(5.0)
        client.reconnect()
        await asyncio.sleep(60.0)
        assert client.membership() == before
        await client.commit({ONE: Committed(0, "")}, before)
        await client.close()

    run(scenario())


def test_the_group_drops_a_member_closed_while_cut_off() -> None:
    async def scenario() -> None:
        broker = make_broker()
        client, _ = await started(broker, session_timeout=6.0)
        client.cut_off()
        await client.close()
        client.reconnect()
        assert broker.group("billing").members
        await asyncio.sleep(6.1)
        assert not broker.group("billing").members

    run(scenario())


def test_nothing_is_reported_for_a_partition_without_a_leader() -> None:
    async def scenario() -> None:
        broker = make_broker()
        client, _ = await started(broker)
        broker.set_leader("orders", 0, available=False)
        broker.publish("orders", b"a", partition=0)
        broker.publish("orders", b"b", partition=1)
        assert [record.partition for record in await take(client, 1)] == [1]
        assert await client.poll(unlimited, 1.0) == []
        assert list(await client.log_ranges([ONE, TWO])) == [TWO]
        with pytest.raises(TransportError, match="orders/0"):
            await client.offset_at(ONE, 0.0)
        broker.set_leader("orders", 0, available=True)
        assert [record.partition for record in await take(client, 1)] == [0]
        await client.close()

    run(scenario())
