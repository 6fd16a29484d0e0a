"""Topics that handlers write to and that do not exist: found when the app starts, not at the first failed record."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from aioshard import App, DeadLetter, Park, Record, Retry
from aioshard.engine.topics import needed_topics
from aioshard.errors import AuthorizationError, ClientLostError, ConnectError, MissingTopicError, NotDrainedError
from aioshard.observe import Finding
from aioshard.records import PartitionInfo
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemorySideTopics, InMemoryTransport, run
from tests.engine.live_apps import until

DEAD_LETTERS = "orders.dlt"
OUTPUT = "orders.shipped"


def make_broker(*topics: str) -> InMemoryBroker:
    """A broker that creates no topics on demand."""
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)
    broker.creates_topics = False
    for topic in topics:
        broker.create_topic(topic)
    return broker


def make_app(**settings: Any) -> App:
    app = App("writing", auto_offset_reset="earliest", **{"start_timeout": 2.0, **settings})

    @app.consume("orders", publish_to=OUTPUT, retry=Retry(attempts=1), on_failure=DeadLetter(DEAD_LETTERS))
    async def handle(_: Record) -> bytes:
        raise ValueError("bad")

    @app.consume("refunds", on_failure=Park("refunds.parked"))
    async def refund(record: Record) -> None: ...

    return app


class Client(InMemoryTransport):
    """A client that may not see everything."""

    answers_topics = True
    hides: frozenset[str] = frozenset()
    tells_whether_topics_are_created = True

    async def partitions(self, topic: str) -> dict[int, PartitionInfo]:
        if topic in self.hides:
            raise AuthorizationError(f"no access to {topic}")
        if not self.answers_topics and topic not in ("orders", "refunds"):
            raise ConnectError("no broker answers")
        return await super().partitions(topic)

    async def creates_topics(self) -> bool | None:
        return await super().creates_topics() if self.tells_whether_topics_are_created else None


def started(app: App, broker: InMemoryBroker, **attributes: object) -> AbstractAsyncContextManager[App]:
    transport = Client(broker, "writing")
    vars(transport).update(attributes)
    return app.started(lambda: transport, lambda: InMemoryProducer(broker), lambda: InMemorySideTopics(broker))


def topic_findings(app: App) -> list[Finding]:
    return [finding for finding in app.diagnose().findings if finding.kind == "topics"]


def named_in(findings: list[Finding]) -> set[str]:
    return {topic for topic in (DEAD_LETTERS, OUTPUT) for finding in findings if repr(topic) in finding.sentence}


def test_missing_output_topics_are_reported_until_they_exist(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    broker = make_broker()

    async def test() -> None:
        async with started(app, broker):
            await until(lambda: len(topic_findings(app)) == 2)
            assert app.statistics().state == "running"
            assert named_in(topic_findings(app)) == {DEAD_LETTERS, OUTPUT}
            assert "refunds.parked" not in app.explain(), "the app creates it"
            broker.create_topic(OUTPUT)
            await until(lambda: named_in(topic_findings(app)) == {DEAD_LETTERS}, timeout=20.0)
            broker.create_topic(DEAD_LETTERS)
            await until(lambda: not topic_findings(app), timeout=20.0)

    run(test())
    events: list[Mapping[str, object]] = [vars(line) for line in caplog.records]
    assert [event["levelname"] for event in events if event.get("event") == "missing_topic"] == ["WARNING", "WARNING"]


def test_without_a_client_no_topic_is_said_to_be_missing() -> None:
    app = make_app()
    broker = make_broker()

    async def test() -> None:
        async with app.started(
            lambda: Client(broker, "writing"), lambda: InMemoryProducer(broker), lambda: InMemorySideTopics(broker)
        ):
            await until(lambda: len(topic_findings(app)) == 2)
            broker.available = False
            broker.fail_next_poll(ClientLostError("gone"))
            await until(lambda: app.statistics().client_losses > 0)
            await until(lambda: not topic_findings(app))
            broker.available = True
            await until(lambda: len(topic_findings(app)) == 2, timeout=20.0)

    run(test())


def test_a_missing_output_topic_fails_the_start_if_a_setting_says_so() -> None:
    app = make_app(missing_output_topics="fail")
    broker = make_broker(OUTPUT)

    async def test() -> None:
        async with started(app, broker):
            raise AssertionError("it has started")

    with pytest.raises(MissingTopicError) as error:
        run(test())
    assert repr(DEAD_LETTERS) in str(error.value)
    assert repr(OUTPUT) not in str(error.value)


def test_a_start_without_a_time_limit_does_not_fail() -> None:
    app = make_app(missing_output_topics="fail", start_timeout=None)

    async def test() -> None:
        async with started(app, make_broker()):
            await until(lambda: len(topic_findings(app)) == 2)
            assert app.statistics().state == "running"

    run(test())


def test_an_output_topic_created_during_the_start_lets_the_app_run() -> None:
    app = make_app(missing_output_topics="fail")
    broker = make_broker(OUTPUT)

    async def test() -> None:
        asyncio.get_running_loop().call_later(1.0, broker.create_topic, DEAD_LETTERS)
        async with started(app, broker):
            assert app.statistics().state == "running"
            assert not topic_findings(app)

    run(test())


@pytest.mark.parametrize("setting", ["warn", "fail"])
def test_topics_that_the_brokers_create_are_not_missing(setting: str, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(missing_output_topics=setting)
    broker = make_broker()
    broker.creates_topics = True

    async def test() -> None:
        async with started(app, broker):
            await asyncio.sleep(30.0)
            assert not topic_findings(app)

    run(test())
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


def test_a_topic_that_may_be_created_on_demand_is_not_said_to_be_missing_for_sure() -> None:
    sentences: list[str] = []

    async def test(app: App, **attributes: object) -> None:
        async with started(app, make_broker(OUTPUT), **attributes):
            await until(lambda: topic_findings(app))
            (finding,) = topic_findings(app)
            sentences.append(finding.sentence)

    run(test(make_app()))
    run(test(make_app(), tells_whether_topics_are_created=False))
    certain, uncertain = sentences
    assert uncertain.startswith(certain)
    assert uncertain != certain


@pytest.mark.parametrize("hidden", [DEAD_LETTERS, OUTPUT])
def test_a_topic_that_this_user_may_not_see_is_not_said_to_be_missing(hidden: str) -> None:
    app = make_app()

    async def test() -> None:
        async with started(app, make_broker(OUTPUT, DEAD_LETTERS), hides=frozenset([hidden])):
            await until(lambda: topic_findings(app))
            (finding,) = topic_findings(app)
            assert named_in([finding]) == {hidden}
            assert "not exist" not in finding.sentence
            assert "create" not in str(finding.what_to_do)

    run(test())


def test_a_topic_that_vanishes_later_is_reported_and_the_app_keeps_running() -> None:
    app = make_app(missing_output_topics="fail")
    broker = make_broker(OUTPUT, DEAD_LETTERS)
    clients: list[Client] = []

    def make_client() -> Client:
        client = Client(broker, "writing")
        client.hides = frozenset([OUTPUT] if clients else [])
        clients.append(client)
        return client

    async def test() -> None:
        async with app.started(make_client, lambda: InMemoryProducer(broker), lambda: InMemorySideTopics(broker)):
            assert not topic_findings(app)
            broker.fail_next_poll(ClientLostError("gone"))
            await until(lambda: topic_findings(app))
            await asyncio.sleep(30.0)
            assert app.statistics().state == "running"
            assert app.statistics().trouble is None

    run(test())


@pytest.mark.parametrize("setting", ["warn", "fail"])
def test_brokers_that_do_not_answer_say_nothing_about_topics(setting: str) -> None:
    app = make_app(missing_output_topics=setting)

    async def test() -> None:
        async with started(app, make_broker(), answers_topics=False):
            await asyncio.sleep(30.0)
            assert app.statistics().state == "running"
            assert not topic_findings(app)

    run(test())


def test_a_dead_letter_for_a_missing_topic_fails_with_that_reason() -> None:
    app = make_app()
    broker = make_broker(OUTPUT)

    async def test() -> None:
        async with started(app, broker):
            broker.publish("orders", b"")
            await until(lambda: any(finding.kind == "recovery" for finding in app.diagnose().findings))

    with pytest.raises(NotDrainedError) as error:
        run(test())
    (why,) = error.value.unrecovered.values()
    assert "does not exist" in why
    assert "aioshard topics" in why


def test_a_pattern_needs_the_topics_that_match_it() -> None:
    app = App("matching")

    @app.consume(pattern=r"orders\..+")
    async def handle(record: Record) -> None: ...

    needed = needed_topics(app, ["refunds", "orders.us", "orders.eu"])

    assert [(topic.name, topic.role) for topic in needed] == [("orders.eu", "input"), ("orders.us", "input")]
