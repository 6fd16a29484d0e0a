"""`Park()` without a topic: named after the group, created with the right size, and checked like any name."""

import asyncio

import pytest

from aioshard import App, Park, Record, Retry, Router
from aioshard.errors import HandlerError
from aioshard.testing import InMemoryBroker, TestClient, run
from tests.engine.live_apps import until


async def ignore(_: Record) -> None: ...


def parks_in(app: App) -> list[str]:
    return [handler.on_failure.topic for handler in app.handlers if isinstance(handler.on_failure, Park)]


def test_the_name_derives_from_the_group() -> None:
    app = App("billing")
    app.consume("orders", on_failure=Park(delay=5.0))(ignore)
    router = Router()
    router.consume("returns", on_failure=Park())(ignore)
    app.include_router(router)
    app.consume("refunds", on_failure=Park("refunds.parked"))(ignore)

    assert parks_in(app) == ["billing.parked", "billing.parked", "refunds.parked"]
    assert app.handlers[0].on_failure == Park("billing.parked", delay=5.0)


def test_a_router_serves_several_groups() -> None:
    router = Router()
    router.consume("orders", on_failure=Park())(ignore)
    apps = [App("billing"), App("audit")]
    for app in apps:
        app.include_router(router)

    assert [parks_in(app) for app in apps] == [["billing.parked"], ["audit.parked"]]


@pytest.mark.parametrize("group", ["a group", "münchen", "g" * 243])
def test_a_group_that_cannot_name_a_topic_needs_a_name(group: str) -> None:
    app = App(group)
    with pytest.raises(HandlerError, match=r"names its topic after the group.*Park\('orders\.parked'\)"):
        app.consume("orders", on_failure=Park())(ignore)
    assert not app.handlers
    app.consume("orders", on_failure=Park("orders.parked"))(ignore)


def test_a_handler_must_not_consume_its_own_parked_records() -> None:
    app = App("billing")
    with pytest.raises(HandlerError, match=r"billing\.parked.*the handler itself consumes"):
        app.consume(pattern=r"billing\..*", on_failure=Park())(ignore)
    app.consume("orders", on_failure=Park())(ignore)
    with pytest.raises(HandlerError, match=r"'billing\.parked', which handler 'ignore' uses too"):
        app.consume("billing.parked")(ignore)


def test_it_is_created_with_the_partitions_of_the_largest_topic_that_is_parked_there() -> None:
    """Whichever topic a member gets first: a topic that is too small would stop the start of another member."""
    app = App("billing", commit_interval=0.1)
    broken = True
    done: list[str] = []

    async def handle(record: Record) -> None:
        if broken:
            raise ConnectionError
        done.append(f"{record.topic}/{record.partition}")

    app.consume("a-small", "b-middle", retry=Retry(attempts=1), on_failure=Park(delay=5.0))(handle)
    app.consume("c-large", retry=Retry(attempts=1), on_failure=Park(delay=5.0))(handle)
    app.consume("d-huge", on_failure=Park("elsewhere"))(ignore)

    async def test() -> None:
        nonlocal broken
        broker = InMemoryBroker()
        for topic, partitions in {"a-small": 1, "b-middle": 3, "c-large": 7, "d-huge": 9}.items():
            broker.create_topic(topic, partitions)
        async with TestClient(app, broker=broker) as client:
            assert broker.topics()["billing.parked"] == 7
            assert broker.topics()["elsewhere"] == 9
            for topic, partition in (("a-small", 0), ("b-middle", 2), ("c-large", 6)):
                await client.publish(topic, b"", key=b"k", partition=partition)
            await client.settle()
            assert not done
            assert len(client.records("billing.parked")) == 3
            broken = False
            await until(lambda: len(done) == 3)
            await asyncio.sleep(1.0)

    run(test())
    assert sorted(done) == ["a-small/0", "b-middle/2", "c-large/6"]


@pytest.mark.parametrize("attempts", [1, 1_000_000])
def test_explanations_say_first_that_healthy_keys_wait_behind_failed_ones(attempts: int) -> None:
    app = App("billing", commit_interval=0.1, max_buffered_records=1_000)

    @app.consume("orders", retry=Retry(attempts=attempts, initial=1.0))
    async def handle(record: Record) -> None:
        if record.key == b"bad":
            raise ConnectionError("the account is locked")

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(3_000):
                await client.publish("orders", b"", key=b"bad" if number % 10 == 0 else f"k{number}", partition=0)
            await asyncio.sleep(100.0)
            (finding,) = [found for found in app.diagnose().findings if found.kind == "healthy keys wait"]
            assert "orders/0/0" in finding.sentence
            assert "the account is locked" in finding.sentence
            assert "on_failure=Park()" in (finding.what_to_do or "")
            assert ("few attempts" in (finding.what_to_do or "")) == (attempts > 1)
            first = app.explain().splitlines()[1:3]
            assert any("ealthy keys wait" in line for line in first)

    run(test())


def test_explanations_do_not_say_so_while_healthy_keys_continue() -> None:
    app = App("billing", commit_interval=0.1)

    @app.consume("orders", retry=Retry(attempts=1))
    async def handle(record: Record) -> None:
        if record.key == b"bad":
            raise ConnectionError

    async def test() -> None:
        async with TestClient(app) as client:
            for number in range(100):
                await client.publish("orders", b"", key=b"bad" if number % 10 == 0 else f"k{number}", partition=0)
            await asyncio.sleep(100.0)
            assert app.statistics().handlers[0].halted == 1
            assert not [found for found in app.diagnose().findings if found.kind == "healthy keys wait"]

    run(test())
