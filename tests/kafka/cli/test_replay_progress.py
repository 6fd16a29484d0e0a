"""Replay progress of dead letters as brokers store it."""

import time

from aioshard import Settings
from aioshard.dead_letters.filters import EVERYTHING
from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.plan import make_plan
from aioshard.dead_letters.progress import progress_group, sending_group
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.kafka.producer import KafkaProducer
from aioshard.records import Record
from aioshard.serde.side_records import Failure, dead_letter
from tests.support.brokers import SharedKafka

WITH_EXPIRY = 1
"""Version of a stored offset that names its own time to go, instead of the broker's `offsets.retention.minutes`."""


async def test_replay_progress_is_kept_for_years_without_members(kafka: SharedKafka, topic: str) -> None:
    """A broker forgets those of an empty group after a week, and everything would be sent again."""
    letters_topic = f"{topic}.dlt"
    settings = Settings(bootstrap_servers=kafka.bootstrap)
    await kafka.create_topic(letters_topic, 1, {"retention.ms": "-1"})
    producer = KafkaProducer(settings)
    record = Record("orders", 0, 1, b"k", b"v", (), 1.6e9)
    await producer.publish(dead_letter(letters_topic, record, Failure("g", "h", 1, "ValueError", "no", 1.7e9)))
    await producer.close()

    async with DeadLetterTopic.opened(settings, letters_topic) as dead_letters:
        await dead_letters.fetch_progress()
        plan = await make_plan(dead_letters, EVERYTHING)
        async with Ledger.opened(settings, dead_letters) as ledger:
            plan.adopt(dead_letters)
            await ledger.store(list(plan.due))
            await ledger.copy()

    stored = [
        record.value
        for record in await kafka.read("__consumer_offsets")
        if progress_group(letters_topic).encode() in (record.key or b"")
        and sending_group(letters_topic).encode() not in (record.key or b"")
        and record.value is not None
    ]
    version, expires = int.from_bytes(stored[-1][:2]), int.from_bytes(stored[-1][-8:]) / 1000
    assert version == WITH_EXPIRY
    assert expires > time.time() + 9 * 365 * 86_400
