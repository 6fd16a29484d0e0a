"""An app before, during and after its run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from aioshard import App, Record, Router
from aioshard.errors import HandlerError, SettingsError, StateError
from aioshard.testing import TestClient, run


async def on_record(record: Record) -> None: ...


def make_app() -> App:
    app = App("billing")
    app.consume("orders")(on_record)
    return app


@pytest.mark.parametrize("group_id", ["", "  ", None, "billing-\udce9"])
def test_an_app_needs_a_group(group_id: str) -> None:
    with pytest.raises(SettingsError, match="expected a group id"):
        App(group_id)


def test_a_router_is_included_whole_or_not_at_all() -> None:
    app, others = make_app(), Router()
    others.consume("clicks")(on_record)
    others.consume("orders")(on_record)

    with pytest.raises(HandlerError, match="topic 'orders'"):
        app.include_router(others)

    assert [registration.topics for registration in app.handlers] == [("orders",)]


def test_an_app_without_handlers_is_not_served() -> None:
    app = App("billing", bootstrap_servers="localhost:1", auto_offset_reset="earliest")
    assert bool(app)

    with pytest.raises(HandlerError, match="has no handlers"):
        run(app.serve())
    with pytest.raises(HandlerError, match="has no handlers"):
        app.check()


def test_changes_while_the_app_runs_are_refused() -> None:
    app, others = make_app(), Router()
    others.consume("clicks")(on_record)

    async def scenario() -> None:
        async with TestClient(app) as client:
            with pytest.raises(StateError, match="handler 'on_record' came too late"):
                app.consume("clicks")(on_record)
            with pytest.raises(StateError, match="came too late"):
                app.include_router(others)
            with pytest.raises(StateError, match="came too late"):
                app.configure(commit_interval=2.0)
            with pytest.raises(StateError, match="already running"):
                await app.started(client._make_transport).__aenter__()
        app.consume("clicks")(on_record)

    run(scenario())
    assert [registration.topics for registration in app.handlers] == [("orders",), ("clicks",)]


def test_statistics_work_before_the_first_start_and_after_the_end() -> None:
    app = make_app()
    before = app.statistics()
    assert (before.state, before.group_id, before.member_id, before.partitions) == ("stopped", "billing", None, ())

    async def scenario() -> None:
        async with TestClient(app) as client:
            await client.publish("orders", b"paid")
            await client.settle()

    run(scenario())
    after = app.statistics()
    assert (after.state, after.handlers[0].processed) == ("stopped", 1)
    assert app.explain() == "The app is not running.\n"


def test_stopping_an_app_that_is_not_running_does_nothing() -> None:
    app = make_app()
    app.stop()

    async def scenario() -> None:
        async with TestClient(app):
            await asyncio.sleep(1)
            assert app.statistics().state == "running"

    run(scenario())
    app.stop()


def test_a_refused_setting_keeps_the_previous_ones() -> None:
    app = App("billing", commit_interval=2.0)
    with pytest.raises(SettingsError):
        app.configure(commit_interval=-1.0)

    app.configure(commit_timeout=4.0)

    assert (app.settings.commit_interval, app.settings.commit_timeout) == (2.0, 4.0)


async def test_a_timeout_longer_than_the_drain_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    app = App("billing", auto_offset_reset="earliest", drain_timeout=5.0)

    @app.consume("orders", timeout=60.0)
    async def on_order(record: Record) -> None: ...

    async with TestClient(app):
        pass
    assert "handler 'on_order' may run for timeout=60 s but drain_timeout=5 s" in caplog.text


async def yields(_: App) -> AsyncIterator[str]:
    yield "pool"


def yields_plainly(_: App) -> Iterator[str]:
    yield "pool"


async def returns(_: App) -> str:
    return "pool"


@contextlib.asynccontextmanager
async def takes_no_app() -> AsyncIterator[str]:
    yield "pool"


@contextlib.asynccontextmanager
async def takes_more(_: App, address: str) -> AsyncIterator[str]:
    yield address


@pytest.mark.parametrize("resources", [yields, yields_plainly, returns, takes_no_app, takes_more])
def test_unusable_resources_are_refused_before_the_start(resources: Any) -> None:
    app = App("billing", resources=resources)
    app.consume("orders")(on_record)

    with pytest.raises(SettingsError, match="asynccontextmanager") as error:
        app.check()

    assert resources.__name__ in str(error.value)


def test_resources_that_were_called_are_refused_before_the_start() -> None:
    app = App("billing", resources=takes_no_app())  # type: ignore[arg-type]
    app.consume("orders")(on_record)

    with pytest.raises(SettingsError, match="without calling it"):
        app.check()


def test_a_result_of_resources_that_is_no_context_manager_is_refused() -> None:
    app = App("billing", resources=lambda _: "pool")  # type: ignore[arg-type, return-value]
    app.consume("orders")(on_record)

    async def scenario() -> None:
        with pytest.raises(SettingsError, match="it returned str"):
            async with TestClient(app):
                pass

    run(scenario())
