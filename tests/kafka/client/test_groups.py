"""Groups of both protocols seen from outside, and removal of a static member."""

from collections.abc import AsyncIterator, Callable

import pytest

from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Allowance, Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from tests.kafka.client.members import Member, settings_for
from tests.support.brokers import SharedKafka

Join = Callable[..., Member]

PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])


@pytest.fixture
async def brokers(kafka: SharedKafka) -> AsyncIterator[KafkaAdmin]:
    async with KafkaAdmin(settings_for(kafka.bootstrap)) as brokers:
        yield brokers


@pytest.fixture
async def partitions(kafka: SharedKafka, topic: str) -> tuple[TopicPartition, ...]:
    await kafka.create_topic(topic, 3)
    return tuple(TopicPartition(topic, number) for number in range(3))


@pytest.fixture
def static(kafka: SharedKafka, group: str, members: list[Member], member: Join) -> Join:
    """Makes a static member of the test's group."""

    def make(instance_id: str, protocol: str) -> Member:
        if protocol == "classic":
            return member(group_instance_id=instance_id)
        newer = Settings(
            bootstrap_servers=kafka.bootstrap,
            group_protocol="consumer",
            group_instance_id=instance_id,
        )
        members.append(Member(newer, group))
        return members[-1]

    return make


@PROTOCOLS
async def test_members_are_described_with_their_partitions(
    static: Join, brokers: KafkaAdmin, group: str, partitions: tuple[TopicPartition, ...], protocol: str
) -> None:
    alone = static("alone", protocol)
    await alone.join(partitions[0].topic)
    # The coordinator may learn of a new topic a moment later than the brokers that lead it, and assign nothing first.
    await alone.poll_until(lambda: bool(alone.assignments[-1].partitions), lambda _: Allowance(0, 0))

    found = await brokers.group(group)

    (described,) = found.members
    assert (found.state, found.protocol) == ("stable", protocol)
    assert found.assignor == ("uniform" if protocol == "consumer" else "roundrobin")
    assert described.instance_id == "alone"
    assert described.host.lstrip("/") == "127.0.0.1"
    assert described.partitions == alone.assignments[-1].partitions == partitions
    assert found.owners == dict.fromkeys(partitions, described)


async def test_an_unknown_group_is_dead_and_has_a_coordinator(brokers: KafkaAdmin, group: str) -> None:
    assert await brokers.all_commits(group) == {}
    assert (await brokers.group(group))[:2] == ("dead", "classic")
    found = await brokers.coordinator(group)
    assert found.host == "127.0.0.1"


async def test_all_commits_of_a_group_are_listed(
    member: Join, brokers: KafkaAdmin, group: str, partitions: tuple[TopicPartition, ...]
) -> None:
    committing = member()
    joined = await committing.join(partitions[0].topic)
    await committing.transport.commit({partitions[1]: Committed(7, "note")}, joined.membership)

    assert await brokers.all_commits(group) == {partitions[1]: Committed(7, "note")}


@PROTOCOLS
async def test_a_static_member_can_be_removed(
    static: Join, brokers: KafkaAdmin, group: str, partitions: tuple[TopicPartition, ...], protocol: str
) -> None:
    gone = static("gone", protocol)
    await gone.join(partitions[0].topic)
    await gone.transport.close()
    assert [member.instance_id for member in (await brokers.group(group)).members] == ["gone"]

    assert await brokers.remove_member(group, instance_id="gone")

    assert (await brokers.group(group)).members == ()
    assert not await brokers.remove_member(group, instance_id="gone")
