"""First positions of several members of a new group under `latest`."""

import asyncio

from aioshard import App, Record, TopicPartition
from aioshard.errors import CommitError
from aioshard.testing import InMemoryBroker, InMemoryTransport, run


class Members:
    """A topic with records that are older than the group, and members of it."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(partitions=4, clock=lambda: 0.0)
        for number in range(100):
            self.broker.publish("orders", b"old", key=b"%d" % number)
        self.old = 0

    async def member(self, *, begins: float, commit_takes: float) -> None:
        app = App("new", auto_offset_reset="latest", start_timeout=None)

        @app.consume("orders")
        async def handle(record: Record) -> None:
            self.old += record.value == b"old"

        def latency(operation: str) -> float:
            return commit_takes if operation == "commit" else 0.0

        await asyncio.sleep(begins)
        async with app.started(lambda: InMemoryTransport(self.broker, "new", latency=latency)):
            await asyncio.sleep(30.0)


def test_two_members_starting_together_skip_old_records() -> None:
    members = Members()

    async def test() -> None:
        await asyncio.gather(
            members.member(begins=0.0, commit_takes=0.01), members.member(begins=0.0, commit_takes=0.9)
        )

    run(test())

    assert members.old == 0


def test_a_member_joining_between_first_commits_does_not_deliver_old_records() -> None:
    members = Members()

    async def test() -> None:
        await asyncio.gather(
            members.member(begins=0.0, commit_takes=0.01),
            members.member(begins=0.0, commit_takes=0.9),
            members.member(begins=0.5, commit_takes=0.01),
        )

    run(test())

    assert members.old == 0


def test_no_record_is_delivered_before_the_first_position_is_committed() -> None:
    """Under `latest` a crash before it would lose what came in between (I3)."""
    app = App("new", auto_offset_reset="latest", start_timeout=None, commit_timeout=1.0)
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
    committed: list[int | None] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:  # noqa: ARG001
        committed.append(broker.committed("new", "orders", 0))

    async def test() -> None:
        broker.publish("orders", b"old")
        for _ in range(40):
            broker.fail_next_commit(CommitError("no time"))
        async with app.started(lambda: InMemoryTransport(broker, "new")):
            await asyncio.sleep(1.5)
            broker.publish("orders", b"new")
            await asyncio.sleep(1.0)
            assert committed == []
            assert "no time" in str(app.statistics().trouble)
            await asyncio.sleep(10.0)

    run(test())

    assert len(committed) <= 1
    assert None not in committed


def test_a_partition_added_later_starts_at_its_beginning() -> None:
    """The group knows the topic: what is in the new partition came after the group's first position."""
    app = App("new", auto_offset_reset="latest")
    broker = InMemoryBroker(partitions=2, clock=lambda: 0.0)
    seen: list[tuple[int, bytes | None]] = []

    @app.consume("orders")
    async def handle(record: Record) -> None:
        seen.append((record.partition, record.value))

    async def test() -> None:
        broker.publish("orders", b"before", partition=0)
        broker.publish("orders", b"new", partition=1)
        known = {TopicPartition("orders", 0): 1}
        broker.group("new").commit_from_outside(known, metadata="aioshard/1 done=1:?")
        async with app.started(lambda: InMemoryTransport(broker, "new")):
            await asyncio.sleep(1.0)

    run(test())

    assert seen == [(1, b"new")]
