"""An app without handlers on a real broker."""

from aioshard import App
from aioshard.kafka.admin import KafkaAdmin
from tests.support.brokers import SharedKafka


async def test_an_app_without_handlers_publishes_and_joins_no_group(kafka: SharedKafka, group: str, topic: str) -> None:
    await kafka.create_topic(topic)
    app = App(group, bootstrap_servers=kafka.bootstrap)

    async with app:
        offsets = [await app.publish(topic, b"", partition=0) for _ in range(3)]
        async with KafkaAdmin(app.settings) as admin:
            described = await admin.group(group)

    assert offsets == [0, 1, 2]
    assert described.state == "dead"  # the brokers do not know it
