"""Group members, with each protocol, that reach the broker through proxies."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

import pytest

from aioshard.errors import TransportError
from aioshard.ports import NOTHING, Committed, Membership
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka.client.members import PATIENCE, Assigned, Member, settings_for
from tests.support.brokers import SharedKafka
from tests.support.proxies import Proxies

Protocol = Mapping[str, Any]
"""The settings that choose a group protocol and how commits are made."""

CLASSIC: Protocol = {"assignor": "cooperative-fair"}
EAGER: Protocol = {"assignor": "sticky"}
"""Its rebalances revoke every partition; those of the others only the partitions that move."""
CONSUMER: Protocol = {"group_protocol": "consumer"}
"""The broker assigns the partitions."""
EXACTLY_ONCE: Mapping[str, Any] = {
    "processing_guarantee": "exactly_once",
    "drain_timeout": 2,
    "commit_timeout": 3,
    "transaction_timeout": 10,
}
TRANSACTIONS: Protocol = {**CLASSIC, **EXACTLY_ONCE}
"""Each commit is a transaction."""
CONSUMER_TRANSACTIONS: Protocol = {**CONSUMER, **EXACTLY_ONCE}
NAMES = {
    "classic": CLASSIC,
    "eager": EAGER,
    "consumer": CONSUMER,
    "transactions": TRANSACTIONS,
    "consumer, transactions": CONSUMER_TRANSACTIONS,
}

OF_THE_BROKER = "session_timeout", "heartbeat_interval", "assignor"
"""Settings that the protocol `consumer` refuses."""
SHORT_SESSION: Mapping[str, Any] = {"session_timeout": 1.5, "heartbeat_interval": 0.2}


def on(*protocols: Protocol, in_chaos: Collection[Protocol] = ()) -> pytest.MarkDecorator:
    """Run a test with each of these protocols; a plain run leaves out those *in_chaos*."""
    named = [pytest.param(protocol, id=name) for name, protocol in NAMES.items() if protocol in protocols]
    named += [
        pytest.param(protocol, id=name, marks=pytest.mark.chaos)
        for name, protocol in NAMES.items()
        if protocol in in_chaos
    ]
    return pytest.mark.parametrize("protocol", named)


class Racer(Member):
    """A member that leaves alone the partitions it keeps in a rebalance, as the engine does.

    Begins each new one at `start`, or where it stopped reading it.
    """

    def __init__(self, settings: Settings, group: str) -> None:
        super().__init__(settings, group)
        self.opened: set[TopicPartition] = set()
        self.at_assign = self._open_new

    def _open_new(self, partitions: Collection[TopicPartition], _: Membership) -> None:
        self.opened.intersection_update(partitions)
        new = set(partitions) - self.opened
        for topic_partition in new:
            self.transport.seek(topic_partition, self.next_offsets.setdefault(topic_partition, self.start))
        self.transport.resume(new)
        self.opened.update(new)

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        await super().revoked(partitions)
        self.opened.difference_update(partitions)

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        super().lost(partitions)
        self.opened.difference_update(partitions)

    @property
    def holds(self) -> set[TopicPartition]:
        """Its partitions, without those that are being revoked."""
        holds: set[TopicPartition] = set()
        for event in self.events:
            if isinstance(event, Assigned):
                holds = set(event.partitions)
            else:
                holds.difference_update(event.partitions)
        return holds

    async def stored(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        """The group's committed offsets, as soon as no transaction is open: brokers answer before one has ended."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    return await self.transport.committed(partitions)
                except TransportError as error:
                    if not error.retriable:
                        raise

    async def until_it_gives_up(self) -> None:
        """Return when it has lost its partitions, or its client has ended."""
        try:
            await self.poll_until(lambda: any(revoked.lost for revoked in self.revocations), lambda _: NOTHING)
        except TransportError:
            return


Join = Callable[..., Racer]


@pytest.fixture
async def racers(proxies: Proxies) -> AsyncIterator[list[Racer]]:
    """Members in this list are closed at the end, the newest first; no rule of the proxies holds them up."""
    joined: list[Racer] = []
    yield joined
    proxies.clear()
    for racer in reversed(joined):
        await asyncio.wait_for(racer.transport.close(), PATIENCE)


@pytest.fixture
def join(kafka: SharedKafka, group: str, racers: list[Racer], protocol: Protocol) -> Join:
    """Makes members of the test's group, by the name under which rules of the proxies know them.

    Other arguments are settings.
    """

    def make(name: str, **overrides: Any) -> Racer:
        chosen = {"client_id": name, **protocol, **overrides}
        of_the_group = chosen.pop("group_protocol", "classic")
        settings = settings_for(kafka.proxied_bootstrap, **chosen)
        if of_the_group != "classic":
            kept = {name: getattr(settings, name) for name in settings.model_fields_set.difference(OF_THE_BROKER)}
            # Users cannot set the session, which is the broker's; the default is too long for a test.
            settings = Settings(**kept, group_protocol=of_the_group).model_copy(update=SHORT_SESSION)
        racers.append(Racer(settings, group))
        return racers[-1]

    return make
