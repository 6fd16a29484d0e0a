"""Side topics on a real broker: compaction, refusals, outages and fetches."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource

from aioshard.errors import AuthorizationError, ConnectError, SideTopicError, TransportError
from aioshard.kafka import side_topics as reading
from aioshard.kafka.side_topics import KafkaSideTopics
from aioshard.records import Record, TopicPartition
from aioshard.settings import Settings
from tests.support.access import allow, create_scram_user, deny
from tests.support.brokers import SharedKafka
from tests.support.kafka import KafkaBroker
from tests.support.kafka_properties import Credentials

Make = Callable[..., KafkaSideTopics]

QUICKLY_COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes readers that are closed at the end; arguments are settings."""
    made: list[KafkaSideTopics] = []

    def make(bootstrap: str, **settings: Any) -> KafkaSideTopics:
        made.append(KafkaSideTopics(Settings(bootstrap_servers=bootstrap, **({"fetch_max_wait": 0.05} | settings))))
        return made[-1]

    yield make
    for side_topics in made:
        async with asyncio.timeout(5):
            await side_topics.close()


@pytest.fixture
def side_topics(kafka: SharedKafka, make: Make) -> KafkaSideTopics:
    return make(kafka.bootstrap)


@pytest.fixture
async def user(kafka: SharedKafka, topic: str) -> Credentials:
    """A user that nobody else uses and that may do nothing."""
    credentials = Credentials(f"user-of-{topic}"[:60], "secret")
    await create_scram_user(kafka, credentials)
    return credentials


def login(kafka: SharedKafka, user: Credentials) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(kafka.certificates.ca_file),
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": user.username,
        "sasl_password": user.password,
    }


async def client_of(side_topics: KafkaSideTopics) -> object:
    return await side_topics._connected()


async def take(side_topics: KafkaSideTopics, count: int) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await side_topics.poll(1.0)
    assert len(found) == count
    return found


async def catch_up(side_topics: KafkaSideTopics, *partitions: TopicPartition) -> list[Record]:
    ends = {partition: await side_topics.end(partition) for partition in partitions}
    found: list[Record] = []
    async with asyncio.timeout(20):
        while any(side_topics.position(partition) < end for partition, end in ends.items()):
            found += await side_topics.poll(1.0)
    return found


async def failure_of(side_topics: KafkaSideTopics) -> TransportError:
    """Poll until an exception is raised, and return it."""
    async with asyncio.timeout(20):
        while True:
            try:
                await side_topics.poll(0.2)
            except TransportError as error:
                return error


def offsets(records: Sequence[Record]) -> list[int]:
    return [record.offset for record in records]


# Topics ----------------------------------------------------------------------------------


def configuration(kafka: SharedKafka, topic: str) -> dict[str, str]:
    wanted = ConfigResource(ConfigResource.Type.TOPIC, topic)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})  # Kept until the answer is there: it is lost with it.
    (answer,) = admin.describe_configs([wanted]).values()
    return {name: entry.value for name, entry in answer.result().items()}


async def test_a_side_topic_is_created_compacted(kafka: SharedKafka, topic: str, side_topics: KafkaSideTopics) -> None:
    await side_topics.ensure(topic, 5)

    found = await asyncio.to_thread(configuration, kafka, topic)
    assert found["cleanup.policy"] == "compact"
    assert found["segment.ms"] == "3600000"
    assert float(found["min.cleanable.dirty.ratio"]) == 0.1
    assert len(await kafka.partitions(topic)) == 5


async def test_two_clients_can_create_a_topic_concurrently(kafka: SharedKafka, topic: str, make: Make) -> None:
    one, two = make(kafka.bootstrap), make(kafka.bootstrap)

    await asyncio.gather(*(who.ensure(topic, 2) for who in (one, two, one, two)))

    assert len(await kafka.partitions(topic)) == 2


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
async def test_a_topic_that_deletes_by_age_is_refused(
    kafka: SharedKafka, topic: str, side_topics: KafkaSideTopics, policy: str
) -> None:
    await kafka.create_topic(topic, 1, {"cleanup.policy": policy})

    with pytest.raises(SideTopicError, match=rf"'{topic}' has cleanup.policy={policy}.*set\s+cleanup.policy=compact"):
        await side_topics.ensure(topic, 1)


async def test_an_invalid_name_is_refused_with_the_brokers_message(side_topics: KafkaSideTopics) -> None:
    with pytest.raises(TransportError, match=r"could not be created.*other than ASCII") as caught:
        await side_topics.ensure("not a name", 1)

    assert not caught.value.retriable


async def test_a_missing_create_permission_says_what_to_grant(
    kafka: SharedKafka, topic: str, make: Make, user: Credentials
) -> None:
    side_topics = make(kafka.secure_bootstrap, **login(kafka, user))
    with pytest.raises(AuthorizationError, match="grant CREATE on it, or create it with 2 partitions"):
        await side_topics.ensure(topic, 2)

    await kafka.create_topic(topic, 2, {"cleanup.policy": "compact"})
    await allow(kafka, user, "topic", topic, AclOperation.READ, AclOperation.DESCRIBE)
    with pytest.raises(AuthorizationError, match="DESCRIBE_CONFIGS"):
        await side_topics.ensure(topic, 2)

    await allow(kafka, user, "topic", topic, AclOperation.DESCRIBE_CONFIGS)
    await side_topics.ensure(topic, 2)


# Contents of a fetch ---------------------------------------------------------------------


async def test_a_compacted_topic_is_read_to_its_end(
    kafka: SharedKafka, topic: str, side_topics: KafkaSideTopics
) -> None:
    """Real compaction: first records in the middle go, tombstones too, and at the end a transaction left its marker."""
    at = TopicPartition(topic, 0)
    await kafka.create_topic(topic, 1, QUICKLY_COMPACTED)
    await kafka.produce(topic, [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")], 0)
    side_topics.watch([at])
    assert offsets(await catch_up(side_topics, at)) == [0, 1, 2]

    async with asyncio.timeout(60):
        while True:
            # A segment is closed with the first record after its time, and only closed ones are compacted.
            await kafka.produce(topic, [(b"b", None)], 0)
            await kafka.produce_transaction(topic, [(b"c", b"4")], 0, transactional_id=topic)
            while await kafka.end_offsets(topic, "read_committed") != (ends := await kafka.end_offsets(topic)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # The marker comes a moment after the end was acknowledged.
            side_topics.watch([])
            side_topics.watch([at])
            found = await catch_up(side_topics, at)
            if found[0].offset > 1:
                break

    assert offsets(found) == sorted(set(offsets(found)))
    kept = {record.key: record.value for record in found if record.value is not None}
    assert kept == {b"a": b"3", b"c": b"4"}
    assert side_topics.position(at) == ends[0]
    assert found[-1].offset == side_topics.position(at) - 2
    assert offsets(await side_topics.read(at, 0))[0] == found[0].offset


async def test_a_fetch_in_flight_is_ignored_for_a_partition_watched_again(
    kafka: SharedKafka, topic: str, make: Make
) -> None:
    at = TopicPartition(topic, 0)
    await kafka.create_topic(topic)
    side_topics = make(kafka.bootstrap, fetch_max_wait=20.0)
    side_topics.watch([at])
    assert await side_topics.poll(1.0) == []

    side_topics.watch([])
    side_topics.watch([at])
    await kafka.produce(topic, [(b"k", b"v")])

    assert offsets(await take(side_topics, 1)) == [0]
    assert await side_topics.poll(0.3) == []


async def test_an_empty_response_beside_large_ones_is_not_the_end(
    kafka: SharedKafka, topic: str, side_topics: KafkaSideTopics
) -> None:
    """A broker also returns nothing of a partition when what it returns of others is enough."""
    partitions = [TopicPartition(topic, number) for number in range(4)]
    await kafka.create_topic(topic, 4)
    for at in partitions:
        await kafka.produce(topic, [(b"k", bytes(400_000))] * 8, at.partition)
    side_topics.watch(partitions)

    found = await catch_up(side_topics, *partitions)

    for at in partitions:
        assert offsets([record for record in found if record.topic_partition == at]) == list(range(8))


async def test_records_larger_than_a_fetch_are_read_too(
    kafka: SharedKafka, topic: str, side_topics: KafkaSideTopics
) -> None:
    one, two = TopicPartition(topic, 0), TopicPartition(topic, 1)
    await kafka.create_topic(topic, 2, {"max.message.bytes": str(8 * 1024 * 1024)})
    large = bytes(900_000)  # aiokafka's own limit is 1 MiB, and a batch may be larger than a fetch all the same.
    for at in (one, two):
        await kafka.produce(topic, [(None, large), (None, large), (None, b"small")], at.partition)
    side_topics.watch([one, two])

    found = await catch_up(side_topics, one, two)

    assert sorted((record.partition, record.offset) for record in found) == [(p, o) for p in (0, 1) for o in range(3)]
    assert offsets(await side_topics.read(one, 1))[0] == 1


async def test_a_recreated_topic_is_read_from_its_start(
    kafka: SharedKafka, topic: str, side_topics: KafkaSideTopics
) -> None:
    at = TopicPartition(topic, 0)
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"old")] * 3)
    side_topics.watch([at])
    await take(side_topics, 3)

    await kafka.delete_topic(topic)
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"new")])

    async with asyncio.timeout(20):
        while side_topics.position(at) != 1:
            try:
                found = await side_topics.poll(1.0)
            except TransportError:
                continue
            assert [record.value for record in found] in ([], [b"new"])


# Read permissions ------------------------------------------------------------------------


async def test_a_missing_read_permission_is_reported_until_granted(
    kafka: SharedKafka, topic: str, make: Make, user: Credentials
) -> None:
    """READ and DESCRIBE on the topic are enough; another topic is read all the while."""
    other = f"{topic}-other"
    for name in (topic, other):
        await kafka.create_topic(name)
        await kafka.produce(name, [(b"k", b"v")])
    await allow(kafka, user, "topic", other, AclOperation.READ)
    side_topics = make(kafka.secure_bootstrap, **login(kafka, user))
    side_topics.watch([TopicPartition(topic, 0), TopicPartition(other, 0)])

    assert [record.topic for record in await take(side_topics, 1)] == [other]
    error = await failure_of(side_topics)
    assert isinstance(error, AuthorizationError)
    assert f"read topic '{topic}'" in str(error)
    for asking in (side_topics.end(TopicPartition(topic, 0)), side_topics.read(TopicPartition(topic, 0), 0)):
        with pytest.raises(AuthorizationError, match=f"read topic '{topic}'"):
            await asking
    await allow(kafka, user, "topic", topic, AclOperation.READ)

    found: list[Record] = []
    async with asyncio.timeout(20):
        while not found:
            try:
                found = [*await side_topics.poll(0.2)]
            except AuthorizationError:
                continue
    assert [record.topic for record in found] == [topic]
    await deny(kafka, user, "topic", topic, AclOperation.READ)
    assert isinstance(await failure_of(side_topics), AuthorizationError)


async def test_a_failure_is_reported_even_while_others_return_records(
    kafka: SharedKafka, topic: str, side_topics: KafkaSideTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_GRACE", 0.2)
    monkeypatch.setattr(reading, "_REPEAT_AFTER", 0.3)
    await kafka.create_topic(topic)
    there, missing = TopicPartition(topic, 0), TopicPartition(topic, 1)
    side_topics.watch([there, missing])

    async def keep_busy() -> None:
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
            while True:
                await producer.send_and_wait(topic, b"v", partition=0)

    busy = asyncio.create_task(keep_busy())
    try:
        with pytest.raises(TransportError, match=f"{missing} cannot be read"):
            await take(side_topics, 1_000_000)
    finally:
        busy.cancel()
        await asyncio.wait([busy])


# Brokers that are gone -------------------------------------------------------------------


async def test_an_unreachable_broker_fails_every_call(make: Make) -> None:
    side_topics = make("127.0.0.1:1")
    at = TopicPartition("parked", 0)
    side_topics.watch([at])

    async with asyncio.timeout(10):
        for asking in (side_topics.poll(5.0), side_topics.end(at), side_topics.read(at, 0), side_topics.ensure("t", 1)):
            with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1"):
                await asking


@pytest.mark.chaos
async def test_an_outage_is_reported_and_no_record_is_lost(
    breakable_kafka: KafkaBroker, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PATIENCE", 2.0)
    at = TopicPartition(topic, 0)
    await breakable_kafka.create_topic(topic)
    await breakable_kafka.produce(topic, [(b"k", b"before")])
    side_topics = make(breakable_kafka.bootstrap)
    side_topics.watch([at])
    await take(side_topics, 1)

    await breakable_kafka.stop()
    error = await failure_of(side_topics)
    assert isinstance(error, ConnectError)
    assert f"no connection to a broker of {breakable_kafka.bootstrap} is open" in str(error)
    for asking in (side_topics.end(at), side_topics.read(at, 0)):
        with pytest.raises(ConnectError, match="within 2 s"):
            await asking
    await breakable_kafka.start()
    await breakable_kafka.produce(topic, [(b"k", b"after")])

    found: list[Record] = []
    async with asyncio.timeout(20):
        while not found:
            try:
                found = [*await side_topics.poll(0.5)]
            except TransportError:
                continue
    assert [record.value for record in found] == [b"after"]
    assert await side_topics.end(at) == 2


@pytest.mark.chaos
async def test_a_long_outage_rebuilds_the_client(
    breakable_kafka: KafkaBroker, topic: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have learned addresses that are no longer those of the brokers."""
    monkeypatch.setattr(reading, "_SILENCE", 0.5)
    await breakable_kafka.create_topic(topic)
    side_topics = make(breakable_kafka.bootstrap)
    side_topics.watch([TopicPartition(topic, 0)])
    assert await side_topics.poll(0.2) == []
    client = await client_of(side_topics)

    await breakable_kafka.kill()
    async with asyncio.timeout(10):
        while "could be reached" not in str(await failure_of(side_topics)):
            pass
    await breakable_kafka.start()
    await breakable_kafka.produce(topic, [(b"k", b"v")])

    async with asyncio.timeout(20):
        while side_topics.position(TopicPartition(topic, 0)) == 0:
            try:
                await side_topics.poll(0.5)
            except TransportError:
                continue
    assert await client_of(side_topics) is not client


@pytest.mark.chaos
async def test_closing_does_not_wait_for_a_hanging_broker(breakable_kafka: KafkaBroker, topic: str, make: Make) -> None:
    await breakable_kafka.create_topic(topic)
    side_topics = make(breakable_kafka.bootstrap)
    side_topics.watch([TopicPartition(topic, 0)])
    await side_topics.poll(0.1)

    breakable_kafka.freeze()
    try:
        polling = asyncio.create_task(side_topics.poll(30.0))
        asking = asyncio.create_task(side_topics.read(TopicPartition(topic, 0), 0))
        await asyncio.sleep(0)
        before = asyncio.get_running_loop().time()
        await side_topics.close()
        ended = await asyncio.gather(polling, asking, return_exceptions=True)
        assert asyncio.get_running_loop().time() - before < 4
    finally:
        breakable_kafka.thaw()
    assert all(isinstance(end, TransportError) for end in ended)
