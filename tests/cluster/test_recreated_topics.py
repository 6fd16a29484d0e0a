"""A topic is deleted and created again on three brokers: what both logs had runs, each record once and in order."""

from collections import Counter, defaultdict
from contextlib import AsyncExitStack

import pytest

from aioshard import App
from aioshard.kafka.wire.requests import METADATA
from tests.kafka.faults.support import Ledger, messages, quick_app, until
from tests.support.cluster import Message
from tests.support.proxies import Request
from tests.support.three_brokers import ThreeBrokers

OLD, NEW = 300, 500
"""Records of the old log, and of the new one: all positions in the former are inside the latter."""
OLD_ANSWERS = 4
"""Answers that brokers give which have not heard that the topic is another one; fewer than make us believe them."""
LAYOUT = {number: [number % 2 + 1, 2 - number % 2] for number in range(6)}
"""Partitions on two brokers."""


class OldMetadata:
    """Answers of brokers that are behind: those from before a moment, given again after it."""

    def __init__(self, topic: str) -> None:
        self.left = 0
        """How many old answers to give."""
        self.is_current = True
        """Whether to note answers."""
        self._topic = topic.encode()
        self._body = b""

    def change(self, request: Request, answer: bytes) -> bytes:
        """Note an answer to our own client and not aiokafka's, or replace it."""
        if request.api_version != METADATA.highest or self._topic not in answer:
            return answer
        if self.is_current:
            self._body = answer[4:]
        if self.is_current or not self.left:
            return answer
        self.left -= 1
        return answer[:4] + self._body


def assert_each_once_in_order(ledger: Ledger, sent: list[Message]) -> None:
    assert Counter(ledger.values) == Counter(value for _, value in sent)
    by_key: dict[bytes | None, list[int]] = defaultdict(list)
    for record in ledger.finished:
        assert record.value is not None
        by_key[record.key].append(int(record.value))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def member(brokers: ThreeBrokers, topic: str, group: str, ledger: Ledger) -> App:
    app = quick_app(brokers.proxied_bootstrap, group)
    app.consume(topic)(ledger.handle)
    return app


@pytest.mark.timeout(240)
async def test_a_topic_that_is_created_again_is_read_by_running_members(
    brokers: ThreeBrokers, topic: str, group: str
) -> None:
    """Also if brokers still name the old one after others have named the new one."""
    old = OldMetadata(topic)
    brokers.proxies.answer(old.change, api_key=METADATA.key)
    await brokers.create_topic(topic, assignment=LAYOUT)
    ledger = Ledger()
    apps = [member(brokers, topic, group, ledger) for _ in range(2)]
    async with AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(app)
        sent = messages(OLD)
        await brokers.produce(topic, sent)
        await ledger.until_finished(sent)
        await brokers.wait_for_lag(group, topic)

        old.is_current = False
        await brokers.delete_topic(topic)
        await brokers.create_topic(topic, assignment=LAYOUT)
        new = messages(NEW, start=1000)
        await brokers.produce(topic, new[: NEW // 2])
        await ledger.until_finished(sent + new[: NEW // 2])
        old.left = OLD_ANSWERS
        await until(lambda: not old.left)
        await brokers.produce(topic, new[NEW // 2 :])

        await ledger.until_finished(sent + new)
        await brokers.wait_for_lag(group, topic)
        await until(lambda: all(app.statistics().trouble is None for app in apps), apps[0].explain)
    assert_each_once_in_order(ledger, sent + new)
