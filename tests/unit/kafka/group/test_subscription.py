"""The topics that a member subscribes to."""

import asyncio
import logging
import re
from collections.abc import Collection
from typing import Any, cast

import pytest

from aioshard.errors import TransportError
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.group import subscription as of_subscriptions
from aioshard.kafka.group.consumer_driver import ConsumerDriver
from aioshard.kafka.group.subscription import Subscription
from aioshard.kafka.queries import Queries


class Metadata:
    denied: frozenset[str] = frozenset()


class Cluster:
    """Knows which topics this user may not see once they were looked up."""

    def __init__(self, secret: Collection[str] = ()) -> None:
        self.metadata = Metadata()
        self.followed: list[Collection[str]] = []
        self._secret = frozenset(secret)

    def follow_only(self, topics: Collection[str]) -> None:
        self.followed.append(topics)

    async def look_up(self, topics: Collection[str]) -> None:
        self.metadata.denied = self._secret.intersection(topics)


class Topics:
    """The topics of the cluster, which the brokers list in none of the next *failures* queries."""

    def __init__(self) -> None:
        self.failures = 0
        self.found: frozenset[str] = frozenset()
        self.queries = 0

    async def topics(self) -> frozenset[str]:
        self.queries += 1
        if self.failures:
            self.failures -= 1
            raise TransportError(f"no answer to query {self.queries}")
        return self.found


class Reading:
    partitions = ()


class Driver:
    watched = frozenset({"of-another-member"})

    def __init__(self) -> None:
        self.subscribed: list[Collection[str]] = []
        self.told = asyncio.Event()

    def subscribe(self, topics: Collection[str]) -> None:
        self.subscribed.append(topics)
        self.told.set()


def subscription_of(cluster: Cluster, topics: Topics) -> Subscription:
    parts: Any = (cluster, cast("Queries", topics), cast("Fetcher", Reading()))
    return Subscription("billing", *parts, metadata_max_age=1_000.0)


async def test_a_topic_that_this_user_may_not_see_is_left_out_before_the_group_hears_of_it() -> None:
    """Brokers refuse the whole heartbeat of a member that names one."""
    subscription = subscription_of(Cluster(secret=["secret"]), Topics())
    subscription.topics = frozenset({"orders", "secret"})
    await subscription.look_up()
    assert subscription.known == {"orders"}


async def test_the_topics_of_other_members_are_followed_as_long_as_we_lead() -> None:
    cluster = Cluster()
    subscription = subscription_of(cluster, Topics())
    subscription.topics = frozenset({"orders"})
    subscription.driver = cast("ConsumerDriver", Driver())
    await subscription.look_up()
    assert cluster.followed == [{"orders", "of-another-member"}]


async def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics are looked up once a second then."""
    caplog.set_level(logging.INFO, "aioshard.kafka.group")
    monkeypatch.setattr(of_subscriptions, "_RETRY_PAUSE", 0.0)
    topics, driver = Topics(), Driver()
    subscription = subscription_of(Cluster(), topics)
    subscription.pattern = re.compile("topic-.*")
    subscription.driver = cast("ConsumerDriver", driver)
    running = asyncio.create_task(subscription.run(), name="topics")
    logged: list[list[str]] = []
    for failures in (0, 3, 0, 2):
        topics.found |= {f"topic-{len(logged)}"}
        topics.failures = failures
        driver.told.clear()
        subscription.changed.set()
        async with asyncio.timeout(10.0):
            await driver.told.wait()
        assert driver.subscribed[-1] == topics.found
        logged.append([record.getMessage() for record in caplog.records])
        caplog.clear()
    running.cancel()
    await asyncio.wait([running])
    (first, last), (again, _) = logged[1], logged[3]
    assert logged[0] == logged[2] == []
    assert "no answer to query 2" in first
    assert "known again" in last
    assert "no answer to query 7" in again
