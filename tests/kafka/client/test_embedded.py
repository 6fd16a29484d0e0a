"""The embedded broker: its lifecycle, topics and errors."""

import asyncio
import ctypes
import ctypes.util
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from aioshard import App, Park, Record
from aioshard.errors import MissingExtraError, StateError, TransportError
from aioshard.kafka import embedded
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.embedded import DEFAULT_PARTITIONS, EmbeddedBroker
from aioshard.settings import Settings
from tests.support.paths import PROJECT
from tests.support.ports import free_port

DEADLINE = 30.0
POLL_INTERVAL = 0.05


@pytest.fixture
async def broker() -> AsyncIterator[EmbeddedBroker]:
    async with EmbeddedBroker() as started:
        yield started


def producer_of(broker: EmbeddedBroker) -> Any:
    return AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers, enable_idempotence=True)


# Life


async def test_published_records_are_consumed(broker: EmbeddedBroker, topic: str, group: str) -> None:
    await broker.create_topic(topic, partitions=3)
    async with producer_of(broker) as producer:
        for number in range(10):
            await producer.send_and_wait(topic, b"%d" % number, key=b"k")
    seen: list[bytes | None] = []
    app = App(group, **broker.settings, auto_offset_reset="earliest")

    @app.consume(topic)
    async def handle(record: Record) -> None:
        seen.append(record.value)

    await app.serve(until_caught_up=True)

    assert seen == [b"%d" % number for number in range(10)]


async def test_an_app_can_run_again(broker: EmbeddedBroker, topic: str, group: str) -> None:
    """In the mock, a group waits a session timeout after a member has left; the broker's settings make that short."""
    await broker.create_topic(topic, partitions=1)
    seen: list[int] = []
    for number in range(2):
        async with producer_of(broker) as producer:
            await producer.send_and_wait(topic, b"v")
        app = App(group, **broker.settings, auto_offset_reset="earliest")

        @app.consume(topic)
        async def handle(record: Record) -> None:
            seen.append(record.offset)

        await app.serve(until_caught_up=True)

        assert seen == [*range(number + 1)]


async def test_an_app_that_parks_is_refused_by_the_embedded_broker(
    broker: EmbeddedBroker, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no controller, as a cluster that elects one, so the start continues."""
    await broker.create_topic(topic, partitions=1)
    app = App(group, **broker.settings, auto_offset_reset="earliest", start_timeout=1.0)

    @app.consume(topic, on_failure=Park(f"{topic}.parked"))
    async def handle(record: Record) -> None: ...

    serving = asyncio.create_task(app.serve(), name="serve")
    async with asyncio.timeout(DEADLINE):
        while not (starting := [record for record in caplog.records if getattr(record, "event", "") == "starting"]):
            assert not serving.done()
            await asyncio.sleep(POLL_INTERVAL)
    assert f"{topic}.parked" in starting[0].getMessage()
    assert "the embedded broker never has" in starting[0].getMessage()
    serving.cancel()
    await asyncio.wait([serving])


async def test_the_first_join_of_a_group_is_not_delayed(broker: EmbeddedBroker, topic: str, group: str) -> None:
    """The mock's own delay is 3 s."""
    await broker.create_topic(topic)
    reader = AIOKafkaConsumer(topic, bootstrap_servers=broker.bootstrap_servers, group_id=group)

    async with asyncio.timeout(2.9):
        await reader.start()
    await reader.stop()


async def test_the_process_ends_with_the_context() -> None:
    async with asyncio.timeout(DEADLINE), EmbeddedBroker() as broker:
        process = psutil.Process(broker.pid)
        assert process.is_running()

    assert not psutil.pid_exists(process.pid)


async def test_the_broker_process_ends_when_its_parent_is_killed() -> None:
    script = (
        "import asyncio\n"
        "from aioshard.kafka.embedded import EmbeddedBroker\n"
        "async def main():\n"
        "    async with EmbeddedBroker() as broker:\n"
        "        print(broker.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    async with asyncio.timeout(DEADLINE):
        owner = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, cwd=PROJECT, stdout=asyncio.subprocess.PIPE
        )
        assert owner.stdout is not None
        process = psutil.Process(int(await owner.stdout.readline()))

        owner.kill()
        await owner.wait()

    psutil.wait_procs([process], timeout=10)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_a_terminal_interrupt_does_not_end_the_broker_process(broker: EmbeddedBroker, topic: str) -> None:
    """Ctrl-C reaches all processes; an app has to commit before its broker ends."""
    os.kill(broker.pid, signal.SIGINT)

    await broker.create_topic(topic)

    assert psutil.pid_exists(broker.pid)


async def test_a_broker_starts_once(broker: EmbeddedBroker) -> None:
    with pytest.raises(StateError, match="was started before"):
        await broker.__aenter__()


@pytest.mark.parametrize("name", ["bootstrap_servers", "pid", "settings"])
async def test_before_the_start_there_is_no_address(name: str) -> None:
    with pytest.raises(StateError, match="was not started"):
        getattr(EmbeddedBroker(), name)


# Topics


async def test_a_topic_has_the_requested_partitions(broker: EmbeddedBroker, topic: str) -> None:
    await broker.create_topic(topic, partitions=7)

    async with producer_of(broker) as producer:
        assert await producer.partitions_for(topic) == set(range(7))
        assert len(await producer.partitions_for(f"{topic}-of-its-own")) == DEFAULT_PARTITIONS


async def test_topics_are_created_concurrently(broker: EmbeddedBroker, topic: str) -> None:
    """Each caller gets its own answer."""
    names = [f"{topic}-{number % 5}" for number in range(10)]

    answers = await asyncio.gather(*(broker.create_topic(name) for name in names), return_exceptions=True)

    assert answers[:5] == [None] * 5
    assert [str(answer) for answer in answers[5:]] == [
        f"the embedded broker refused: topic '{name}' was not created: Broker: Topic already exists"
        for name in names[5:]
    ]


async def test_an_abandoned_request_does_not_shift_the_responses(broker: EmbeddedBroker, topic: str) -> None:
    abandoned = asyncio.create_task(broker.create_topic(topic))
    await asyncio.sleep(0)
    abandoned.cancel()

    with pytest.raises(TransportError, match="already exists"):
        await broker.create_topic(topic)
    await broker.create_topic(f"{topic}-2")


@pytest.mark.parametrize(
    ("name", "partitions", "sentence"),
    [
        ("no spaces", 1, "'no spaces' is not a valid topic name"),
        ("", 1, "is not a valid topic name"),
        ("t", 0, "cannot have 0 partitions"),
    ],
)
async def test_an_impossible_topic_is_refused(
    broker: EmbeddedBroker, name: str, partitions: int, sentence: str
) -> None:
    with pytest.raises(TransportError, match=sentence):
        await broker.create_topic(name, partitions)


# A chosen port


async def test_a_chosen_port_reaches_the_broker(topic: str) -> None:
    port = free_port()
    async with asyncio.timeout(DEADLINE), EmbeddedBroker(port=port) as broker:
        assert broker.bootstrap_servers == f"127.0.0.1:{port}"
        await broker.create_topic(topic, partitions=1)
        async with producer_of(broker) as producer:
            await producer.send_and_wait(topic, b"x" * 500_000)
            assert {(node.host, node.port) for node in producer.client.cluster.brokers()} == {("127.0.0.1", port)}
        async with AIOKafkaConsumer(
            topic, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
        ) as reader:
            assert (await reader.getone()).value == b"x" * 500_000

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            TransportError, match=rf"cannot listen on port {port} of 127.0.0.1 \(Address already in use\): "
        ):
            async with EmbeddedBroker(port=port):
                pytest.fail("it started on a port that somebody else has")


# Errors


async def test_a_broker_that_is_killed_says_so(broker: EmbeddedBroker) -> None:
    os.kill(broker.pid, signal.SIGKILL)

    assert await broker.ended() == "the embedded broker ended by itself (SIGKILL)"
    with pytest.raises(TransportError, match="SIGKILL"):
        await broker.create_topic("t")


async def test_pending_requests_fail_when_the_broker_dies(broker: EmbeddedBroker) -> None:
    os.kill(broker.pid, signal.SIGSTOP)
    asking = asyncio.create_task(broker.create_topic("t"))
    await asyncio.sleep(0)

    os.kill(broker.pid, signal.SIGKILL)

    with pytest.raises(TransportError, match=r"ended .*SIGKILL"):
        await asking


async def test_missing_confluent_kafka_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    with pytest.raises(MissingExtraError, match=r"pip install 'aioshard\[broker\]'"):
        async with EmbeddedBroker():
            pytest.fail("it started without a library")


@pytest.mark.parametrize(
    ("library", "sentence"),
    [
        ("/no/such/library", "cannot open shared object file|no such file"),
        (ctypes.util.find_library("c"), "undefined symbol: rd_kafka"),
    ],
    ids=["missing", "another-library"],
)
async def test_an_unusable_library_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, library: str, sentence: str
) -> None:
    monkeypatch.setattr(embedded, "_library", lambda: library)

    with pytest.raises(TransportError, match=f"the embedded broker did not start: .*({sentence})"):
        async with EmbeddedBroker():
            pytest.fail("it started with a library that is not librdkafka")


async def test_a_group_it_cannot_describe_is_a_clear_error() -> None:
    async with (
        EmbeddedBroker() as broker,
        KafkaAdmin(Settings(bootstrap_servers=broker.bootstrap_servers)) as brokers,
    ):
        with pytest.raises(TransportError, match=r"cannot describe group 'billing': .*embedded broker"):
            await brokers.group("billing")


async def test_listing_all_commits_of_a_group_is_a_clear_error() -> None:
    async with (
        EmbeddedBroker() as broker,
        KafkaAdmin(Settings(bootstrap_servers=broker.bootstrap_servers)) as brokers,
    ):
        with pytest.raises(TransportError, match=r"cannot return the committed offsets of group 'billing': .*embedded"):
            await brokers.all_commits("billing")
