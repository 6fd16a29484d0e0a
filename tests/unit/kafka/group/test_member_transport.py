"""The transport of group members, with a driver that only says what the test tells it."""

import asyncio
import math
import time
import uuid
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aioshard.errors import CommitError, CommitRefusedError, InstanceIdTakenError
from aioshard.kafka.group.classic import Elected
from aioshard.kafka.group.drivers import first_choice
from aioshard.kafka.group.leader import Leader
from aioshard.kafka.group.member import (
    NO_PARTITIONS,
    Assigned,
    Ended,
    Event,
    Lost,
    Ownership,
    Refused,
    Revoked,
    Troubled,
)
from aioshard.kafka.groups import GroupMember
from aioshard.kafka.wire.codes import ERROR_CODES
from aioshard.ports import NOT_A_MEMBER, Committed, Membership
from aioshard.settings import Settings
from tests.unit.kafka.group.lone_transport import BOTH, FIRST, SECOND, Alone, Driver


async def test_a_membership_ends_with_its_time_before_the_engine_hears_of_that() -> None:
    transport = Alone()
    assert await transport.assign() == Membership("one", 5)
    transport.driver.now = 4.0
    assert transport.owned_for == 6.0
    transport.driver.now = 10.0
    assert transport.owned_for == 0.0
    assert transport.membership() == NOT_A_MEMBER
    await transport.close()


async def test_nothing_starts_under_the_identity_of_a_later_life() -> None:
    """The loss waits in the queue of the event loop, and the thread has joined again."""
    transport = Alone()
    await transport.assign()
    transport.driver.begin_another_life()
    assert transport.owned_for == 0.0
    await transport.close()


async def test_a_manual_assignment_is_ours_for_ever() -> None:
    transport = Alone()
    transport._driver = None
    assert transport.owned_for == math.inf
    await transport.close()


async def test_a_commit_is_not_sent_under_the_identity_of_a_later_life() -> None:
    """The brokers would store it: they compare the member and its epoch, not the partitions."""
    transport = Alone()
    membership = await transport.assign()
    transport.driver.begin_another_life()
    assert transport.membership() == NOT_A_MEMBER
    with pytest.raises(CommitRefusedError):
        await transport.commit({FIRST: Committed(7, "")}, membership)
    await transport.close()


async def test_a_commit_is_not_sent_for_an_earlier_life_with_the_same_member_id() -> None:
    """A classic member keeps its id when it was only too late; another member may have had the partition meanwhile."""
    transport = Alone("classic")
    membership = await transport.assign()
    transport.driver.ownership = Ownership(2, "one", 7, BOTH, 20.0)
    assert transport.membership() == NOT_A_MEMBER
    with pytest.raises(CommitRefusedError):
        await transport.commit({FIRST: Committed(7, "")}, membership)
    await transport.close()


@pytest.mark.parametrize("code", [22, 27, 113])
async def test_a_commit_that_another_generation_overtook_may_be_sent_again(code: int) -> None:
    transport = Alone("classic")
    membership = await transport.assign()
    transport.refusal = code
    with pytest.raises(CommitError) as raised:
        await transport.commit({FIRST: Committed(7, "")}, membership)
    assert not isinstance(raised.value, CommitRefusedError)
    assert transport.driver.refused == [code]
    await transport.close()


async def test_a_commit_of_a_life_that_has_ended_meanwhile_is_not_sent_again() -> None:
    transport = Alone("classic")
    membership = await transport.assign()
    transport.refusal = 22
    transport.ends_meanwhile = True
    with pytest.raises(CommitRefusedError):
        await transport.commit({FIRST: Committed(7, "")}, membership)
    await transport.close()


@pytest.mark.parametrize("code", [25, 69, 82, 110])
async def test_a_commit_of_a_member_that_the_group_does_not_know_is_not_sent_again(code: int) -> None:
    transport = Alone("classic")
    membership = await transport.assign()
    transport.refusal = code
    with pytest.raises(CommitRefusedError):
        await transport.commit({FIRST: Committed(7, "")}, membership)
    assert transport.driver.refused == [code]
    await transport.close()


async def test_a_commit_is_not_sent_for_what_the_group_has_taken_back() -> None:
    transport = Alone()
    membership = await transport.assign()
    transport.driver.ownership = Ownership(1, "one", 6, frozenset({SECOND}), 10.0)
    with pytest.raises(CommitRefusedError):
        await transport.commit({FIRST: Committed(7, "")}, membership)
    await transport.close()


async def test_a_loss_does_not_wait_for_a_drain_and_ends_what_was_planned_behind_it() -> None:
    transport = Alone()
    await transport.assign()
    own = transport.driver.ownership
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    transport.driver.begin_another_life()
    await transport.tell(Assigned(1, NO_PARTITIONS, own), Lost(1, BOTH, "the session is over"))
    transport.engine.drained.set()
    await transport.tell()
    assert transport.engine.told[1:] == [("revoked", frozenset({FIRST})), ("lost", BOTH)]
    assert transport.driver.let_go == []
    await transport.close()


async def test_an_engine_that_is_closed_during_a_drain_is_told_nothing_more() -> None:
    transport = Alone()
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    closing = asyncio.create_task(transport.close(), name="close")
    await asyncio.sleep(0)
    transport.engine.drained.set()
    await closing
    assert transport.engine.told[1:] == [("revoked", frozenset({FIRST}))]


async def test_an_engine_that_drains_while_the_client_closes_hears_of_a_loss() -> None:
    """Its handlers would run until the drain deadline, beside those of the next owner."""
    transport = Alone()
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    closing = asyncio.create_task(transport.close(), name="close")
    await asyncio.sleep(0)
    transport.driver.begin_another_life()
    await transport.tell(Lost(1, BOTH, "the session is over"))
    assert transport.engine.told[1:] == [("revoked", frozenset({FIRST})), ("lost", BOTH)]
    transport.engine.drained.set()
    await closing
    assert transport.driver.let_go == []
    assert len(transport.engine.told) == 3


async def test_a_closing_client_tells_nothing_of_the_loss_by_its_leave() -> None:
    transport = Alone()
    await transport.assign()
    await transport.close()
    await transport.tell(Lost(1, BOTH, "the app closes its client"))
    assert transport.engine.told == [("assigned", BOTH)]


async def test_partitions_are_released_once_the_engine_has_drained_them() -> None:
    transport = Alone()
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    assert transport.driver.let_go == []
    transport.engine.drained.set()
    await transport.tell()
    assert transport.driver.let_go == [(1, frozenset({FIRST}))]
    assert transport.engine.told[1:] == [("revoked", frozenset({FIRST}))], "it knows the others"
    await transport.close()


async def test_an_engine_with_nothing_left_is_told_so() -> None:
    """It cannot know whether something else is assigned at once."""
    transport = Alone()
    await transport.assign()
    transport.engine.drained.set()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0), Revoked(1, frozenset({SECOND}), 9.0))
    await transport.tell()
    assert transport.engine.told[2:] == [("revoked", frozenset({SECOND})), ("assigned", NO_PARTITIONS)]
    await transport.close()


async def test_an_engine_with_nothing_left_is_told_only_what_comes_next() -> None:
    transport = Alone()
    transport.others = [GroupMember("slow", "aioshard", "/127.0.0.1", None)]
    await transport.assign()
    transport.engine.drained.set()
    await transport.tell(Revoked(1, BOTH, 9.0))
    await transport.tell()
    assert transport.engine.told[1:] == [("revoked", BOTH)]
    await transport.assign()
    assert transport.engine.told[1:] == [("revoked", BOTH), ("assigned", BOTH)]
    await transport.close()


async def test_an_eager_member_is_none_until_the_group_has_assigned_everything_anew() -> None:
    transport = Alone("classic", is_incremental=False)
    transport.engine.drained.set()
    await transport.assign()
    await transport.tell(Revoked(1, BOTH, 9.0))
    assert transport.driver.let_go == [(1, BOTH)]
    assert transport.membership() == NOT_A_MEMBER
    assert transport.engine.told[-1] == ("revoked", BOTH), "it has no assignment, not an empty one"

    nothing = Ownership(1, "one", 6, NO_PARTITIONS, 10.0)
    transport.driver.ownership = nothing
    await transport.tell(Assigned(1, NO_PARTITIONS, nothing))
    assert transport.engine.told[-1] == ("assigned", NO_PARTITIONS)
    assert transport.membership() == Membership("one", 6)
    await transport.close()


async def test_the_others_get_their_partitions_from_a_leader_that_drains_for_the_last_time() -> None:
    transport = Alone("classic")
    elected: list[Elected] = []
    transport._leader = cast("Leader", SimpleNamespace(elect=elected.append))
    await transport.assign()
    await transport.tell(Revoked(1, frozenset({FIRST}), 9.0))
    await transport.engine.draining.wait()
    closing = asyncio.create_task(transport.close(), name="close")
    await asyncio.sleep(0)
    election = Elected(7, "fair", {})
    await transport.tell(election)
    assert elected == [election]
    transport.engine.drained.set()
    await closing


async def test_an_empty_assignment_counts_only_when_no_member_has_to_release_anything() -> None:
    transport = Alone()
    transport.others = [GroupMember("dead", "aioshard", "/127.0.0.1", None)]
    nothing = Ownership(1, "one", 5, NO_PARTITIONS, 10.0)
    transport.driver.ownership = nothing
    await transport.tell(Assigned(1, NO_PARTITIONS, nothing))
    assert transport.engine.told == []
    assert "dead" in (transport.slow_join or "")
    transport.driver.ownership = Ownership(1, "one", 6, BOTH, 10.0)
    await transport.assign()
    assert transport.engine.told == [("assigned", BOTH)]
    await transport.close()


async def test_an_empty_assignment_does_not_count_while_the_group_rebalances_with_us_alone() -> None:
    """It has removed a dead member, and has its partitions for our next heartbeat."""
    transport = Alone()
    transport.others = []
    nothing = Ownership(1, "one", 5, NO_PARTITIONS, 10.0)
    transport.driver.ownership = nothing
    await transport.tell(Assigned(1, NO_PARTITIONS, nothing))
    assert transport.engine.told == []
    transport.driver.ownership = Ownership(1, "one", 6, BOTH, 10.0)
    await transport.assign()
    assert transport.engine.told == [("assigned", BOTH)]
    await transport.close()


@pytest.mark.parametrize(
    ("event", "permanent"),
    [(Refused(35, "the broker does not have the protocol"), True), (Refused(25, ""), False)],
)
async def test_a_group_without_the_protocol_says_which_one_to_use(event: Event, permanent: bool) -> None:
    transport = Alone()
    await transport.tell(event)
    error = await transport.failure()
    assert error.retriable is not permanent
    assert "group_protocol='classic'" in str(error)
    await transport.close()


@pytest.mark.parametrize(("code", "permanent"), [(23, False), (35, True)])
async def test_a_group_that_accepts_no_classic_member_is_not_told_to_use_the_classic_protocol(
    code: int, permanent: bool
) -> None:
    transport = Alone("classic")
    await transport.tell(Refused(code, ""))
    error = await transport.failure()
    assert error.retriable is not permanent
    assert "classic" not in str(error)
    await transport.close()


async def test_an_instance_id_that_stays_taken_for_more_than_a_session_ends_the_app() -> None:
    transport = Alone(group_instance_id="one")
    await transport.tell(Ended(111, ""))
    error = await transport.failure()
    assert isinstance(error, InstanceIdTakenError)
    assert (error.persists, error.session_timeout) == (True, 6.0)
    await transport.close()


class Choosing(Alone):
    """Becomes a member without a thread."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("auto", **settings)
        self.began: list[str] = []
        self.closed: list[str] = []

    def _begin_driver(self, protocol: str) -> Any:
        driver = Driver(protocol)

        async def close(timeout: float, reason: str) -> None:  # noqa: ARG001 - as the real one
            self.closed.append(protocol)

        driver.close = close  # type: ignore[method-assign]
        driver.start = lambda: self.began.append(protocol)  # type: ignore[attr-defined]
        self.driver = driver
        return driver

    def _consumer_driver(self) -> Any:
        return self._begin_driver("consumer")

    def _classic_driver(self) -> Any:
        return self._begin_driver("classic")


@pytest.mark.parametrize(
    ("settings", "name", "reason"),
    [
        ({}, "consumer", "no setting"),
        ({"session_timeout": 45}, "classic", "session_timeout"),
        ({"heartbeat_interval": 3, "assignor": "fair"}, "classic", "assignor and heartbeat_interval"),
        ({"reassignment_delay": 0, "balance_interval": 0}, "consumer", "no setting"),
        ({"reassignment_delay": 5}, "classic", "reassignment_delay"),
    ],
)
def test_settings_of_the_classic_protocol_choose_it(settings: dict[str, Any], name: str, reason: str) -> None:
    chosen = first_choice(Settings(**settings))
    assert chosen.name == name
    assert reason in chosen.reason


async def test_a_group_that_refuses_the_consumer_protocol_gets_a_classic_member() -> None:
    transport = Choosing()
    transport._become_member(first_choice(transport._settings))
    assert transport.began == ["consumer"]
    await transport.tell(Troubled(69, "not yet"))
    await transport.tell(Refused(69, "the group is classic"))
    assert (transport.began, transport.closed) == (["consumer", "classic"], ["consumer"])
    assert transport.group_protocol is not None
    assert transport.group_protocol.name == "classic"
    assert "the group is classic" in transport.group_protocol.reason
    assert transport._group_trouble is None
    assert await transport.assign() == Membership("one", 5)
    await transport.close()


async def test_a_group_that_refuses_both_protocols_ends_the_client() -> None:
    transport = Choosing()
    transport._become_member(first_choice(transport._settings))
    await transport.tell(Refused(35, ""))
    await transport.tell(Refused(23, "another assignor"))
    assert "another assignor" in str(await transport.failure())
    await transport.close()


async def test_a_client_that_is_closed_does_not_join_with_the_other_protocol() -> None:
    transport = Choosing()
    transport._become_member(first_choice(transport._settings))
    transport._on_event(Refused(35, ""))
    await transport.close()
    assert transport.began == ["consumer"]


async def test_a_task_that_is_cancelled_from_outside_ends_the_client() -> None:
    transport = Alone()
    (task,) = transport._tasks
    task.add_done_callback(transport._note_end)
    task.cancel()
    await transport.tell()
    assert "assignments" in str(await transport.failure())
    await transport.close()


async def test_trouble_tells_silence_from_a_refusal() -> None:
    transport = Alone()
    await transport.assign()
    texts = []
    for event in (Troubled(None, "no answer in time"), Troubled(81, "")):
        await transport.tell(event)
        texts.append(transport._group_trouble)
    assert "does not answer" in (texts[0] or "")
    assert ERROR_CODES[81].text in (texts[1] or "")
    await transport.close()


async def test_trouble_names_a_topic_that_no_broker_names_after_a_while() -> None:
    transport = Alone()
    topic_id = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
    transport.driver.unnamed = {topic_id: time.time()}
    assert transport._unnamed_trouble is None, "it may have been created, or deleted, a moment ago"
    transport.driver.unnamed = {topic_id: 1_700_000_000.0}
    text = str(transport._unnamed_trouble)
    assert "ABEiM0RVZneImaq7zN3u_w" in text, "as Kafka's commands print it"
    assert "of a topic that" in text
    assert "2023-11-14 22:13:20+00:00" in text
    assert "deleted" in text
    assert "DESCRIBE" in text

    transport.driver.unnamed |= {uuid.UUID(int=1): time.time(), uuid.UUID(int=2**127): 1_600_000_000.0}
    text = str(transport._unnamed_trouble)
    assert "2 topics" in text
    assert "gAAAAAAAAAAAAAAAAAAAAA first, since 2020-09-13" in text
    transport._lifetime.is_started = False  # no broker is there, which would count more
    assert transport.trouble == text
    await transport.close()
    assert transport._unnamed_trouble is None


async def test_topics_are_looked_up_again_when_the_group_refuses_one() -> None:
    """The right to see it was withdrawn."""
    transport = Alone()
    await transport.tell(Troubled(81, ""))
    assert not transport._subscription.changed.is_set()
    await transport.tell(Troubled(29, ""))
    assert transport._subscription.changed.is_set()
    await transport.close()


async def test_a_member_that_is_paused_names_those_that_it_waits_for() -> None:
    transport = Alone("classic")
    await transport.assign()
    transport._joining_with = [GroupMember("late", "aioshard", "/127.0.0.1", None)]
    texts = [transport.slow_join]
    transport.driver.now = 10.0
    texts.append(transport.slow_join)
    assert texts[0] is None
    assert "late" in str(texts[1])
    await transport.close()
