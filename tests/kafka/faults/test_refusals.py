"""Lost memberships, refused or unanswered commits, dying clients."""

import asyncio
import functools
import logging
import time
from typing import Any

import pytest

from aioshard import App, Record
from aioshard.errors import AioshardError, ClientLostError, CommitError, CommitRefusedError, StartError
from aioshard.kafka.group.classic_messages import Acknowledged, ClassicAnswer, ClassicRequest, HeartbeatRequest
from aioshard.kafka.group.consumer_messages import Heartbeat, HeartbeatAnswer
from aioshard.records import TopicPartition
from tests.kafka.client.members import background_tasks
from tests.kafka.faults.intercepting import Interceptor
from tests.kafka.faults.support import (
    BROKERS_SESSION,
    Ledger,
    commit_from_outside,
    kick,
    members,
    messages,
    partition_of,
    quick_app,
    transport_of,
    until,
    with_both_protocols,
    with_classic_at_least,
)
from tests.support.brokers import SharedKafka


def _watched(kafka: SharedKafka, group: str, topic: str, **overrides: Any) -> tuple[App, Ledger, Interceptor]:
    app, ledger = quick_app(kafka, group, **overrides), Ledger()
    app.consume(topic)(ledger.handle)
    return app, ledger, Interceptor(transport_of(app))


def _losses(interceptor: Interceptor) -> int:
    return sum(kind == "revoked" and what[-1] is True for kind, *what in interceptor.events)


def _assert_only_current(interceptor: Interceptor) -> None:
    """Every commit that was tried was made for the membership of the newest assignment (I9)."""
    current = None
    for kind, *what in interceptor.events:
        if kind == "assigned":
            current = what[1]
        elif kind == "commit":
            assert what[1] == current


# The start is refused -------------------------------------------------------------------------


async def test_a_session_timeout_that_the_brokers_refuse_ends_the_start_and_names_their_limits(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic)
    app = quick_app(kafka, group, session_timeout=0.4, heartbeat_interval=0.1)
    app.consume(topic)(Ledger().handle)

    with pytest.raises(StartError, match=r"session_timeout=0\.4 s: they accept 0\.5 to 1800 s"):
        await app.serve()

    assert app.statistics().state == "failed"


async def test_a_transaction_timeout_that_the_brokers_refuse_ends_the_app_and_names_their_limit(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic)
    app = quick_app(kafka, group, processing_guarantee="exactly_once", transaction_timeout=1_000)
    app.consume(topic)(Ledger().handle)

    with pytest.raises(AioshardError, match=r"transaction_timeout=1000 s is longer .*transaction\.max\.timeout\.ms"):
        await app.serve()

    assert app.statistics().state == "failed"


async def test_an_assignor_that_the_brokers_lack_ends_the_start(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic)
    app = App(
        group,
        bootstrap_servers=kafka.bootstrap,
        auto_offset_reset="earliest",
        group_protocol="consumer",
        client_options={"group_remote_assignor": "none"},
    )
    app.consume(topic)(Ledger().handle)

    with pytest.raises(StartError, match="group_remote_assignor"):
        await app.serve()


async def test_a_member_with_another_assignor_waits_until_the_others_have_left(
    kafka: SharedKafka, topic: str, group: str
) -> None:
    await kafka.create_topic(topic)
    others, app = quick_app(kafka, group, assignor="range"), quick_app(kafka, group, assignor="roundrobin")
    for each in (others, app):
        each.consume(topic)(Ledger().handle)
    async with others:
        serving = asyncio.create_task(app.serve())
        await until(lambda: "another assignor" in (app.statistics().trouble or ""), app.explain)

    await until(lambda: app.statistics().state == "running", app.explain)
    app.stop()
    await serving


# The group has moved on -----------------------------------------------------------------------


async def test_a_refused_commit_is_dropped_and_the_app_rejoins(
    kafka: SharedKafka, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """I9: while we were out, another member continued from 15; our older results must not move that."""
    await kafka.create_topic(topic)
    app, ledger, interceptor = _watched(kafka, group, topic, heartbeat_interval=4, session_timeout=15)
    async with app.started(interceptor):
        first = messages(10)
        await kafka.produce(topic, first)
        await ledger.until_finished(first)
        await kafka.wait_for_lag(group, topic)
        ledger.hold()
        second = messages(20, start=10)
        await kafka.produce(topic, second)
        await ledger.until(lambda: len(ledger.started) > 10)
        before = app.statistics()

        await kick(kafka, group, str(before.member_id))
        await commit_from_outside(kafka, group, topic, {0: 15})
        ledger.release()

        await until(lambda: app.statistics().commit_failures > 0, app.explain)
        await until(lambda: app.statistics().rebalances > before.rebalances, app.explain)
        await ledger.until_finished(first + second)
        await kafka.wait_for_lag(group, topic)
        after = app.statistics()
        assert after.member_id != before.member_id
        assert after.trouble is None
        assert partition_of(app, 0).epoch > before.partitions[0].epoch
        assert _losses(interceptor) == 1
    _assert_only_current(interceptor)
    acknowledged = [what[0][TopicPartition(topic, 0)] for kind, *what in interceptor.events if kind == "committed"]
    assert acknowledged == sorted(acknowledged)
    again = acknowledged[acknowledged.index(10) + 1 :]
    assert all(offset > 15 for offset in again)
    ledger.assert_in_order()
    assert any("refused a commit" in r.getMessage() for r in caplog.records)


@with_both_protocols
async def test_a_member_with_an_expired_session_recovers(
    kafka: SharedKafka, topic: str, group: str, protocol: str
) -> None:
    """It takes its heartbeats for answered, but none arrives: the group drops it and says so to the next request."""
    await kafka.create_topic(topic, partitions=2)
    app, ledger, interceptor = _watched(
        kafka, group, topic, heartbeat_interval=0.2, session_timeout=2, group_protocol=protocol
    )
    async with app.started(interceptor):
        first = messages(20)
        await kafka.produce(topic, first)
        await ledger.until_finished(first)
        await kafka.wait_for_lag(group, topic)
        loop = interceptor.transport._driver._members
        ask = loop._ask

        async def unheard(request: ClassicRequest | Heartbeat) -> ClassicAnswer | HeartbeatAnswer:
            if isinstance(request, Heartbeat):
                return HeartbeatAnswer(0, epoch=request.epoch)
            return Acknowledged(0) if isinstance(request, HeartbeatRequest) else await ask(request)

        loop._ask = unheard
        while await members(kafka, group):  # noqa: ASYNC110 - the coordinator sends no event
            await asyncio.sleep(0.05)
        loop._ask = ask

        second = messages(20, start=20)
        await kafka.produce(topic, second)
        await ledger.until_finished(first + second)
        await kafka.wait_for_lag(group, topic)
        assert app.statistics().trouble is None
    assert _losses(interceptor) == 1
    _assert_only_current(interceptor)
    ledger.assert_in_order()


@with_classic_at_least
async def test_an_event_loop_blocked_beyond_its_session_loses_nothing(
    kafka: SharedKafka, topic: str, group: str, protocol: str
) -> None:
    await kafka.create_topic(topic, partitions=2)
    session = 2.0 if protocol == "classic" else BROKERS_SESSION
    app = quick_app(kafka, group, heartbeat_interval=0.2, session_timeout=session, group_protocol=protocol)
    ledger = Ledger()
    interceptor = Interceptor(transport_of(app))
    blocked: list[Record] = []

    @app.consume(topic)
    async def blocks_once(record: Record) -> None:
        if record.value == b"5" and not blocked:
            blocked.append(record)
            time.sleep(session + 1.5)  # noqa: ASYNC251 - the fault that is tested
        await ledger.handle(record)

    async with app.started(interceptor):
        sent = messages(40)
        await kafka.produce(topic, sent)
        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)
        assert app.statistics().state == "running"
    assert _losses(interceptor) == 0, "a thread sends the heartbeats"
    _assert_only_current(interceptor)
    ledger.assert_in_order()


# Commits that are not acknowledged --------------------------------------------------------------


@pytest.mark.parametrize("error", [CommitError("the coordinator is loading"), CommitRefusedError("moved on")])
async def test_commits_that_fail_stay_due_are_counted_and_named(
    kafka: SharedKafka, topic: str, group: str, error: CommitError, caplog: pytest.LogCaptureFixture
) -> None:
    await kafka.create_topic(topic, partitions=2)
    app, ledger, interceptor = _watched(kafka, group, topic)
    async with app.started(interceptor):
        before = app.statistics().commits
        interceptor.fail_commits = [error] * 5
        sent = messages(40)
        await kafka.produce(topic, sent)

        await ledger.until_finished(sent)
        await until(lambda: str(error) in str(app.statistics().trouble), app.explain)
        assert str(error) in app.explain()
        await kafka.wait_for_lag(group, topic)

        await until(lambda: app.statistics().trouble is None, app.explain)
        statistics = app.statistics()
        assert statistics.commit_failures == 5
        assert statistics.commits > before
        assert statistics.rebalances == 1
    assert ledger.duplicates == []
    _assert_only_current(interceptor)
    assert sum(str(error) in r.getMessage() for r in caplog.records) == 1, "one cause, one line"


def _failed_more_than(app: App, count: int) -> bool:
    return app.statistics().commit_failures > count


async def test_every_commit_attempt_is_recomputed(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic)
    app, ledger, interceptor = _watched(kafka, group, topic)
    tried: list[int] = []
    async with app.started(interceptor):
        interceptor.fail_commits = [CommitError("busy")] * 4
        for number in range(4):
            await kafka.produce(topic, messages(5, start=5 * number))
            await until(functools.partial(_failed_more_than, app, number), app.explain)
        await kafka.wait_for_lag(group, topic)
        tried += [what[0][TopicPartition(topic, 0)] for kind, *what in interceptor.events if kind == "commit"]
    assert tried == sorted(tried)
    assert tried[-1] == 20
    assert len(set(tried[1:])) > 1
    assert ledger.duplicates == []


async def test_a_lost_commit_response_has_no_effect(kafka: SharedKafka, topic: str, group: str) -> None:
    """The broker has stored it; sending the same again is harmless while the partition is ours."""
    await kafka.create_topic(topic)
    app, ledger, interceptor = _watched(kafka, group, topic)
    async with app.started(interceptor):
        sent = messages(10)
        interceptor.lose_answers = [CommitError("no answer")]
        await kafka.produce(topic, sent)
        await kafka.wait_for_lag(group, topic)
        await until(lambda: partition_of(app, 0).committed == 10, app.explain)
        assert app.statistics().commit_failures == 1
    assert ledger.duplicates == []


# Clients that die ---------------------------------------------------------------------------------


async def _continues_after(
    kafka: SharedKafka, topic: str, app: App, ledger: Ledger, interceptor: Interceptor, *, group: str
) -> None:
    await until(lambda: app.statistics().client_losses == 1, app.explain)
    more = messages(40, start=100)
    await kafka.produce(topic, more)
    ledger.release()
    await ledger.until_finished(messages(40) + more)
    await kafka.wait_for_lag(group, topic)
    await until(lambda: app.statistics().trouble is None, app.explain)
    assert app.statistics().state == "running"
    assert app.statistics().client_losses == 1
    assert len(interceptor.transports) == 2
    ledger.assert_in_order()
    _assert_only_current(interceptor)


@with_classic_at_least
async def test_a_poll_that_raises_replaces_the_client_and_loses_nothing(
    kafka: SharedKafka, topic: str, group: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    await kafka.create_topic(topic, partitions=2)
    app, ledger, interceptor = _watched(kafka, group, topic, group_protocol=protocol)
    async with app.started(interceptor):
        ledger.hold(lambda record: record.value in (b"20", b"21"))
        await kafka.produce(topic, messages(40))
        await ledger.until_more_than(20)

        interceptor.fail_polls = [ClientLostError("the test has taken the client away")]

        await until(lambda: "has taken the client away" in str(app.statistics().trouble), app.explain)
        await _continues_after(kafka, topic, app, ledger, interceptor, group=group)
        assert app.statistics().replayed >= 2
    errors = [r for r in caplog.records if "has taken the client away" in r.getMessage()]
    assert [r.levelno for r in errors] == [logging.ERROR]


@pytest.mark.parametrize(
    ("task", "protocol"),
    [
        *((task, "classic") for task in ("fetching", "metadata", "assignments", "topics", "leadership")),
        *(pytest.param(task, "consumer", marks=pytest.mark.chaos) for task in ("fetching", "assignments", "topics")),
    ],
)
async def test_a_dead_client_task_replaces_the_client(
    kafka: SharedKafka, topic: str, group: str, task: str, protocol: str
) -> None:
    """I11: without these tasks the client raises nothing and delivers nothing."""
    await kafka.create_topic(topic, partitions=2)
    app, ledger, interceptor = _watched(kafka, group, topic, group_protocol=protocol)
    async with app.started(interceptor):
        ledger.hold(lambda record: record.value in (b"20", b"21"))
        await kafka.produce(topic, messages(40))
        await ledger.until_more_than(20)

        background_tasks(interceptor.transport)[task].cancel()

        await _continues_after(kafka, topic, app, ledger, interceptor, group=group)


@pytest.mark.chaos
async def test_rebuilding_the_client_is_retried_with_backoff(kafka: SharedKafka, topic: str, group: str) -> None:
    await kafka.create_topic(topic)
    app, ledger, interceptor = _watched(kafka, group, topic)
    async with app.started(interceptor):
        interceptor.fail_starts = [ClientLostError(f"refusal {number}") for number in range(3)]
        interceptor.fail_polls = [ClientLostError("gone")]

        await until(lambda: "refusal 2" in str(app.statistics().trouble), app.explain)
        assert app.statistics().state == "running"
        sent = messages(10)
        await kafka.produce(topic, sent)
        await ledger.until_finished(sent)
        await until(lambda: app.statistics().trouble is None, app.explain)
        assert app.statistics().client_losses == 4
