"""Authentication and ACLs: every refusal names its object and shows no secret."""

import asyncio
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation

from aioshard import App, Context, DeadLetter, Record
from aioshard.errors import StartError
from tests.engine.live_apps import engine_of
from tests.kafka.faults.support import (
    BROKERS_SESSION,
    Ledger,
    commit_from_outside,
    messages,
    partition_of,
    permit,
    quick_app,
    until,
    with_both_protocols,
)
from tests.support.access import allow, create_scram_user, deny
from tests.support.brokers import SharedKafka
from tests.support.kafka_properties import PLAIN_USER, Credentials

SECRET = "a-very-secret-word"


@pytest.fixture
async def user(kafka: SharedKafka) -> Credentials:
    """A user that nobody else uses and that may do nothing."""
    credentials = Credentials(f"user-{uuid.uuid4().hex[:8]}", SECRET)
    await create_scram_user(kafka, credentials)
    return credentials


@pytest.fixture(autouse=True)
def _no_secret_is_ever_shown(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    shown = [r.getMessage() + str(r.exc_info) for r in caplog.get_records("call")]
    assert [sentence for sentence in shown if SECRET in sentence or PLAIN_USER.password in sentence] == []


def _guarded(kafka: SharedKafka, group: str, user: Credentials, **overrides: Any) -> App:
    login: dict[str, Any] = {
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(kafka.certificates.ca_file),
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": user.username,
        "sasl_password": user.password,
    }
    return quick_app(kafka.secure_bootstrap, group, **({"start_timeout": 10} | login | overrides))


async def _refusal(app: App, topic: str) -> str:
    """The sentence with which the start ends, in time and without a secret."""
    ledger = Ledger()
    app.consume(topic)(ledger.handle)
    async with asyncio.timeout(app.settings.start_timeout):
        with pytest.raises(StartError) as refused:
            await app.serve()
    error: BaseException | None = refused.value
    sentences = []
    while error is not None:
        sentences.append(f"{error} {error!r}")
        error = error.__cause__ or error.__context__
    assert SECRET not in "".join(sentences)
    assert PLAIN_USER.password not in "".join(sentences)
    assert SECRET not in app.explain() + str(app.statistics()) + str(app.settings) + repr(app.settings)
    assert ledger.started == []
    assert app.statistics().state == "failed"
    return str(refused.value)


async def test_an_app_with_the_needed_permissions_consumes(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    """READ and DESCRIBE on the topic and READ on the group are enough."""
    await kafka.create_topic(topic, partitions=2)
    await allow(kafka, user, "topic", topic, AclOperation.READ, AclOperation.DESCRIBE)
    await allow(kafka, user, "group", group, AclOperation.READ)
    sent = messages(20)
    await kafka.produce(topic, sent)
    app, ledger = _guarded(kafka, group, user), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        await ledger.until_finished(sent)
        await kafka.wait_for_lag(group, topic)
        assert app.statistics().trouble is None


async def test_a_wrong_password_is_named_with_its_user(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    wrong = _guarded(kafka, group, user, sasl_password=f"{SECRET}-but-wrong")

    sentence = await _refusal(wrong, topic)

    assert repr(user.username) in sentence
    assert "sasl_password" in sentence


async def test_a_wrong_password_under_plain_is_named_with_its_user(kafka: SharedKafka, topic: str, group: str) -> None:
    wrong = _guarded(kafka, group, PLAIN_USER, sasl_mechanism="PLAIN", sasl_password=f"{SECRET}-but-wrong")

    sentence = await _refusal(wrong, topic)

    assert repr(PLAIN_USER.username) in sentence


async def test_an_unknown_certificate_is_named_with_its_ca_file(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    stranger = str(kafka.certificates.stranger_file)

    sentence = await _refusal(_guarded(kafka, group, user, ssl_cafile=stranger), topic)

    assert "certificate" in sentence
    assert stranger in sentence
    assert kafka.secure_bootstrap in sentence


async def test_plaintext_to_a_tls_listener_is_named(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    sentence = await _refusal_without_tls(kafka, topic, group, user)

    assert "security_protocol" in sentence
    assert kafka.secure_bootstrap in sentence


async def test_a_refused_session_timeout_is_named_without_the_right_to_see_the_limits(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    await kafka.create_topic(topic)
    await allow(kafka, user, "topic", topic, AclOperation.READ, AclOperation.DESCRIBE)
    await allow(kafka, user, "group", group, AclOperation.READ)

    sentence = await _refusal(_guarded(kafka, group, user, session_timeout=0.4, heartbeat_interval=0.1), topic)

    assert "session_timeout=0.4 s" in sentence
    assert "accept" not in sentence


async def test_a_static_member_may_describe_a_group_that_it_may_read(
    kafka: SharedKafka, topic: str, group: str, user: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each of its restarts would make the group rebalance."""
    await kafka.create_topic(topic)
    await allow(kafka, user, "topic", topic, AclOperation.READ, AclOperation.DESCRIBE)
    await allow(kafka, user, "group", group, AclOperation.READ)
    for _ in range(2):
        app = _guarded(kafka, group, user, group_instance_id="worker-1", session_timeout=20)
        app.consume(topic)(Ledger().handle)
        async with app:
            assert app.statistics().state == "running"

    assert not any("cannot be described" in r.getMessage() for r in caplog.records)


async def _refusal_without_tls(kafka: SharedKafka, topic: str, group: str, user: Credentials) -> str:
    """No refusal: the app keeps trying until `start_timeout`, because the brokers may still be starting."""
    app = _guarded(kafka, group, user, security_protocol="SASL_PLAINTEXT", ssl_cafile=None, start_timeout=2)
    app.consume(topic)(Ledger().handle)
    async with asyncio.timeout(8):
        with pytest.raises(StartError) as refused:
            await app.serve()
    return str(refused.value)


async def test_a_forbidden_topic_is_named(kafka: SharedKafka, topic: str, group: str, user: Credentials) -> None:
    await kafka.create_topic(topic)
    await allow(kafka, user, "group", group)

    assert repr(topic) in await _refusal(_guarded(kafka, group, user), topic)


async def test_a_topic_without_read_permission_is_named(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    """Its metadata and offsets are there: the first request to be refused is the commit of the first position."""
    await kafka.create_topic(topic)
    await allow(kafka, user, "group", group)
    await allow(kafka, user, "topic", topic, AclOperation.DESCRIBE)

    assert repr(topic) in await _refusal(_guarded(kafka, group, user, start_timeout=4), topic)


async def test_an_app_with_offsets_reports_a_topic_it_may_no_longer_read(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    """Only the fetch is refused, of each partition for itself: that is a trouble of the partition."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, messages(5))
    await allow(kafka, user, "group", group)
    await allow(kafka, user, "topic", topic, AclOperation.DESCRIBE)
    await commit_from_outside(kafka, group, topic, {0: 0})
    app, ledger = _guarded(kafka, group, user), Ledger()
    app.consume(topic)(ledger.handle)

    async with app:
        await until(lambda: partition_of(app, 0).paused, app.explain)
        assert repr(topic) in str(partition_of(app, 0).paused)
        assert repr(topic) in app.explain()

    assert ledger.started == []


async def test_a_forbidden_group_is_named(kafka: SharedKafka, topic: str, group: str, user: Credentials) -> None:
    await kafka.create_topic(topic)
    await allow(kafka, user, "topic", topic)

    assert repr(group) in await _refusal(_guarded(kafka, group, user), topic)


@pytest.mark.chaos
async def test_a_topic_forbidden_while_running_is_reported_until_allowed_again(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    """I11: the app stays, reports the refusal, and recovers by itself without loss."""
    await kafka.create_topic(topic)
    await allow(kafka, user, "group", group)
    await allow(kafka, user, "topic", topic)
    app, ledger = _guarded(kafka, group, user), Ledger()
    app.consume(topic)(ledger.handle)
    async with app:
        first = messages(5)
        await kafka.produce(topic, first)
        await ledger.until_finished(first)

        await deny(kafka, user, "topic", topic, AclOperation.READ)
        await until(lambda: repr(topic) in str(partition_of(app, 0).paused), app.explain)
        assert repr(topic) in app.explain()
        assert app.statistics().state == "running"
        await permit(kafka, user, topic)

        await until(lambda: partition_of(app, 0).paused is None, app.explain)
        assert app.statistics().trouble is None
        second = messages(5, start=5)
        await kafka.produce(topic, second)
        await ledger.until_finished(first + second)
        await kafka.wait_for_lag(group, topic)
    assert ledger.duplicates == []


@with_both_protocols
@pytest.mark.parametrize("operation", [AclOperation.READ, AclOperation.ALL], ids=["read", "all"])
async def test_a_topic_forbidden_while_running_stops_no_other(
    kafka: SharedKafka, topic: str, group: str, user: Credentials, operation: AclOperation, protocol: str
) -> None:
    """Also not for a new client, which joins while it is forbidden."""
    forbidden = f"{topic}-forbidden"
    await allow(kafka, user, "group", group)
    app, ledger = _guarded(kafka, group, user, group_protocol=protocol), Ledger()
    for name in (topic, forbidden):
        await kafka.create_topic(name, partitions=2)
        await allow(kafka, user, "topic", name)
        app.consume(name)(ledger.handle)
    async with app:
        await _read(kafka, group, ledger, topic, forbidden)
        await deny(kafka, user, "topic", forbidden, operation)
        await until(lambda: repr(forbidden) in str(app.statistics().trouble or _pauses(app)), app.explain)
        assert repr(forbidden) in app.explain()
        await _read(kafka, group, ledger, topic)

        await engine_of(app).client.get().close()
        await until(lambda: app.statistics().client_losses == 1, app.explain)
        await _read(kafka, group, ledger, topic)
        await until(lambda: repr(forbidden) in app.explain(), app.explain)
        assert app.statistics().state == "running"

        await permit(kafka, user, forbidden)
        await _read(kafka, group, ledger, topic, forbidden)
        await until(lambda: app.statistics().trouble is None and not _pauses(app), app.explain)
    assert ledger.duplicates == []


@with_both_protocols
async def test_a_forbidden_topic_that_is_subscribed_while_running_stops_no_other(
    kafka: SharedKafka, topic: str, group: str, user: Credentials, protocol: str
) -> None:
    """Brokers refuse each heartbeat that names it under the consumer protocol."""
    forbidden = f"{topic}-forbidden"
    await allow(kafka, user, "group", group)
    await allow(kafka, user, "topic", topic)
    for name in (topic, forbidden):
        await kafka.create_topic(name, partitions=2)
    app, ledger = _guarded(kafka, group, user, group_protocol=protocol), Ledger()
    app.consume(topic)(ledger.handle)
    async with app:
        await _read(kafka, group, ledger, topic)
        began = asyncio.get_running_loop().time()
        app.subscribe("handle", forbidden)
        while asyncio.get_running_loop().time() - began < 1.5 * BROKERS_SESSION:
            await _read(kafka, group, ledger, topic)
        assert repr(forbidden) in app.explain()
        await allow(kafka, user, "topic", forbidden)
        await _read(kafka, group, ledger, topic, forbidden)
    assert ledger.duplicates == []


async def test_partitions_that_may_not_be_seen_hold_back_no_others(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    """Another member, which may see them, assigns them."""
    forbidden = f"{topic}-forbidden"
    await allow(kafka, user, "group", group)
    await allow(kafka, user, "topic", topic)
    leader = quick_app(kafka, group, assignor="range")
    app, ledger = _guarded(kafka, group, user, assignor="range", start_timeout=None), Ledger()
    for name in (topic, forbidden):
        await kafka.create_topic(name, partitions=2)
        await kafka.produce(name, messages(20))
        leader.consume(name)(Ledger().handle)
        app.consume(name)(ledger.handle)
    async with leader, app:
        await until(lambda: forbidden in str(app.statistics().trouble), app.explain)
        await until(lambda: app.statistics().state == "running", app.explain)
        await kafka.produce(topic, messages(20, start=20))
        await until(lambda: ledger.finished, app.explain)
        assert {record.topic for record in ledger.finished} == {topic}
        assert forbidden in app.explain()

        await allow(kafka, user, "topic", forbidden)
        await until(lambda: {part.topic for part in app.statistics().partitions} == {topic, forbidden}, app.explain)
        await until(lambda: app.statistics().trouble is None, app.explain)


async def _read(kafka: SharedKafka, group: str, ledger: Ledger, *topics: str) -> None:
    """Let the app run more records of topics, and commit them."""
    sent = messages(5, start=len(ledger.finished))
    for name in topics:
        await kafka.produce(name, sent)
    values = {value for _, value in sent}
    await until(lambda: sum(record.value in values for record in ledger.finished) == len(sent) * len(topics))
    for name in topics:
        await kafka.wait_for_lag(group, name)


def _pauses(app: App) -> str:
    return "".join(partition.paused or "" for partition in app.statistics().partitions)


@pytest.mark.chaos
async def test_a_group_forbidden_while_running_is_reported_until_allowed_again(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    await kafka.create_topic(topic)
    await allow(kafka, user, "group", group, AclOperation.READ)
    await allow(kafka, user, "topic", topic)
    app, ledger = _guarded(kafka, group, user), Ledger()
    app.consume(topic)(ledger.handle)
    async with app:
        first = messages(5)
        await kafka.produce(topic, first)
        await ledger.until_finished(first)

        await deny(kafka, user, "group", group)
        await until(lambda: repr(group) in str(app.statistics().trouble), app.explain)
        assert repr(group) in app.explain()
        assert app.statistics().state == "running"
        await permit(kafka, user, group)

        second = messages(5, start=5)
        await kafka.produce(topic, second)
        await ledger.until_finished(first + second)
        await kafka.wait_for_lag(group, topic)
        await until(lambda: app.statistics().trouble is None, app.explain)


async def test_a_run_that_may_not_write_to_its_topic_fails_alone(
    kafka: SharedKafka, topic: str, group: str, user: Credentials
) -> None:
    """In a transaction, brokers refuse the other topics too."""
    allowed, refused, dead = f"{topic}-out", f"{topic}-refused", f"{topic}-dead"
    for name in (topic, allowed, refused, dead):
        await kafka.create_topic(name)
    for name in (topic, allowed, dead):
        await allow(kafka, user, "topic", name)
    await allow(kafka, user, "topic", refused, AclOperation.DESCRIBE)
    await allow(kafka, user, "group", group)
    await allow(kafka, user, "transactional_id", f"{group}:one")
    await kafka.produce(topic, [(b"%d" % number, b"%d" % number) for number in range(10)])
    app = _guarded(
        kafka,
        group,
        user,
        processing_guarantee="exactly_once",
        group_instance_id="one",
        rebalance_timeout=30,
        transaction_timeout=20,
    )

    @app.consume(topic, on_failure=DeadLetter(dead, breaker=None))
    async def on_record(record: Record, context: Context) -> None:
        await context.publish(refused if record.value == b"7" else allowed, record.value)

    async with asyncio.timeout(60), app:
        await kafka.wait_for_lag(group, topic)
    (letter,) = await kafka.read(dead)
    assert letter.value == b"7"
    assert dict(letter.headers)["aioshard.error"] == b"MessageRefusedError"
    assert repr(refused).encode() in (dict(letter.headers)["aioshard.message"] or b"")
    assert len(await kafka.read(allowed)) == 9


@pytest.mark.parametrize("may_see", [False, True], ids=["hidden", "visible"])
async def test_without_permissions_a_missing_dead_letter_topic_is_not_said_to_be_missing_for_sure(
    kafka: SharedKafka, topic: str, group: str, user: Credentials, may_see: bool
) -> None:
    """Without DESCRIBE on the topic it may exist; without DESCRIBE_CONFIGS on the cluster, brokers may create it."""
    await kafka.create_topic(topic)
    await allow(kafka, user, "topic", topic, AclOperation.READ, AclOperation.DESCRIBE)
    await allow(kafka, user, "group", group, AclOperation.READ)
    if may_see:
        await allow(kafka, user, "topic", f"{topic}.dlt", AclOperation.WRITE, AclOperation.DESCRIBE)
    app = _guarded(kafka, group, user)
    app.consume(topic, on_failure=DeadLetter(f"{topic}.dlt"))(Ledger().handle)

    async with app:
        await until(lambda: [found for found in app.diagnose().findings if found.kind == "topics"], app.explain)
        (finding,) = [found for found in app.diagnose().findings if found.kind == "topics"]

    assert repr(f"{topic}.dlt") in finding.sentence
    assert ("not exist" in finding.sentence) == may_see
    assert not finding.sentence.endswith("does not exist"), "it does not say that for sure"
