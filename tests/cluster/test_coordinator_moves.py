"""The coordinator of a group moves and a member dies: the new owner resumes at the commits.

The old coordinator answers then that it is not the coordinator. Taken for "nothing is committed" this loses records
under `latest`, and runs them again under `earliest`.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from aioshard.errors import CommitError
from aioshard.ports import Committed, Membership
from aioshard.records import TopicPartition
from tests.guarantees.checks import SAFE
from tests.guarantees.scenario import GroupProtocol, Scenario
from tests.kafka.client.members import Member, settings_for
from tests.support.cluster import DEADLINE, Message
from tests.support.proxies import OFFSET_FETCH
from tests.support.three_brokers import OFFSETS_TOPIC, ThreeBrokers, offsets_partition

BEFORE, AFTER = 100, 500
"""Records of each topic: those that are committed when a member dies, and those produced afterwards."""


def records(count: int) -> list[Message]:
    return [(b"k%d" % (number % 10), b"%d" % number) for number in range(count)]


@pytest.mark.parametrize("policy", ["latest", pytest.param("earliest", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.chaos)])
async def test_a_new_owner_resumes_at_the_commit_when_the_coordinator_moves(
    brokers: ThreeBrokers,
    topic: str,
    group: str,
    tmp_path: Path,
    protocol: GroupProtocol,
    policy: Literal["latest", "earliest"],
) -> None:
    def settings(name: str) -> dict[str, Any]:
        return {
            "bootstrap_servers": brokers.proxied_bootstrap,
            "client_id": name,
            "auto_offset_reset": policy,
            "session_timeout": 4,
        }

    async with Scenario(brokers, topic, group, tmp_path) as x, x.beside("y") as y:
        for scenario in (x, y):
            scenario.protocol = protocol
            scenario.sampling.survives = True
            await scenario.create(1)
        for name in ("one", "other"):
            x.start(name, settings(name), beside=[y.handled()])
        await x.until(
            lambda: all(len(member.owned) == 1 for member in x.members.values()), "each member has a topic", 60
        )
        for scenario in (x, y):
            await scenario.produce(records(BEFORE))
            await scenario.until_all_committed()

        await brokers.move_coordinator(group)
        dying, successor = sorted(x.members, key=lambda name: (y.topic, 0) not in x.members[name].owned)
        held = brokers.proxies.hold(api_key=OFFSET_FETCH, client_id=successor)
        await x.kill(dying)
        for scenario in (x, y):
            await scenario.produce(records(AFTER))
        async with asyncio.timeout(DEADLINE):
            await held.met.wait()
        await brokers.move_coordinator(group)
        held.lift()

        for scenario in (x, y):
            await scenario.verify(*SAFE)


async def test_a_new_coordinator_is_trusted_once_it_knows_the_commits(
    brokers: ThreeBrokers, topic: str, group: str
) -> None:
    """Until then it answers with older offsets, and no error; the move comes right after a commit here."""
    await brokers.create_topic(topic)
    member = Member(settings_for(brokers.bootstrap, session_timeout=20), group)
    try:
        (partition,), membership = await member.join(topic)
        for offset in range(1, 3):
            await until_committed(member, {partition: Committed(offset, "")}, membership)
            assert await member.transport.committed([partition]) == {partition: Committed(offset, "")}
            await until_committed(member, {partition: Committed(offset + 10, "")}, membership)
            await brokers.move_leader(OFFSETS_TOPIC, offsets_partition(group))

            assert await member.transport.committed([partition]) == {partition: Committed(offset + 10, "")}
    finally:
        await member.transport.close()


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_a_coordinator_that_was_frozen_is_not_trusted(brokers: ThreeBrokers, topic: str, group: str) -> None:
    """It answers the question that reached it while it was frozen before it learns that another is the coordinator."""
    await brokers.create_topic(topic)
    member = Member(settings_for(brokers.proxied_bootstrap, session_timeout=20), group)
    try:
        (partition,), membership = await member.join(topic)
        await until_committed(member, {partition: Committed(1, "")}, membership)
        assert await member.transport.committed([partition]) == {partition: Committed(1, "")}
        frozen = await brokers.coordinator_of(group)
        await brokers.freeze(frozen)
        try:
            await brokers.until_fenced(frozen)
            # A commit without an answer ends its connection only after half a minute.
            await until_committed(member, {partition: Committed(2, "")}, membership, deadline=3 * DEADLINE)
            held = brokers.proxies.hold(api_key=OFFSET_FETCH)
            question = asyncio.create_task(ask(member, partition), name="committed")
            async with asyncio.timeout(DEADLINE):
                await held.met.wait()
            held.lift()
        finally:
            await brokers.thaw(frozen)

        assert await question == {partition: Committed(2, "")}
    finally:
        await member.transport.close()


async def ask(member: Member, partition: TopicPartition) -> Mapping[TopicPartition, Committed | None]:
    return await member.transport.committed([partition])


async def until_committed(
    member: Member,
    offsets: Mapping[TopicPartition, Committed],
    membership: Membership,
    *,
    deadline: float = DEADLINE,
) -> None:
    """A broker that just lost the group refuses a commit, which stays due."""
    async with asyncio.timeout(deadline):
        while True:
            try:
                return await member.transport.commit(offsets, membership)
            except CommitError:
                await asyncio.sleep(0.1)
