"""Reading stacks is safe from any thread, even during garbage collection (Python 3.11)."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aioshard.engine.stack import stack_above, stack_of, waits_for
from tests.support.reading_stacks import READERS

pytestmark = pytest.mark.slow


def run(*arguments: str) -> list[int]:
    """How often each thread has read everything."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.support.reading_stacks", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return [int(number) for number in done.stdout.split()]


def test_stacks_are_read_while_garbage_is_collected() -> None:
    read = run("read", "3")
    assert len(read) == READERS
    assert min(read) > 2


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_process_forked_during_a_read_can_read_and_collect() -> None:
    assert len(run("fork", "100")) == READERS


def test_running_code_can_read_its_own_stack_at_any_time() -> None:
    """Its awaited object would be an invalid pointer for some values of the interpreter's counters."""
    assert run("oneself", "5000") == [5_000] * 3


DEEP = 60


async def deep(levels: int, innermost: Callable[[], None]) -> None:
    if levels:
        await deep(levels - 1, innermost)
    else:
        innermost()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "read",
    [
        stack_of,
        lambda coroutine: waits_for(coroutine, asyncio.current_task()),  # type: ignore[arg-type]
        lambda _: stack_above(threading.get_ident(), None),
    ],
    ids=["stack_of", "waits_for", "stack_above"],
)
async def test_nothing_is_collected_while_a_stack_is_read(read: Callable[[Coroutine[Any, Any, None]], object]) -> None:
    """Each frame is an allocation, and each would be a collection here."""
    collections: list[str] = []

    def note(phase: str, _: object) -> None:
        collections.append(phase)

    def read_here() -> None:
        gc.callbacks.append(note)
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        try:
            read(coroutine)
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(note)

    coroutine = deep(DEEP, read_here)
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert len(collections) < DEEP / 2
