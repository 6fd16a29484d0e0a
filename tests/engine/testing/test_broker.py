"""The in-memory broker: topics, scripted failures and waiting."""

import asyncio

import pytest

from aioshard.errors import CommitError, ConnectError
from aioshard.ports import Committed, Membership
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker

ONE = TopicPartition("orders", 0)


@pytest.fixture
def broker() -> InMemoryBroker:
    return InMemoryBroker(clock=lambda: 12.5)


def member(broker: InMemoryBroker) -> Membership:
    group = broker.group("billing")
    return group.adopt(group.join(["orders"]))


def test_a_topic_appears_on_first_use(broker: InMemoryBroker) -> None:
    record = broker.publish("orders", b"x", key=b"k", headers=[("h", b"1")])

    assert broker.topics() == {"orders": 4}
    assert record.headers == (("h", b"1"),)
    assert record.timestamp == 12.5


def test_a_key_stays_in_its_partition_and_records_without_one_take_turns(broker: InMemoryBroker) -> None:
    keyed = {broker.publish("orders", b"x", key=b"k").partition for _ in range(4)}
    others = [broker.publish("orders", b"x").partition for _ in range(5)]

    assert len(keyed) == 1
    assert others == [0, 1, 2, 3, 0]


def test_a_partition_that_does_not_exist_is_refused(broker: InMemoryBroker) -> None:
    broker.create_topic("orders", 2)

    with pytest.raises(LookupError, match="partitions 0 to 1 and not 2"):
        broker.publish("orders", b"x", partition=2)
    with pytest.raises(LookupError, match="unknown topic 'order'"):
        broker.existing_log(TopicPartition("order", 0))
    with pytest.raises(ValueError, match="exists already with 2 partitions"):
        broker.create_topic("orders", 2)


def test_records_are_listed_in_the_order_of_their_timestamps(broker: InMemoryBroker) -> None:
    for timestamp, partition in ((3.0, 0), (1.0, 1), (2.0, 0)):
        broker.publish("orders", b"x", partition=partition, timestamp=timestamp)

    assert [record.timestamp for record in broker.records("orders")] == [1.0, 2.0, 3.0]
    assert [record.timestamp for record in broker.records("orders", 0)] == [2.0, 3.0]
    assert broker.records("nothing") == []


def test_holes_made_at_the_broker_wake_waiting_clients(broker: InMemoryBroker) -> None:
    heard: list[int] = []
    for _ in range(4):
        broker.publish("orders", b"x", key=b"k", partition=0)

    def hear() -> None:
        heard.append(broker.log("orders", 0).end)

    broker.watch(hear)

    broker.log("orders", 0).delete(1)
    broker.log("orders", 0).truncate_before(1)
    broker.log("orders", 0).begin_transaction()
    broker.publish("orders", b"x", partition=0)
    broker.log("orders", 0).end_transaction(commit=False)
    broker.log("orders", 0).compact()
    broker.unwatch(hear)
    broker.log("orders", 0).skip(1)

    assert [record.offset for record in broker.records("orders", 0)] == [3]
    assert heard == [4, 4, 5, 6, 6]
    assert broker.log("orders", 0).end == 7


def test_a_recreated_topic_starts_at_0_and_can_forget_its_commits(broker: InMemoryBroker) -> None:
    broker.publish("orders", b"x", partition=0)
    group = broker.group("billing")
    group.commit_from_outside({ONE: 1})

    broker.recreate("orders", forget_commits=False)
    kept = broker.committed("billing", "orders", 0)
    broker.recreate("orders")

    assert kept == 1
    assert broker.committed("billing", "orders", 0) is None
    assert broker.log("orders", 0).end == 0


def test_new_partitions_and_matching_topics_make_the_group_rebalance(broker: InMemoryBroker) -> None:
    broker.create_topic("orders", 1)
    group = broker.group("billing")
    member_id = group.join((), "orders.*")
    group.adopt(member_id)
    broker.add_partitions("orders", 1)
    group.rejoin(member_id)
    grown = group.assignment(member_id)

    broker.create_topic("orders-eu", 1)
    group.rejoin(member_id)

    assert grown == (ONE, TopicPartition("orders", 1))
    assert TopicPartition("orders-eu", 0) in group.assignment(member_id)


def test_a_commit_can_fail_and_still_be_applied(broker: InMemoryBroker) -> None:
    membership = member(broker)
    broker.fail_next_commit(CommitError("no answer"))
    broker.fail_next_commit(CommitError("no answer"), applied=True)

    with pytest.raises(CommitError):
        broker.commit("billing", {ONE: Committed(1, "")}, membership)
    after_the_first = broker.committed("billing", "orders", 0)
    with pytest.raises(CommitError):
        broker.commit("billing", {ONE: Committed(2, "")}, membership)

    assert after_the_first is None
    assert broker.committed("billing", "orders", 0) == 2
    assert [request.applied for request in broker.commits] == [False, True]


def test_the_history_says_whether_a_commit_was_for_owned_partitions(broker: InMemoryBroker) -> None:
    """A broker accepts an offset for a partition that the member does not have; a correct member sends none."""
    broker.create_topic("orders", 2)
    membership = member(broker)
    broker.commit("billing", {ONE: Committed(0, "")}, membership)
    broker.commit("billing", {TopicPartition("clicks", 0): Committed(0, "")}, membership)

    assert [request.owned for request in broker.commits] == [True, False]


def test_an_unavailable_broker_refuses_requests(broker: InMemoryBroker) -> None:
    membership = member(broker)
    broker.available = False

    with pytest.raises(ConnectError, match="not available"):
        broker.commit("billing", {ONE: Committed(0, "")}, membership)
    assert broker.commits == []


async def test_until_waits_for_its_condition(broker: InMemoryBroker) -> None:
    waiting = asyncio.ensure_future(broker.until(lambda: len(broker.records("orders")) == 2))
    broker.publish("orders", b"a")
    await asyncio.sleep(0)
    early = waiting.done()

    broker.publish("orders", b"b")
    async with asyncio.timeout(5.0):
        await waiting

    assert not early
