"""Runs tests on both event loops that apps use."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
"""A test is run once for each, with what makes the loop as `new_loop`."""

NewLoop = Callable[[], asyncio.AbstractEventLoop]


def run_on(new_loop: NewLoop, main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a new loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)
