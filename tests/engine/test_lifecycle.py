"""The states of an app, and the client that it has in them."""

from typing import Any, cast

import pytest

from aioshard.engine.current_client import CurrentClient
from aioshard.engine.lifecycle import Lifecycle
from aioshard.errors import ClientLostError, StateError
from aioshard.ports import Transport

FIRST, SECOND = StateError("access was taken away"), StateError("the disk is full")


async def test_the_first_error_is_the_one_that_is_raised() -> None:
    lifecycle = Lifecycle()
    lifecycle.begin_running()
    lifecycle.fail(FIRST)
    lifecycle.fail(SECOND)
    assert lifecycle.state == "failed"
    assert lifecycle.failed.exception() is FIRST


async def test_a_failed_app_stays_failed_while_it_stops() -> None:
    lifecycle = Lifecycle()
    lifecycle.begin_running()
    lifecycle.fail(FIRST)
    assert not lifecycle.begin_stopping()
    assert lifecycle.stopping
    lifecycle.end()
    assert lifecycle.state == "failed"


async def test_an_error_during_the_drain_does_not_change_the_state() -> None:
    lifecycle = Lifecycle()
    lifecycle.begin_running()
    assert lifecycle.begin_stopping()
    assert not lifecycle.begin_stopping(), "it drains already"
    lifecycle.fail(FIRST)
    states = [lifecycle.state]
    lifecycle.end()
    states.append(lifecycle.state)
    assert states == ["draining", "stopped"]
    assert lifecycle.failed.exception() is FIRST


async def test_a_start_that_waits_ends_when_the_app_stops() -> None:
    lifecycle = Lifecycle()
    lifecycle.begin_stopping()
    assert lifecycle.started.done()


class Client:
    wakes = 0

    def wake(self) -> None:
        self.wakes += 1


def test_a_client_that_is_being_closed_is_reachable_but_reports_nothing() -> None:
    """It may still call the listener of the group."""
    transport: Any = Client()
    client = CurrentClient()
    client.use(cast("Transport", transport))
    client.wake()
    client.retire()
    client.wake()
    assert transport.wakes == 1
    assert client.transport is None
    assert client.get() is transport


def test_without_a_client_nothing_can_be_requested() -> None:
    client = CurrentClient()
    with pytest.raises(ClientLostError):
        client.get()
    client.use(cast("Transport", Client()))
    client.retire()
    client.forget()
    with pytest.raises(ClientLostError):
        client.get()
