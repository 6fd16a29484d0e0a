"""A start in a group with a dead member: the app names it until its session ends."""

import logging

import pytest

from aioshard import App, Record
from aioshard.settings import Settings
from tests.kafka.client.members import Member, settings_for, vanish
from tests.kafka.faults.support import BROKERS_SESSION, quick_app, until, with_both_protocols
from tests.support.brokers import SharedKafka

SESSION = 12.0
"""Seconds for which a classic group waits for the dead member."""


@pytest.fixture
async def dead(kafka: SharedKafka, topic: str, group: str, protocol: str) -> str:
    """The id of a member that has ended without a word to the group."""
    await kafka.create_topic(topic, 2)
    if protocol == "consumer":
        settings = Settings(bootstrap_servers=kafka.bootstrap, group_protocol="consumer")
    else:
        settings = settings_for(kafka.bootstrap, assignor="cooperative-fair", session_timeout=SESSION)
    member = Member(settings, group)
    membership = (await member.join(topic)).membership
    await vanish(member.transport)
    return membership.member_id


def app_of(kafka: SharedKafka, topic: str, group: str, protocol: str, start_timeout: float | None) -> App:
    app = quick_app(kafka, group, session_timeout=SESSION, start_timeout=start_timeout, group_protocol=protocol)

    @app.consume(topic)
    async def handle(record: Record) -> None: ...

    return app


@with_both_protocols
async def test_a_start_that_waits_for_the_session_of_a_dead_member_names_it(
    kafka: SharedKafka, topic: str, group: str, protocol: str, dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_of(kafka, topic, group, protocol, start_timeout=3.0)

    with caplog.at_level(logging.WARNING, "aioshard"):
        async with app:
            assert len(app.assignment()) == 2

    starting = [line for line in caplog.records if getattr(line, "event", "") == "starting"]
    assert starting, "it has started before the dead member's session ended: this shows nothing"
    assert dead in starting[0].getMessage()
    found = [line.getMessage() for line in caplog.records if getattr(line, "event", "") == "trouble"]
    assert len(found) == 1
    assert dead in found[0]
    session = f"session_timeout={SESSION:g} s" if protocol == "classic" else f"{BROKERS_SESSION:g} s"
    assert session in found[0]


@with_both_protocols
async def test_without_start_timeout_the_app_is_up_and_not_ready_until_the_session_of_a_dead_member_ends(
    kafka: SharedKafka, topic: str, group: str, protocol: str, dead: str
) -> None:
    app = app_of(kafka, topic, group, protocol, start_timeout=None)

    async with app:
        assert app.statistics().state == "starting"
        await until(lambda: dead in (app.statistics().trouble or ""), app.explain)
        assert app.statistics().state == "starting"
        assert app.assignment() == ()
        (advice,) = [finding.what_to_do for finding in app.diagnose().findings if finding.kind == "trouble"]
        assert "group_instance_id" in str(advice), "the brokers answer"

        await until(lambda: app.statistics().state == "running", app.explain)
        await until(lambda: app.statistics().trouble is None, app.explain)
        assert len(app.assignment()) == 2
