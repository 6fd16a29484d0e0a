"""A topic that does not exist ends the start, or is waited for until then; one that is written to is reported."""

import asyncio
from typing import Any

import pytest

from aioshard import App, DeadLetter, Record, Retry
from aioshard.errors import MissingTopicError, NotDrainedError
from aioshard.observe import Finding
from tests.kafka.faults.support import quick_app, until
from tests.support.brokers import SharedKafka


def make_app(kafka: SharedKafka, group: str, *topics: str, **settings: Any) -> App:
    app = quick_app(kafka, group, **settings)

    @app.consume(*topics)
    async def handle(record: Record) -> None: ...

    return app


@pytest.mark.parametrize("partly", [False, True], ids=["all", "one-of-two"])
async def test_a_missing_topic_ends_the_start(kafka: SharedKafka, group: str, topic: str, partly: bool) -> None:
    mistyped, existing = f"{topic}-mistyped", f"{topic}-existing"
    if partly:
        await kafka.create_topic(existing)
    topics = [existing, mistyped] if partly else [mistyped]
    app = make_app(kafka, group, *topics, start_timeout=5.0)

    with pytest.raises(MissingTopicError) as error:
        async with app:
            raise AssertionError("it has started")

    assert repr(mistyped) in str(error.value)
    assert repr(existing) not in str(error.value)


async def test_a_topic_that_is_created_during_the_start_is_consumed(kafka: SharedKafka, group: str, topic: str) -> None:
    app = make_app(kafka, group, topic, start_timeout=60.0)
    entering = asyncio.create_task(app.__aenter__(), name="start")
    await until(lambda: app.diagnose().findings)
    try:
        await until(lambda: repr(topic) in (app.statistics().trouble or ""), app.explain)
        assert app.statistics().state == "starting"
        advice = [finding.what_to_do or "" for finding in app.diagnose().findings if finding.kind == "trouble"]
        assert len(advice) == 1
        assert "create the topic" in advice[0]

        await kafka.create_topic(topic)
        await entering
        await until(app.assignment, app.explain)
        assert app.statistics().state == "running"
    finally:
        await app.__aexit__(None, None, None)


# Topics that are written to ------------------------------------------------------------


def make_writing_app(kafka: SharedKafka, group: str, topic: str, **settings: Any) -> App:
    app = quick_app(kafka, group, **settings)

    @app.consume(topic, retry=Retry(attempts=1), on_failure=DeadLetter(f"{topic}.dlt"))
    async def handle(_: Record) -> None:
        raise ValueError("poison")

    return app


def findings_of(app: App, kind: str) -> list[Finding]:
    return [finding for finding in app.diagnose().findings if finding.kind == kind]


async def test_a_missing_dead_letter_topic_is_reported_until_it_exists(
    kafka: SharedKafka, group: str, topic: str
) -> None:
    await kafka.create_topic(topic)
    app = make_writing_app(kafka, group, topic)

    async with app:
        await until(lambda: findings_of(app, "topics"), app.explain)
        (finding,) = findings_of(app, "topics")
        assert repr(f"{topic}.dlt") in finding.sentence
        assert app.statistics().state == "running"

        await kafka.create_topic(f"{topic}.dlt")
        await until(lambda: not findings_of(app, "topics"), app.explain)
        await kafka.produce(topic, [(None, b"1")])
        await kafka.wait_for_lag(group, topic)


async def test_a_missing_dead_letter_topic_ends_the_start_if_a_setting_says_so(
    kafka: SharedKafka, group: str, topic: str
) -> None:
    await kafka.create_topic(topic)
    app = make_writing_app(kafka, group, topic, missing_output_topics="fail", start_timeout=5.0)

    with pytest.raises(MissingTopicError) as error:
        async with app:
            raise AssertionError("it has started")

    assert repr(f"{topic}.dlt") in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{}, {"processing_guarantee": "exactly_once"}],
    ids=["at-least-once", "exactly-once"],
)
async def test_a_dead_letter_without_a_topic_says_so_everywhere(
    kafka: SharedKafka, group: str, topic: str, settings: dict[str, Any]
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"1")])
    app = make_writing_app(kafka, group, topic, **settings)

    with pytest.raises(NotDrainedError) as error:  # noqa: PT012 - leaving the app raises
        async with app:
            await until(lambda: findings_of(app, "recovery"), app.explain)
            (finding,) = findings_of(app, "recovery")

    assert f"topic '{topic}.dlt' does not exist" in finding.sentence
    assert f"topic '{topic}.dlt' does not exist" in error.value.unrecovered[f"{topic}/0/0"]
