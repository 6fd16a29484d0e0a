"""The model of brokers with transactions answers as Kafka 4.1.1 does: each sequence here was tried on such brokers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from aioshard.kafka.batches import BatchBuilder, Identity
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.errors import ConnectionLostError, WireError
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from aioshard.kafka.wire.start import new_cluster
from aioshard.ports import Message
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster
from tests.support.model_transactions import HELD, LOST_ANSWER, NO_FAULT, Fault, ModelTransactions

ID, GROUP = "group:one", "group"
OUTPUT, INPUT = TopicPartition("outputs", 0), TopicPartition("inputs", 0)
MEMBER = Member(3, "member")
NONE = (-1, -1)


class RawProducer:
    """Sends requests as they are, and returns codes.

    Attributes:
        identity: The producer id and epoch of the next requests.
    """

    def __init__(self, model: ModelTransactions, cluster: Cluster, level: int) -> None:
        self.model = model
        self.cluster = cluster
        self.level = level
        self.identity = NONE

    async def ask(self, api: Api, **values: Any) -> Any:
        """Sends a request to the broker, in the newest version that belongs to the protocol."""
        newest = {PRODUCE: 11, TXN_OFFSET_COMMIT: 4, END_TXN: 4, ADD_OFFSETS_TO_TXN: 3}
        is_limited = self.level < 2 and api in newest
        request = api(**values)
        return await self.cluster.ask(1, request.up_to(newest[api]) if is_limited else request)

    async def init(self, identity: tuple[int, int] | None = None) -> tuple[int, tuple[int, int]]:
        """Requests an epoch once, and takes it."""
        known = self.identity if identity is None else identity
        answer = await self.ask(
            INIT_PRODUCER_ID, transactional_id=ID, timeout_ms=20_000, producer_id=known[0], epoch=known[1]
        )
        issued = (answer.producer_id, answer.epoch)
        code: int = answer.error
        if not code:
            self.identity = issued
        return code, issued

    async def init_until_final(self, identity: tuple[int, int] | None = None) -> tuple[int, tuple[int, int]]:
        """Requests an epoch until the transaction before has ended."""
        for _ in range(100):
            answer = await self.init(identity)
            if answer[0] != 51:
                return answer
            await asyncio.sleep(0.02)
        pytest.fail("the transaction does not end")

    async def add(self) -> int:
        """Adds the output and the group, if the version has requests for that."""
        if self.level >= 2:
            return 0
        values = {"transactional_id": ID, "producer_id": self.identity[0], "epoch": self.identity[1]}
        answer = await self.ask(ADD_PARTITIONS_TO_TXN, **values, topics=[{"topic": OUTPUT.topic, "partitions": [0]}])
        await self.ask(ADD_OFFSETS_TO_TXN, **values, group=GROUP)
        code: int = answer.topics[0].partitions[0].error
        return code

    async def produce(self, value: bytes, sequence: int = 0, identity: tuple[int, int] | None = None) -> int:
        """Writes one message."""
        builder = BatchBuilder(Identity(*(identity or self.identity)), sequence, is_transactional=True)
        assert builder.add(Message(OUTPUT.topic, value), 0)
        parts = [{"partition": 0, "records": builder.build()}]
        answer = await self.ask(
            PRODUCE,
            transactional_id=ID,
            acks=-1,
            timeout_ms=1000,
            topics=[{"topic": OUTPUT.topic, "partitions": parts}],
        )
        code: int = answer.topics[0].partitions[0].error
        return code

    async def commit_offset(self, offset: int, member: Member = MEMBER) -> int:
        """Commits an offset of the input."""
        row = {"partition": 0, "offset": offset, "leader_epoch": -1, "metadata": f"at {offset}"}
        answer = await self.ask(
            TXN_OFFSET_COMMIT,
            transactional_id=ID,
            group=GROUP,
            producer_id=self.identity[0],
            epoch=self.identity[1],
            generation=member.generation,
            member=member.member_id,
            instance=member.instance_id,
            topics=[{"topic": INPUT.topic, "partitions": [row]}],
        )
        code: int = answer.topics[0].partitions[0].error
        return code

    async def end(self, *, commit: bool, identity: tuple[int, int] | None = None) -> tuple[int, tuple[int, int]]:
        """Ends the transaction once; takes the next epoch if there is one."""
        known = identity or self.identity
        answer = await self.ask(END_TXN, transactional_id=ID, producer_id=known[0], epoch=known[1], commit=commit)
        code: int = answer.error
        following = (answer.producer_id, answer.epoch) if self.level >= 2 else NONE
        if not code and self.level >= 2 and identity is None:
            self.identity = following
        return code, following


def scenario(test: Callable[[RawProducer], Awaitable[None]], *, level: int = 2) -> None:
    """Runs a test with a producer that has an epoch."""

    async def live(network: MemoryNetwork) -> None:
        brokers = ModelCluster(network)
        brokers.create("outputs")
        brokers.create("inputs")
        model = ModelTransactions(brokers, GROUP, level=level)
        model.group.set_members(MEMBER)
        cluster = new_cluster(brokers.settings)
        cluster.start()
        await cluster.look_up(["outputs", "inputs"])
        producer = RawProducer(model, cluster, level)
        try:
            assert await producer.init() == (0, (4, 0))
            await test(producer)
        finally:
            await cluster.close()
            await model.close()

    run_on_network(live)


BOTH = pytest.mark.parametrize("level", [1, 2])


@BOTH
def test_a_commit_makes_messages_and_offsets_visible(level: int) -> None:
    async def test(producer: RawProducer) -> None:
        assert await producer.add() == 0
        assert await producer.produce(b"first") == 0
        assert await producer.commit_offset(10) == 0
        assert producer.model.visible("outputs") == {0: []}

        assert await producer.end(commit=True) == (0, (4, 1) if level == 2 else NONE)
        await asyncio.sleep(1)

        assert producer.model.visible("outputs") == {0: [b"first"]}
        assert producer.model.committed[INPUT].offset == 10
        assert producer.model.is_calm

    scenario(test, level=level)


@BOTH
def test_a_repeated_end_tells_the_outcome_until_a_newer_epoch_exists(level: int) -> None:
    async def test(producer: RawProducer) -> None:
        old = producer.identity
        await producer.add()
        await producer.produce(b"first")
        first = await producer.end(commit=True)
        assert await producer.end(commit=True, identity=old) == (51, NONE)
        await asyncio.sleep(1)

        assert await producer.end(commit=True, identity=old) == first
        assert (await producer.end(commit=False, identity=old))[0] == 48

        assert await producer.init(old) == (0, (4, 1))
        assert (await producer.end(commit=True, identity=old))[0] == 90
        assert await producer.produce(b"late", 1, old) == 47

    scenario(test, level=level)


@pytest.mark.parametrize(("level", "issued"), [(1, (90, NONE)), (2, (0, (4, 1)))])
def test_a_request_for_an_epoch_aborts_the_transaction_and_keeps_the_producer_only_in_the_second_version(
    level: int, issued: tuple[int, tuple[int, int]]
) -> None:
    async def test(producer: RawProducer) -> None:
        await producer.add()
        await producer.produce(b"first")

        assert await producer.init() == (51, NONE)
        assert await producer.init_until_final() == issued
        assert producer.model.visible("outputs") == {0: []}

    scenario(test, level=level)


@pytest.mark.parametrize(("level", "ended", "issued"), [(1, 90, (90, NONE)), (2, 48, (0, (4, 1)))])
def test_a_time_out_aborts_a_transaction(level: int, ended: int, issued: tuple[int, tuple[int, int]]) -> None:
    async def test(producer: RawProducer) -> None:
        await producer.add()
        await producer.produce(b"first")
        await asyncio.sleep(31)

        assert await producer.end(commit=True) == (ended, NONE)
        assert await producer.produce(b"second", 1) == 47
        assert await producer.commit_offset(1) == 47
        assert await producer.init() == issued

    scenario(test, level=level)


def test_an_end_by_request_of_the_first_version_keeps_the_producer() -> None:
    async def test(producer: RawProducer) -> None:
        await producer.add()
        await producer.produce(b"first")
        assert (await producer.end(commit=False))[0] == 0

        assert await producer.init_until_final() == (0, (4, 1))

    scenario(test, level=1)


@pytest.mark.parametrize(("level", "ended"), [(1, 90), (2, 48)])
def test_a_late_request_for_an_epoch_aborts_the_next_transaction(level: int, ended: int) -> None:
    async def test(producer: RawProducer) -> None:
        old = producer.identity
        await producer.init()
        await producer.add()
        await producer.produce(b"first")

        assert await producer.init_until_final(old) == (90, NONE)
        assert await producer.end(commit=True) == (ended, NONE)
        assert producer.model.visible("outputs") == {0: []}

    scenario(test, level=level)


@BOTH
def test_a_rival_fences(level: int) -> None:
    async def test(producer: RawProducer) -> None:
        old = producer.identity
        assert await producer.init(NONE) == (0, (4, 1))

        assert await producer.init(old) == (90, NONE)
        assert await producer.end(commit=True, identity=old) == (90, NONE)
        assert await producer.produce(b"first", identity=old) == 47

    scenario(test, level=level)


@BOTH
def test_a_late_copy_of_offsets_replaces_newer_ones_of_the_same_transaction(level: int) -> None:
    async def test(producer: RawProducer) -> None:
        await producer.add()
        requests = producer.model.cluster.brokers[1].requests
        assert await producer.commit_offset(10) == 0
        first = requests[-1]
        assert await producer.commit_offset(20) == 0
        producer.model.repeat(first)
        await producer.end(commit=True)
        await asyncio.sleep(1)

        assert producer.model.committed[INPUT].offset == 10

    scenario(test, level=level)


@BOTH
def test_offsets_come_from_a_member(level: int) -> None:
    async def test(producer: RawProducer) -> None:
        await producer.add()
        stale, stranger, none = Member(2, "member"), Member(3, "stranger"), Member(-1, "")
        assert [await producer.commit_offset(1, member) for member in (stale, stranger, none)] == [22, 25, 0]

    scenario(test, level=level)


@BOTH
def test_offsets_are_unstable_until_the_marker(level: int) -> None:
    async def test(producer: RawProducer) -> None:
        offsets = GroupOffsets(producer.cluster, GROUP)
        await producer.add()
        await producer.commit_offset(10)
        producer.model.hold_markers()
        assert (await producer.end(commit=True))[0] == 0

        assert await offsets.all_committed() == {}
        with pytest.raises(WireError) as refused:
            await offsets.committed([INPUT])
        assert refused.value.code == 88

        producer.model.release_markers()
        assert (await offsets.committed([INPUT]))[INPUT].offset == 10

    scenario(test, level=level)


def test_a_commit_of_nothing_is_refused_and_an_abort_of_nothing_has_an_epoch() -> None:
    async def test(producer: RawProducer) -> None:
        assert await producer.end(commit=True) == (48, NONE)
        assert await producer.end(commit=False) == (0, (4, 1))

    scenario(test)


def test_the_epochs_of_a_producer_are_used_up() -> None:
    async def test(producer: RawProducer) -> None:
        producer.model.coordinator.most_epoch = 4
        answers: Sequence[tuple[tuple[int, int], int, tuple[int, int]]] = [
            ((4, 0), 0, (4, 1)),
            ((4, 1), 0, (4, 2)),
            ((4, 1), 0, (4, 2)),
            ((4, 2), 0, (4, 3)),
            ((4, 2), -1, NONE),
            ((4, 3), 0, (5, 0)),
            ((4, 3), 0, (5, 0)),
        ]
        for known, code, issued in answers:
            assert await producer.init(known) == (code, issued)

    scenario(test)


def test_the_commit_in_the_last_epoch_gives_another_producer_id() -> None:
    async def test(producer: RawProducer) -> None:
        producer.model.coordinator.most_epoch = 2
        await producer.init()
        old = producer.identity
        await producer.produce(b"first")
        assert await producer.end(commit=True) == (0, (5, 0))
        await asyncio.sleep(1)

        assert await producer.end(commit=True, identity=old) == (0, (5, 0))
        assert await producer.init(old) == (0, (5, 0))
        assert await producer.produce(b"late", 1, old) == 47
        assert producer.model.visible("outputs") == {0: [b"first"]}

    scenario(test)


def test_a_request_of_the_second_version_blocks_the_id_at_level_0() -> None:
    async def test(producer: RawProducer) -> None:
        producer.model.set_level(0)
        assert [await producer.produce(b"first") for _ in range(2)] == [35, 51]
        assert await producer.init() == (51, NONE)

        producer.model.move(CoordinatorKind.TRANSACTION, 1)
        assert await producer.init() == (0, (4, 1))

    scenario(test)


def test_numbers_are_checked_and_duplicates_are_known() -> None:
    async def test(producer: RawProducer) -> None:
        assert await producer.produce(b"gap", 1) == 0  # a broker accepts any number of a new producer
        assert await producer.produce(b"gap", 1) == 0
        assert await producer.produce(b"next", 2) == 0
        assert await producer.produce(b"another", 2) == 0
        assert await producer.produce(b"gap", 4) == 45
        await producer.end(commit=True)
        await asyncio.sleep(1)
        assert producer.model.visible("outputs") == {0: [b"gap", b"next"]}
        assert await producer.produce(b"gap", 3) == 45

    scenario(test)


def test_a_held_request_arrives_after_its_connection_was_cut() -> None:
    async def test(producer: RawProducer) -> None:
        model = producer.model
        faults = iter([HELD, LOST_ANSWER])

        def choose(request: Received) -> Fault:
            return next(faults, NO_FAULT) if request.api is PRODUCE else NO_FAULT

        model.choose_fault = choose
        with pytest.raises(ConnectionLostError):
            await producer.produce(b"held")
        with pytest.raises(ConnectionLostError):
            await producer.produce(b"lost")
        assert await producer.produce(b"lost") == 0
        (held,) = model.held
        model.release(held)
        await producer.end(commit=True)
        await asyncio.sleep(1)

        assert model.visible("outputs") == {0: [b"lost"]}, "numbers of the held batch belong to the other"

    scenario(test)
