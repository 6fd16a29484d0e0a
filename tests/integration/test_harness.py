"""The harness itself: a broker that lies about the tests' results is worse than none."""

from tests.support.kafka import KafkaBroker
from tests.support.shared_kafka import SharedKafka


async def test_what_is_produced_is_read_back(kafka: SharedKafka, topic: str) -> None:
    await kafka.create_topic(topic, partitions=3)
    messages = [(b"key-%d" % (number % 7), b"value-%d" % number) for number in range(1000)]

    positions = await kafka.produce(topic, messages)

    records = await kafka.read(topic)
    found = {(record.partition, record.offset): (record.key, record.value) for record in records}
    assert [found[at] for at in positions] == messages
    assert sum((await kafka.end_offsets(topic)).values()) == len(messages)


async def test_restart_keeps_address_and_data(own_kafka: KafkaBroker, topic: str) -> None:
    await own_kafka.create_topic(topic)
    await own_kafka.produce(topic, [(None, b"before")])
    address = own_kafka.bootstrap

    await own_kafka.restart()

    assert own_kafka.bootstrap == address
    assert [record.value for record in await own_kafka.read(topic)] == [b"before"]
