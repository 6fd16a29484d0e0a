"""Topics are subscribed and unsubscribed while members of a real group run."""

import asyncio
from collections import Counter
from typing import Any

from aioshard import App, Record
from tests.kafka.client.test_apps import ONE_PROTOCOL_QUICKLY, Process, until
from tests.support.brokers import SharedKafka

RECORDS = 40


async def fill(kafka: SharedKafka, topic: str, name: bytes) -> set[bytes]:
    sent = {b"%s-%d" % (name, number) for number in range(RECORDS)}
    await kafka.produce(topic, [(value, value) for value in sorted(sent)])
    return sent


@ONE_PROTOCOL_QUICKLY
async def test_a_running_app_subscribes_and_unsubscribes_a_topic(
    kafka: SharedKafka, topic: str, group: str, protocol: dict[str, Any]
) -> None:
    other = f"{topic}.other"
    for name in (topic, other):
        await kafka.create_topic(name, 3)
    seen: Counter[bytes] = Counter()

    async def handle(record: Record) -> None:
        await asyncio.sleep(0.002)
        seen[record.value or b""] += 1

    def topics(app: App) -> set[str]:
        return {partition.topic for partition in app.assignment()}

    first, second = (Process(kafka, group, **protocol).app for _ in range(2))
    for app in (first, second):
        app.consume(topic)(handle)
    async with first, second:
        expected = await fill(kafka, topic, b"before") | await fill(kafka, other, b"early")
        first.subscribe("handle", other)
        await until(lambda: expected <= seen.keys())
        assert (other in topics(first), other in topics(second)) == (True, False)

        second.subscribe("handle", other)
        first.unsubscribe("handle", other)
        await until(lambda: (other in topics(first), other in topics(second)) == (False, True))
        expected |= await fill(kafka, other, b"more")
        await until(lambda: expected <= seen.keys())

        second.unsubscribe("handle", other)
        await until(lambda: topics(first) | topics(second) == {topic})
        left = await fill(kafka, other, b"left")
        expected |= await fill(kafka, topic, b"after")
        await until(lambda: expected <= seen.keys())
        assert not left & seen.keys()
        assert await kafka.lag(group, other) == RECORDS, "all that was processed of it is committed"
        await kafka.wait_for_lag(group, topic)
    assert set(seen.values()) == {1}, "nothing ran twice"
