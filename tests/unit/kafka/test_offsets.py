"""Committed offsets of a group, and the bounds of logs: the requests, the order of commits, and errors.

The brokers are models on a network in memory, with virtual time.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioshard.kafka.offsets import (
    END,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    START,
    Member,
    log_ranges,
    offsets_at,
)
from aioshard.kafka.wire.cluster import CoordinatorKind
from aioshard.kafka.wire.errors import BrokerError, ConnectionLostError, RequestTimedOutError, WireError
from aioshard.kafka.wire.requests import FIND_COORDINATOR, LIST_OFFSETS, METADATA, OFFSET_COMMIT, OFFSET_FETCH
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import LogRange
from aioshard.records import TopicPartition
from tests.support.model_broker import Received
from tests.unit.kafka.committing import ONE, TWO, Group, scenario

US = Member(4, "us", "worker-1")
AWAY = pytest.mark.parametrize("code", [7, 15, 16], ids=["too slow", "unavailable", "moved"])


def at(offset: int, epoch: int = 3, metadata: str = "") -> dict[TopicPartition, CommittedOffset]:
    """The offset of the first partition."""
    return {ONE: CommittedOffset(offset, epoch, metadata)}


BOTH = {ONE: CommittedOffset(5, 3, "text"), TWO: CommittedOffset(7, -1, "")}


async def cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Commits ----------------------------------------------------------------------------------


def test_a_commit_carries_its_membership_and_the_leader_epochs() -> None:
    async def test(group: Group) -> None:
        await group.commit(BOTH, US)
        [(request, offsets)] = group.coordinator.commits
        assert (request.group, request.generation, request.member) == ("billing", 4, "us")
        assert request.instance == "worker-1"
        assert offsets == BOTH

    scenario(test)


def test_a_commit_without_a_member_is_retained_for_ten_years() -> None:
    """Only old versions of the request say how long, and those have no leader epochs."""

    async def test(group: Group) -> None:
        await group.commit(BOTH)
        [(request, offsets)] = group.coordinator.commits
        assert (request.generation, request.member, request.instance) == (-1, "", None)
        assert request.retention_ms == 10 * 365 * 24 * 3600 * 1000
        assert offsets == {at: stored._replace(epoch=-1) for at, stored in BOTH.items()}

    scenario(test)


def test_each_partition_has_its_own_error() -> None:
    async def test(group: Group) -> None:
        group.coordinator.errors = {TWO: 12}
        refused = await group.offsets.commit(BOTH, US)
        assert {at: error.code for at, error in refused.items()} == {TWO: 12}
        assert group.coordinator.committed.keys() == {ONE}

    scenario(test)


@pytest.mark.parametrize("omitted", [{ONE}, {TWO}, {ONE, TWO}])
def test_a_partition_that_a_commit_response_leaves_out_is_not_acknowledged(omitted: set[TopicPartition]) -> None:
    async def test(group: Group) -> None:
        group.coordinator.omitted = omitted
        with pytest.raises(WireError, match="missing in the response") as raised:
            await group.commit(BOTH, US)
        assert raised.value.retriable

    scenario(test)


@pytest.mark.parametrize("code", [22, 25, 27, 82])
def test_errors_of_the_group_come_before_those_of_a_topic(code: int) -> None:
    async def test(group: Group) -> None:
        group.coordinator.errors = {ONE: 29, TWO: code}
        with pytest.raises(BrokerError) as raised:
            await group.commit(BOTH, US)
        assert raised.value.code == code
        assert group.lookups == 1

    scenario(test)


@AWAY
def test_a_commit_that_a_broker_does_not_coordinate_triggers_a_lookup(code: int) -> None:
    async def test(group: Group) -> None:
        group.coordinator.errors = {ONE: 29, TWO: code}
        with pytest.raises(BrokerError):
            await group.commit(BOTH, US)
        assert group.cluster.known_coordinator(CoordinatorKind.GROUP, "billing") is None
        group.coordinator.errors = {}
        group.coordinator.coordinator = 3
        await group.commit(BOTH, US)
        assert group.model.brokers[3].received(OFFSET_COMMIT)

    scenario(test)


def test_a_commit_over_a_broken_connection_triggers_a_lookup() -> None:
    async def test(group: Group) -> None:
        group.model.brokers[1].on(OFFSET_COMMIT, lambda request: request.cut())
        with pytest.raises(ConnectionLostError):
            await group.commit(BOTH, US)
        group.coordinator.coordinator = 2
        await group.commit(BOTH, US)
        assert group.lookups == 2
        assert group.coordinator.committed == BOTH

    scenario(test)


def test_a_commit_that_is_never_answered_ends() -> None:
    async def test(group: Group) -> None:
        group.hold(OFFSET_COMMIT)
        began = asyncio.get_running_loop().time()
        with pytest.raises(RequestTimedOutError):
            await group.commit(BOTH, US)
        assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=1)
        assert group.cluster.known_coordinator(CoordinatorKind.GROUP, "billing") is None

    scenario(test)


# The order of commits ---------------------------------------------------------------------


def test_one_commit_is_in_flight_at_a_time() -> None:
    async def test(group: Group) -> None:
        held = group.hold(OFFSET_COMMIT)
        commits = [asyncio.create_task(group.commit(at(offset), US)) for offset in (1, 2, 3)]
        await asyncio.sleep(1)
        assert len(held) == 1
        group.model.brokers[1].on(OFFSET_COMMIT, group.coordinator.commit)
        group.coordinator.commit(held[0])
        await asyncio.gather(*commits)
        assert group.sent == [1, 2, 3]

    scenario(test)


def test_a_commit_does_not_overtake_one_that_waits() -> None:
    """Otherwise the older one would be stored last."""

    async def test(group: Group) -> None:
        async def commit_twice() -> None:
            await group.commit(at(1), US)
            await group.commit(at(3), US)

        first = asyncio.create_task(commit_twice())
        await asyncio.sleep(0)
        second = asyncio.create_task(group.commit(at(2), US))
        await asyncio.gather(first, second)
        assert group.sent == [1, 2, 3]
        assert group.coordinator.committed == at(3)

    scenario(test)


def test_a_commit_whose_caller_gave_up_is_not_overtaken() -> None:
    async def test(group: Group) -> None:
        held = group.hold(OFFSET_COMMIT)
        first = asyncio.create_task(group.commit(at(1), US))
        await group.model.brokers[1].arrival(OFFSET_COMMIT)
        await cancel(first)
        second = asyncio.create_task(group.commit(at(2), US))
        await asyncio.sleep(1)
        assert len(held) == 1, "the first is not answered yet"
        group.model.brokers[1].on(OFFSET_COMMIT, group.coordinator.commit)
        group.coordinator.commit(held[0])
        await second
        assert group.sent == [1, 2]

    scenario(test)


def test_a_commit_whose_caller_gave_up_before_it_was_sent_is_never_sent() -> None:
    """The group may have other members by then."""

    async def test(group: Group) -> None:
        lookups = [group.hold(FIND_COORDINATOR, node) for node in group.model.brokers]
        lost = asyncio.create_task(group.commit(at(1), US))
        waiting = asyncio.create_task(group.commit(at(2), US))
        await asyncio.sleep(1)
        await cancel(lost)
        await cancel(waiting)
        for broker, held in zip(group.model.brokers.values(), lookups, strict=True):
            broker.on(FIND_COORDINATOR, group.coordinator.find_coordinator)
            for request in held:
                group.coordinator.find_coordinator(request)
        await asyncio.sleep(60)
        assert group.coordinator.commits == []
        await group.commit(at(3), US)
        assert group.sent == [3]

    scenario(test)


# Committed offsets ------------------------------------------------------------------------


def test_committed_offsets_are_those_that_no_open_transaction_can_change() -> None:
    async def test(group: Group) -> None:
        group.coordinator.committed = {ONE: BOTH[ONE]}
        assert await group.offsets.committed(BOTH) == {ONE: BOTH[ONE]}
        [request] = group.coordinator.received(OFFSET_FETCH)
        assert request.values.stable

    scenario(test)


def test_a_coordinator_that_waits_until_a_commit_is_replicated_is_waited_for() -> None:
    """Otherwise it answers at once, with what is replicated."""

    async def test(group: Group) -> None:
        group.coordinator.committed = at(1)

        def replicate(request: Received) -> None:
            group.coordinator.committed = at(2)
            group.coordinator.fetch_offsets(request)

        def answer(request: Received) -> None:
            if request.values.stable:
                asyncio.get_running_loop().call_later(20, replicate, request)
            else:
                group.coordinator.fetch_offsets(request)

        group.model.brokers[1].on(OFFSET_FETCH, answer)
        assert await group.offsets.committed([ONE]) == at(2)

    scenario(test)


def test_a_commit_without_an_answer_does_not_delay_a_query() -> None:
    """A coordinator that hangs is left by a query in time, although a commit may wait for it longer."""

    async def test(group: Group) -> None:
        group.coordinator.committed = dict(BOTH)
        held = group.hold(OFFSET_COMMIT)
        commit = asyncio.create_task(group.offsets.commit(at(9), US))
        await group.model.brokers[1].arrival(OFFSET_COMMIT)

        def answer(request: Received) -> None:
            if request.session is not held[0].session:  # a broker answers one request of a connection at a time
                group.coordinator.fetch_offsets(request)

        group.model.brokers[1].on(OFFSET_FETCH, answer)
        async with asyncio.timeout(1):
            assert await group.offsets.committed(BOTH) == BOTH
        group.coordinator.commit(held[0])
        assert await commit == {}

    scenario(test)


def test_offsets_are_asked_for_without_a_member() -> None:
    """Coordinators refuse a member whose epoch rose a moment ago (113), although its partitions are still its own."""

    async def test(group: Group) -> None:
        group.coordinator.committed = dict(BOTH)
        assert await group.offsets.committed(BOTH) == BOTH
        [request] = group.coordinator.received(OFFSET_FETCH)
        [asked] = request.values.groups
        assert (asked.member, asked.epoch) == (None, -1)

    scenario(test)


def test_topics_are_named_although_brokers_offer_ids() -> None:
    """Brokers offer the newest versions and may still not know the ids."""

    async def test(group: Group) -> None:
        await group.commit(BOTH, US)
        await group.offsets.committed(BOTH)
        for api in (OFFSET_COMMIT, OFFSET_FETCH):
            assert [request.version for request in group.coordinator.received(api)] == [9]

    scenario(test)


@pytest.mark.parametrize("version", [7, 8])
def test_all_offsets_of_the_group_can_be_asked_for(version: int) -> None:
    async def test(group: Group) -> None:
        group.coordinator.committed = dict(BOTH)
        assert await group.offsets.all_committed() == BOTH

    scenario(test, versions={OFFSET_FETCH: (6, version)})


@pytest.mark.parametrize("code", [3, 29, 88])
def test_an_error_of_one_partition_does_not_mean_that_nothing_is_committed(code: int) -> None:
    async def test(group: Group) -> None:
        group.coordinator.committed = dict(BOTH)
        group.coordinator.errors = {TWO: code}
        with pytest.raises(BrokerError) as raised:
            await group.offsets.committed(BOTH)
        assert raised.value.code == code

    scenario(test)


def test_a_partition_that_is_left_out_does_not_count_as_never_committed() -> None:
    async def test(group: Group) -> None:
        group.coordinator.committed = dict(BOTH)
        group.coordinator.omitted = {TWO}
        with pytest.raises(WireError, match="missing in the response") as raised:
            await group.offsets.committed(BOTH)
        assert raised.value.retriable

    scenario(test)


@AWAY
@pytest.mark.parametrize("version", [7, 8])
def test_an_error_of_the_whole_response_is_raised_and_triggers_a_lookup(code: int, version: int) -> None:
    async def test(group: Group) -> None:
        group.coordinator.committed = dict(BOTH)

        def refuse(request: Received) -> None:
            group.coordinator.coordinator = 2
            request.reply(error=code, groups=[{"group": "billing", "error": code}])

        group.model.brokers[1].on(OFFSET_FETCH, refuse)
        with pytest.raises(BrokerError) as raised:
            await group.offsets.committed(BOTH)
        assert raised.value.code == code
        assert await group.offsets.committed(BOTH) == BOTH
        assert group.lookups == 2

    scenario(test, versions={OFFSET_FETCH: (6, version)})


def test_a_query_over_a_broken_connection_triggers_a_lookup() -> None:
    async def test(group: Group) -> None:
        group.coordinator.committed = dict(BOTH)
        group.model.brokers[1].on(OFFSET_FETCH, lambda request: request.cut())
        with pytest.raises(ConnectionLostError):
            await group.offsets.committed(BOTH)
        group.coordinator.coordinator = 2
        assert await group.offsets.committed(BOTH) == BOTH
        assert group.lookups == 2

    scenario(test)


def test_the_brokers_are_asked_once_for_the_coordinator() -> None:
    async def test(group: Group) -> None:
        for offset in range(3):
            await group.commit(at(offset), US)
            await group.offsets.committed([ONE])
        assert group.lookups == 1

    scenario(test)


# Logs -------------------------------------------------------------------------------------


def refusing(partition: TopicPartition, code: int) -> Callable[[TopicPartition, dict[str, Any]], None]:
    """Answer with an error for a partition."""

    def change(at: TopicPartition, part: dict[str, Any]) -> None:
        if at == partition:
            part["error"] = code

    return change


@pytest.mark.parametrize(("isolation", "end"), [(READ_COMMITTED, 5), (READ_UNCOMMITTED, 9)])
def test_the_bounds_of_logs_depend_on_the_isolation(isolation: int, end: int) -> None:
    async def test(group: Group) -> None:
        log = group.model.logs[ONE]
        log.start, log.end, log.stable_end = 2, 9, 5
        group.model.logs[TWO].end = 3
        ranges = await log_ranges(group.cluster, [ONE, TWO], isolation, 5.0)
        assert ranges == {ONE: LogRange(2, end, 9), TWO: LogRange(0, 3, 3)}

    scenario(test)


def test_records_that_arrive_meanwhile_do_not_look_like_an_open_transaction() -> None:
    async def test(group: Group) -> None:
        log = group.model.logs[ONE]
        log.end = 5

        def grow(request: Received) -> None:
            group.model.list_offsets(1, request)
            log.end += 10

        group.model.brokers[1].on(LIST_OFFSETS, grow)
        [(_, end, newest)] = (await log_ranges(group.cluster, [ONE], READ_COMMITTED, 5.0)).values()
        assert end == newest

    scenario(test)


@pytest.mark.parametrize("fault", ["hangs", "moved", "left out"])
def test_a_log_that_is_unavailable_has_no_bounds_and_does_not_delay_the_others(fault: str) -> None:
    async def test(group: Group) -> None:
        group.model.logs[ONE].end = 5
        if fault == "hangs":
            group.hold(LIST_OFFSETS, 2)
        elif fault == "moved":
            group.model.change_offset = refusing(TWO, 6)
        else:
            group.model.brokers[2].on(LIST_OFFSETS, lambda request: request.reply())
        lookups = len(group.coordinator.received(METADATA))
        async with asyncio.timeout(1.5):
            assert await log_ranges(group.cluster, [ONE, TWO], READ_COMMITTED, 1.0) == {ONE: LogRange(0, 5, 5)}
        await asyncio.sleep(1)
        assert len(group.coordinator.received(METADATA)) > lookups, "another broker may lead it"

    scenario(test)


def test_a_refused_log_is_an_error() -> None:
    async def test(group: Group) -> None:
        group.model.change_offset = refusing(TWO, 29)
        with pytest.raises(BrokerError) as raised:
            await log_ranges(group.cluster, [ONE, TWO], READ_COMMITTED, 1.0)
        assert raised.value.topics == ("orders",)

    scenario(test)


def test_an_unknown_topic_is_looked_up_first() -> None:
    async def test(group: Group) -> None:
        other = TopicPartition("sales", 0)
        group.model.create("sales")[0].end = 4
        assert await log_ranges(group.cluster, [other], READ_UNCOMMITTED, 1.0) == {other: LogRange(0, 4, 4)}
        missing = TopicPartition("missing", 0)
        assert await log_ranges(group.cluster, [missing], READ_UNCOMMITTED, 1.0) == {}

    scenario(test)


def test_offsets_are_found_by_time() -> None:
    async def test(group: Group) -> None:
        group.model.logs[ONE].times = {1_000: 3}
        group.model.logs[ONE].end = group.model.logs[TWO].end = 9
        assert await offsets_at(group.cluster, {ONE: 1_000, TWO: 1_000}, READ_COMMITTED) == {ONE: 3, TWO: -1}
        assert await offsets_at(group.cluster, {ONE: START, TWO: END}, READ_COMMITTED) == {ONE: 0, TWO: 9}

    scenario(test)


@pytest.mark.parametrize("code", [6, 43])
def test_a_failed_search_by_time_does_not_mean_that_no_record_is_newer(code: int) -> None:
    async def test(group: Group) -> None:
        group.model.change_offset = refusing(ONE, code)
        group.model.logs[TWO].times = {1_000: 3}
        times = {ONE: 1_000, TWO: 1_000}
        if code == 6:
            assert await offsets_at(group.cluster, times, READ_COMMITTED) == {TWO: 3}
            return
        with pytest.raises(BrokerError):
            await offsets_at(group.cluster, times, READ_COMMITTED)

    scenario(test)


def test_a_search_by_time_that_is_not_answered_leaves_its_partition_out() -> None:
    async def test(group: Group) -> None:
        group.model.brokers[1].on(LIST_OFFSETS, lambda request: request.cut())
        assert await offsets_at(group.cluster, {ONE: 1_000}, READ_COMMITTED) == {}

    scenario(test)
