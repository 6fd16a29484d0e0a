"""Brokers that are gone, frozen, unreachable or wrong: polls return, closing ends, errors are reported."""

import asyncio
import contextlib
import gc
import socket
import time
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest

from aioshard.errors import CommitError, ConnectError, CorruptRecordError
from aioshard.kafka.fetcher import FAULT_INTERVAL
from aioshard.kafka.wire.start import START_TIMEOUT
from aioshard.ports import Allowance, Committed, Fault
from aioshard.records import TopicPartition
from tests.kafka.client.members import PATIENCE, Member, background_tasks, settings_for
from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker

Join = Callable[..., Member]


def unused_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Accepts connections and never answers."""
    connections: set[asyncio.StreamWriter] = set()

    async def ignore(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in connections:
            writer.close()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def closes_cleanly(member: Member, within: float) -> AsyncIterator[None]:
    """Closes *member* at the end, and finds tasks, connections and warnings that remain."""
    before = asyncio.all_tasks()
    loop_errors: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: loop_errors.append(str(context)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        started = time.monotonic()
        # As the engine does: anyio's deadline cancels again and again until its scope is left.
        with anyio.move_on_after(within):
            await member.transport.close()
        assert time.monotonic() - started < within + 3
        driver = member.transport._driver
        assert driver is not None
        assert not driver.is_alive
        assert all(task.done() for task in background_tasks(member.transport).values()), "not only cancelled"
        assert not member.transport._cluster.is_connected
        del driver, member.transport._driver
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
    loop.set_exception_handler(None)
    # Warnings of the client only.
    assert [str(warning.message) for warning in caught if "AIOKafka" in str(warning.message)] == []
    assert loop_errors == []
    assert {task.get_name() for task in asyncio.all_tasks() - before} == set()


async def test_an_unreachable_server_is_named_with_the_reason(group: str) -> None:
    address = f"127.0.0.1:{unused_port()}"
    member = Member(settings_for(address), group)

    started = time.monotonic()
    with pytest.raises(ConnectError, match=rf"bootstrap_servers={address} could be reached.*[Rr]efused"):
        await member.transport.start(["t"], None, member)

    assert time.monotonic() - started < 2.5, "a refusal is an answer"
    await member.transport.close()


async def test_an_unresolvable_host_is_named(group: str) -> None:
    member = Member(settings_for("no-such-host.invalid:9092"), group)
    with pytest.raises(ConnectError, match=r"no-such-host\.invalid:9092"):
        await member.transport.start(["t"], None, member)
    await member.transport.close()


async def test_a_silent_server_times_out(group: str) -> None:
    async with silent_server() as address:
        member = Member(settings_for(address), group)
        started = time.monotonic()
        with pytest.raises(ConnectError, match="no answer within 3 s"):
            await member.transport.start(["t"], None, member)
        assert time.monotonic() - started < 2 * START_TIMEOUT
        await member.transport.close()


async def test_one_reachable_server_is_enough(
    kafka: SharedKafka, topic: str, group: str, members: list[Member]
) -> None:
    await kafka.create_topic(topic)
    async with silent_server() as silent:
        member = Member(settings_for(f"127.0.0.1:{unused_port()},{silent},{kafka.bootstrap}"), group)
        members.append(member)
        started = time.monotonic()
        await member.join(topic)
        assert time.monotonic() - started < 3, "no wait for the silent server"


async def test_a_cancelled_start_leaves_nothing_behind(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic)
    before = asyncio.all_tasks()
    for steps in range(0, 60, 3):
        member = Member(settings_for(kafka.bootstrap), group)
        starting = asyncio.create_task(member.transport.start([topic], None, member))
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        await member.transport.close()
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    # aiokafka forgets the connection that it was looking up the cluster on; that closes when it is collected.
    assert [task for task in left if "AIOKafkaConnection._read" not in repr(task)] == []


@pytest.mark.chaos
async def test_polls_return_during_an_outage_and_deliver_records_afterwards(
    breakable_kafka: KafkaBroker, topic: str, group: str, members: list[Member]
) -> None:
    await breakable_kafka.create_topic(topic)
    await breakable_kafka.produce(topic, [(None, b"before")])
    member = Member(settings_for(breakable_kafka.bootstrap, session_timeout=30), group)
    members.append(member)
    (partitions, membership) = await member.join(topic)
    await member.read_to({partitions[0]: 1})

    await breakable_kafka.kill()

    await member.poll_until(lambda: member.transport.trouble is not None)
    for _ in range(4):
        started = time.monotonic()
        assert await member.poll(timeout=0.3) == []
        assert time.monotonic() - started < 2
    with pytest.raises((TimeoutError, CommitError)):  # whether the coordinator is still known decides
        async with asyncio.timeout(0.5):
            await member.transport.commit({partitions[0]: Committed(1, "")}, membership)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await member.transport.committed(partitions)
    assert await member.transport.log_ranges(partitions) == {}, "no leader answers"

    await breakable_kafka.start()
    await breakable_kafka.produce(topic, [(None, b"after")])
    await member.poll_until(lambda: [r.value for r in member.records[partitions[0]]][-1] == b"after")
    await member.poll_until(lambda: member.transport.trouble is None)


@pytest.mark.parametrize("end", [pytest.param("kill", marks=pytest.mark.chaos), "freeze"])
async def test_closing_without_a_broker_ends_and_leaves_nothing_behind(
    breakable_kafka: KafkaBroker, topic: str, group: str, end: str
) -> None:
    await breakable_kafka.create_topic(topic, partitions=3)
    member = Member(settings_for(breakable_kafka.bootstrap), group)
    await member.join(topic)
    async with closes_cleanly(member, within=2):
        if end == "kill":
            await breakable_kafka.kill()
            await member.poll_until(lambda: member.transport.trouble is not None)
        else:
            breakable_kafka.freeze()
            for _ in range(5):
                started = time.monotonic()
                await member.poll(timeout=0.2)
                assert time.monotonic() - started < 2
    if end == "freeze":
        breakable_kafka.thaw()


async def test_closing_leaves_nothing_behind(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, partitions=3)
    member = Member(settings_for(kafka.bootstrap), group)
    polling: list[asyncio.Task[object]] = []
    await member.join(topic)
    async with closes_cleanly(member, within=5):
        polling.append(asyncio.create_task(member.poll(timeout=30)))
        await asyncio.sleep(0)
        await member.transport.close()
        (failed,) = await asyncio.gather(*polling, return_exceptions=True)
        assert "closed" in str(failed)


async def test_a_damaged_batch_is_a_fault_after_the_records_before_it(
    breakable_kafka: KafkaBroker, topic: str, group: str, members: list[Member]
) -> None:
    await breakable_kafka.create_topic(topic, partitions=2)
    damaged, fine = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for marker in (b"first", b"second", b"third"):
        await breakable_kafka.produce(topic, [(None, marker)] * 10, partition=0)
    await breakable_kafka.produce(topic, [(None, b"fine")] * 10, partition=1)
    segment = breakable_kafka.directory / "data" / f"{topic}-0" / "00000000000000000000.log"
    content = segment.read_bytes()
    at = content.index(b"second")

    def write(byte: bytes) -> None:
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(byte)

    write(b"X")
    member = Member(settings_for(breakable_kafka.bootstrap), group)
    members.append(member)
    await member.join(topic)

    await member.read_to({fine: 10, damaged: 10})
    await member.poll_until(lambda: bool(member.faults))

    assert member.offsets(damaged) == list(range(10))
    fault = member.faults[0]
    assert fault.topic_partition == damaged
    assert isinstance(fault.error, CorruptRecordError)
    assert f"offset 10 of {damaged}" in str(fault.error)
    assert member.transport.position(damaged) == 10

    write(b"s")
    await member.read_to({damaged: 30}, lambda _: Allowance(7, 1 << 20))
    assert member.offsets(damaged) == list(range(30))


@pytest.mark.chaos
async def test_unreachable_advertised_listeners_are_detected(tmp_path: Path, topic: str, group: str) -> None:
    dead = unused_port()
    broker = KafkaBroker(tmp_path)
    broker.properties["advertised.listeners"] = f"PLAINTEXT://127.0.0.1:{dead},SECURE://127.0.0.1:{dead + 1}"
    await asyncio.to_thread(broker._format)
    broker._launch()
    message = ""
    try:
        async with asyncio.timeout(PATIENCE):
            while "advertise" not in message:  # the broker is still starting, and nothing tells when it has
                member = Member(settings_for(broker.bootstrap), group)
                with pytest.raises(ConnectError) as refused:
                    await member.transport.start([topic], None, member)
                await member.transport.close()
                message = str(refused.value)
    finally:
        await broker.kill()
    assert f"127.0.0.1:{dead}: Connection refused" in message


async def test_a_fault_does_not_outlive_its_partition(kafka: SharedKafka, topic: str, member: Join) -> None:
    """The retry of a fault is a timer; it must not touch what was assigned later."""
    await kafka.create_topic(topic)
    one = member(start=50)
    await one.join(topic)
    await one.poll_until(lambda: bool(one.faults))
    assert isinstance(one.faults[0], Fault)
    at = one.faults[0].topic_partition
    one.transport._fetcher.remove([at])
    one.transport._fetcher.add([at])
    await asyncio.sleep(FAULT_INTERVAL + 0.2)
    assert one.transport.position(at) is None
