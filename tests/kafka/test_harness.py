"""The test broker itself: it must not falsify the results of the tests."""

import asyncio
import os
import ssl
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    TopicAuthorizationFailedError,
)
from confluent_kafka.admin import AclOperation

from tests.support import ports
from tests.support.access import Mechanism, allow, client_options, create_scram_user, deny
from tests.support.brokers import SharedKafka
from tests.support.cluster import Message
from tests.support.kafka import KafkaBroker, KafkaFailedError
from tests.support.kafka_libs import (
    LIBS_VARIABLE,
    NEWEST,
    OLDER,
    VERSION_VARIABLE,
    BrokerUnavailableError,
    chosen_kafka,
    kafka_libs,
)
from tests.support.kafka_properties import PLAIN_USER, SCRAM_USER, SUPER_USER, Credentials
from tests.support.paths import PROJECT
from tests.support.requirements import skip_or_fail


@pytest.mark.parametrize("version", [NEWEST, OLDER])
def test_the_environment_chooses_the_version_of_the_broker(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIBS_VARIABLE, raising=False)
    monkeypatch.setenv(VERSION_VARIABLE, version)
    try:
        libs = kafka_libs()
    except BrokerUnavailableError as missing:
        skip_or_fail("Kafka broker", missing)
    command = ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{libs}/*", "kafka.Kafka", "--version"]

    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert printed.split()[0] == version


def test_the_named_jars_are_used_and_must_be_of_the_chosen_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kafka_2.13-4.3.1.jar").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "java").touch(mode=0o755)
    monkeypatch.setenv(LIBS_VARIABLE, str(tmp_path))
    monkeypatch.delenv(VERSION_VARIABLE, raising=False)

    assert kafka_libs() == tmp_path
    assert str(tmp_path) in chosen_kafka()

    monkeypatch.setenv(VERSION_VARIABLE, "4.3.0")
    with pytest.raises(BrokerUnavailableError, match=r"kafka_2\.13-4\.3\.0\.jar"):
        kafka_libs()


async def test_produced_records_are_read_back(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, partitions=3)
    messages: list[Message] = [(b"key-%d" % (number % 7), b"value-%d" % number) for number in range(1000)]

    positions = await kafka.produce(topic, messages, headers=[("source", b"harness")])

    records = await kafka.read(topic)
    found = {(record.partition, record.offset): (record.key, record.value) for record in records}
    assert [found[at] for at in positions] == messages
    assert records[0].headers == (("source", b"harness"),)
    assert sum((await kafka.end_offsets(topic)).values()) == len(messages)


async def test_many_large_records_are_read_in_order(kafka: SharedKafka, topic: str) -> None:
    """More than one batch for each partition, so that a mix-up of batches would show."""
    await kafka.create_topic(topic, partitions=2)
    messages: list[Message] = [(None, b"%07d" % number + bytes(10_000)) for number in range(300)]

    positions = await kafka.produce(topic, messages)

    assert sorted(positions) == [(partition, offset) for partition in (0, 1) for offset in range(150)]
    values = [record.value for record in await kafka.read(topic)]
    assert values == [value for _, value in messages[0::2]] + [value for _, value in messages[1::2]]


async def test_transactions_leave_markers_and_an_aborted_one_no_records(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic)

    await kafka.produce_transaction(topic, [(None, b"a"), (None, b"b")], transactional_id=topic)
    await kafka.produce_transaction(topic, [(None, b"c")], abort=True, transactional_id=topic)

    assert [record.value for record in await kafka.read(topic)] == [b"a", b"b"]
    assert [record.value for record in await kafka.read(topic, "read_uncommitted")] == [b"a", b"b", b"c"]
    assert await kafka.end_offsets(topic) == {0: 5}


async def test_an_open_transaction_holds_the_last_stable_offset(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"before")])
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as producer:
        await producer.begin_transaction()

        await producer.send_and_wait(topic, b"inside")

        assert await kafka.end_offsets(topic, "read_committed") == {0: 1}
        assert await kafka.end_offsets(topic) == {0: 2}
        await producer.abort_transaction()


async def test_committed_offsets_and_lag_are_per_group(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(None, b"x")] * 10)
    assert await kafka.committed(group, topic) == {}
    assert await kafka.lag(group, topic) == 10

    async with AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=group, enable_auto_commit=False) as member:
        member.assign([TopicPartition(topic, 0)])
        await member.commit({TopicPartition(topic, 0): 4})

    assert await kafka.committed(group, topic) == {0: 4}
    assert await kafka.lag(group, topic) == 6
    with pytest.raises(TimeoutError, match="still lags 6"):
        await kafka.wait_for_lag(group, topic, most=5, timeout=0.1)


async def test_topics_can_grow_lose_records_and_be_deleted(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"x")] * 5)

    await kafka.delete_records(topic, before={0: 3})
    await kafka.add_partitions(topic, 3)

    assert await kafka.start_offsets(topic) == {0: 3, 1: 0, 2: 0}
    await kafka.delete_topic(topic)
    await kafka.create_topic(topic)
    assert await kafka.end_offsets(topic) == {0: 0}


async def test_compaction_leaves_holes_within_seconds(kafka: SharedKafka, topic: str) -> None:
    """Compaction spares the newest segment, so the log is rolled by one more record."""
    quick = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    await kafka.create_topic(topic, config=quick)
    await kafka.produce(topic, [(b"key", b"%d" % number) for number in range(10)])

    async with asyncio.timeout(30):
        while len(records := await kafka.read(topic)) > 3:
            await kafka.produce(topic, [(b"roll", b"")])

    assert records[0].offset == 9
    assert records[0].value == b"9"


@pytest.mark.chaos
async def test_restart_keeps_address_data_and_committed_offsets(own_kafka: KafkaBroker, topic: str, group: str) -> None:
    await own_kafka.create_topic(topic)
    await own_kafka.produce(topic, [(None, b"before")])
    async with AIOKafkaConsumer(bootstrap_servers=own_kafka.bootstrap, group_id=group) as member:
        member.assign([TopicPartition(topic, 0)])
        await member.commit({TopicPartition(topic, 0): 1})
    address = own_kafka.bootstrap

    await own_kafka.restart()
    await own_kafka.produce(topic, [(None, b"between")])
    await own_kafka.kill()
    assert not own_kafka.running
    await own_kafka.start()

    assert own_kafka.bootstrap == address
    assert [record.value for record in await own_kafka.read(topic)] == [b"before", b"between"]
    assert await own_kafka.committed(group, topic) == {0: 1}


@pytest.mark.chaos
async def test_a_frozen_broker_answers_nothing_until_it_is_thawed(own_kafka: KafkaBroker, topic: str) -> None:
    await own_kafka.create_topic(topic)

    own_kafka.freeze()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await own_kafka.read(topic)
    own_kafka.thaw()

    assert await own_kafka.read(topic) == []


async def test_a_broker_that_cannot_start_says_why(tmp_path: Path, kafka: SharedKafka) -> None:
    assert kafka.bootstrap
    broker = KafkaBroker(tmp_path, properties={"num.io.threads": "none"})

    with pytest.raises(KafkaFailedError, match=r"num\.io\.threads"):
        await broker.start()


@pytest.mark.parametrize(
    ("user", "mechanism"),
    [(SCRAM_USER, "SCRAM-SHA-512"), (SCRAM_USER, "SCRAM-SHA-256"), (PLAIN_USER, "PLAIN")],
    ids=["scram-512", "scram-256", "plain"],
)
async def test_guarded_listener_lets_known_users_in(
    kafka: SharedKafka, user: Credentials, mechanism: Mechanism, topic: str
) -> None:
    await kafka.create_topic(topic)
    options = client_options(user, mechanism, kafka.certificates.ca_file)

    async with AIOKafkaConsumer(bootstrap_servers=kafka.secure_bootstrap, **options) as reader:
        # Known, and not allowed to see it. Other tests of the run may have allowed the user other topics.
        assert topic not in await reader.topics()


async def test_guarded_listener_refuses_a_wrong_password(kafka: SharedKafka) -> None:
    wrong = Credentials(SCRAM_USER.username, "wrong")
    reader = AIOKafkaConsumer(
        bootstrap_servers=kafka.secure_bootstrap,
        **client_options(wrong, "SCRAM-SHA-512", kafka.certificates.ca_file),
    )

    with pytest.raises(KafkaConnectionError):
        await reader.start()
    await reader.stop()


async def test_a_client_with_another_ca_refuses_the_guarded_listener(kafka: SharedKafka) -> None:
    host, port = kafka.secure_bootstrap.split(":")
    trusting = ssl.create_default_context(cafile=str(kafka.certificates.stranger_file))

    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection(host, int(port), ssl=trusting)


async def test_acls_decide_for_each_user_topic_and_group(kafka: SharedKafka, topic: str, group: str) -> None:
    user = Credentials(f"user-of-{topic}"[:60], "secret")
    await create_scram_user(kafka, user)
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"x")])
    options = client_options(user, "SCRAM-SHA-512", kafka.certificates.ca_file)

    async with asyncio.timeout(30):
        async with AIOKafkaProducer(bootstrap_servers=kafka.secure_bootstrap, **options) as producer:
            with pytest.raises(TopicAuthorizationFailedError):
                await producer.send_and_wait(topic, b"refused")
        await allow(kafka, user, "topic", topic, AclOperation.READ, AclOperation.DESCRIBE)
        member = AIOKafkaConsumer(
            topic, bootstrap_servers=kafka.secure_bootstrap, group_id=group, auto_offset_reset="earliest", **options
        )
        with pytest.raises(GroupAuthorizationFailedError):
            await member.start()
        await member.stop()
        await allow(kafka, user, "group", group)
        async with AIOKafkaConsumer(
            topic, bootstrap_servers=kafka.secure_bootstrap, group_id=group, auto_offset_reset="earliest", **options
        ) as member:
            assert (await member.getone()).value == b"x"
        await deny(kafka, user, "topic", topic)
        async with AIOKafkaConsumer(bootstrap_servers=kafka.secure_bootstrap, **options) as reader:
            assert topic not in await reader.topics()


async def test_the_super_user_needs_no_acl(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic)
    options = client_options(SUPER_USER, "PLAIN", kafka.certificates.ca_file)

    async with AIOKafkaProducer(bootstrap_servers=kafka.secure_bootstrap, **options) as producer:
        await producer.send_and_wait(topic, b"x")

    assert await kafka.end_offsets(topic) == {0: 1}


def test_a_port_is_given_away_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is stopped, or a proxy between two tests, finds its port free again."""
    monkeypatch.setattr(ports, "PORTS", range(15_000, 15_020))

    first = ports.free_ports(8)
    second = ports.free_ports(8)

    assert len({*first, *second}) == 16


@pytest.mark.chaos
async def test_a_broker_ends_with_the_process_it_belongs_to(tmp_path: Path, kafka: SharedKafka) -> None:
    """A test process that is killed leaves no broker behind."""
    assert kafka.bootstrap
    script = (
        "import asyncio, pathlib, sys\n"
        "from tests.support.kafka import KafkaBroker\n"
        "broker = KafkaBroker(pathlib.Path(sys.argv[1]))\n"
        "asyncio.run(broker.start())\n"
        "print(broker.process_group, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        str(tmp_path),
        cwd=PROJECT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    guard = psutil.Process(int(await owner.stdout.readline()))
    processes = [guard, *guard.children()]
    assert [process.name() for process in processes[1:]] == ["java"]

    owner.kill()
    await owner.wait()

    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
