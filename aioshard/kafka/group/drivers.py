"""The choice of a group protocol, and the member of each protocol with its thread."""

import random
from collections.abc import Callable, Collection

from aioshard.kafka.group.assignors import GroupAssignor
from aioshard.kafka.group.classic import ClassicEvent, ClassicMember
from aioshard.kafka.group.classic_driver import ClassicDriver, ClassicProtocol
from aioshard.kafka.group.consumer import ConsumerMember
from aioshard.kafka.group.consumer_driver import ConsumerDriver, ConsumerProtocol, patterns_beside
from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.start import new_cluster
from aioshard.ports import ChosenProtocol
from aioshard.settings import Settings

OnEvent = Callable[[ClassicEvent], None]


def first_choice(settings: Settings) -> ChosenProtocol:
    """Return the protocol to join with; the group may refuse it."""
    chosen = settings.group_protocol
    given = settings.classic_settings
    if chosen != "auto":
        return ChosenProtocol(chosen, "group_protocol is set")
    if given:
        return ChosenProtocol("classic", f"only this protocol has {' and '.join(given)}")
    return ChosenProtocol("consumer", "no setting asks for the classic one")


def consumer_driver(
    settings: Settings, group_id: str, topics: Collection[str], known: Cluster, on_event: OnEvent
) -> ConsumerDriver:
    """Return a member of the consumer protocol, not started.

    Args:
        settings: The settings of the app.
        group_id: The group.
        topics: The topics that it subscribes to first.
        known: A cluster from whose brokers it begins.
        on_event: Called in the event loop for each event of the member.
    """
    member = ConsumerMember(
        random.SystemRandom(),
        topics=topics,
        patterns=patterns_beside(topics),
        rebalance_timeout=settings.rebalance_timeout,
        instance_id=settings.group_instance_id,
        rack=settings.client_options.get("client_rack"),
        assignor=settings.client_options.get("group_remote_assignor"),
    )
    return ConsumerDriver(
        ConsumerProtocol(group_id, member),
        _cluster_of_thread(settings, known),
        on_event,
        rebalance_timeout=settings.rebalance_timeout,
    )


def classic_driver(
    settings: Settings,
    group_id: str,
    topics: Collection[str],
    known: Cluster,
    on_event: OnEvent,
    *,
    assignor: GroupAssignor,
) -> ClassicDriver:
    """Return a member of the classic protocol, not started.

    Args:
        settings: The settings of the app.
        group_id: The group.
        topics: The topics that it subscribes to first.
        known: A cluster from whose brokers it begins.
        on_event: Called in the event loop for each event of the member.
        assignor: Its assignor, with which it leads the group.
    """
    member = ClassicMember(
        topics,
        [assignor],
        random.SystemRandom(),
        session_timeout=settings.session_timeout,
        heartbeat_interval=settings.heartbeat_interval,
        rebalance_timeout=settings.rebalance_timeout,
        instance_id=settings.group_instance_id,
    )
    return ClassicDriver(
        ClassicProtocol(group_id, member),
        _cluster_of_thread(settings, known),
        on_event,
        rebalance_timeout=settings.rebalance_timeout,
    )


def _cluster_of_thread(settings: Settings, known: Cluster) -> Callable[[], Cluster]:
    """Return what makes the cluster of the thread. It begins with the brokers that we know: a server may hang."""
    brokers = tuple(known.metadata.brokers.values())

    def make() -> Cluster:
        cluster = new_cluster(settings)
        for broker in brokers:
            cluster.learn_broker(broker)
        return cluster

    return make
