"""Dead letters that cannot be written: the true reason is shown everywhere, and a stop does not end cleanly."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from aioshard import App, DeadLetter, Record, Retry
from aioshard.errors import NotDrainedError, TransportError
from aioshard.observe import Finding
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemoryTransport, run
from aioshard.web.health import findings
from tests.engine.live_apps import until

MISSING = "topic 'orders.dlt' does not exist: create it"
ONCE = Retry(attempts=1)


def make_broker() -> InMemoryBroker:
    broker = InMemoryBroker(partitions=4, clock=lambda: 0.0)
    broker.fail_publishes("orders.dlt", TransportError(MISSING, retriable=False))
    return broker


def make_app() -> App:
    app = App("recovering", auto_offset_reset="earliest", commit_interval=0.1)

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(record: Record) -> None:
        if record.value == b"poison":
            raise ValueError("bad")

    return app


def started(app: App, broker: InMemoryBroker) -> AbstractAsyncContextManager[App]:
    """Run the app; a write takes a while."""
    return app.started(
        lambda: InMemoryTransport(broker, "recovering"), lambda: InMemoryProducer(broker, latency=lambda: 0.3)
    )


def recovery_findings(app: App) -> list[Finding]:
    return [finding for finding in app.diagnose().findings if finding.kind == "recovery"]


def failing(app: App) -> int:
    """How many records wait for the next try of their recoveries."""
    workload = app.workload()
    return 0 if workload is None else len(workload.failed)


def is_waiting(app: App) -> bool:
    return failing(app) == 1


def is_trying_again(app: App) -> bool:
    workload = app.workload()
    return workload is not None and any(run.error is not None for run in workload.workers)


MOMENTS = pytest.mark.parametrize("moment", [is_waiting, is_trying_again])


@MOMENTS
def test_the_last_error_of_a_dead_letter_is_shown_at_any_moment(moment: Callable[[App], bool]) -> None:
    app = make_app()
    broker = make_broker()

    async def test() -> None:
        async with started(app, broker):
            broker.publish("orders", b"poison", partition=0)
            await until(lambda: moment(app))

            (head,) = [found.head for found in app.diagnose().partitions if found.head is not None]
            assert MISSING in str(head.error)
            assert MISSING in head.reason
            assert "brokers answer" not in app.explain()
            (finding,) = recovery_findings(app)
            assert MISSING in finding.sentence
            assert "orders/0/0" in finding.sentence
            assert finding.sentence in findings(app.statistics(), app.diagnose())

            broker.fail_publishes("orders.dlt", None)
            await broker.until(lambda: bool(broker.records("orders.dlt")))
            await until(lambda: not recovery_findings(app))

    run(test())


def test_the_error_of_a_dead_letter_is_not_that_of_the_next_attempt() -> None:
    app = App("recovering", auto_offset_reset="earliest", commit_interval=0.1)
    broker = make_broker()
    attempts: list[int] = []
    ending = asyncio.Event()

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(_: Record) -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise ValueError("bad")
        await ending.wait()

    async def test() -> None:
        async with started(app, broker):
            broker.publish("orders", b"poison", partition=0)
            await until(lambda: is_waiting(app))
            app.retry_now("orders", 0, 0)
            await until(lambda: len(attempts) == 2)
            (head,) = [found.head for found in app.diagnose().partitions if found.head is not None]
            assert head.error is None
            ending.set()

    run(test())


def test_records_with_the_same_cause_are_one_finding() -> None:
    app = make_app()
    broker = make_broker()

    async def test() -> None:
        async with started(app, broker):
            for number in range(5):
                broker.publish("orders", b"poison", key=b"%d" % number)
            await until(lambda: failing(app) == 5)
            (finding,) = recovery_findings(app)
            assert "5 records" in finding.sentence
            broker.fail_publishes("orders.dlt", None)
            await until(lambda: not recovery_findings(app))

    run(test())


@MOMENTS
def test_a_stop_names_the_records_whose_dead_letters_could_not_be_written(moment: Callable[[App], bool]) -> None:
    app = make_app()
    broker = make_broker()

    async def test() -> None:
        async with started(app, broker):
            broker.publish("orders", b"poison", partition=0)
            broker.publish("orders", b"good", partition=1)
            await broker.until(lambda: broker.committed("recovering", "orders", 1) == 1)
            await until(lambda: moment(app))

    with pytest.raises(NotDrainedError) as error:
        run(test())
    assert error.value.records == ()
    assert error.value.uncommitted == {}
    assert list(error.value.unrecovered) == ["orders/0/0"]
    assert MISSING in error.value.unrecovered["orders/0/0"]
    assert MISSING in str(error.value)


def test_a_dead_letter_that_is_still_being_written_is_not_blamed_on_the_handler() -> None:
    app = App("recovering", auto_offset_reset="earliest")
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)

    @app.consume("orders", retry=ONCE, on_failure=DeadLetter("orders.dlt"))
    async def handle(_: Record) -> None:
        broker.available = False
        raise ValueError("bad")

    async def test() -> None:
        async with started(app, broker):
            broker.publish("orders", b"poison")
            await broker.until(lambda: not broker.available)

    with pytest.raises(NotDrainedError) as error:
        run(test())
    assert error.value.records == ()
    assert list(error.value.unrecovered) == ["orders/0/0"]


def test_a_halted_record_does_not_make_a_stop_fail() -> None:
    """It waits as `on_failure="halt"` says."""
    app = App("recovering", auto_offset_reset="earliest")
    broker = InMemoryBroker(partitions=1, clock=lambda: 0.0)

    @app.consume("orders", retry=ONCE)
    async def handle(_: Record) -> None:
        raise ValueError("bad")

    async def test() -> None:
        async with started(app, broker):
            broker.publish("orders", b"poison")
            await until(lambda: app.statistics().handlers[0].halted)

    run(test())
