"""The stack of a run: file and line of every await, through all asyncio wrappers."""

import asyncio
import contextlib
import functools
import gc
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from types import CoroutineType
from typing import Any, NoReturn

import anyio
import anyio.to_thread
import pytest

from aioshard.engine.stack import stack_of
from aioshard.observe import Stack

Waiting = Callable[[], Awaitable[object]]


def line_of(mark: str) -> int:
    """The line of this file that ends with the comment *mark*."""
    (line,) = [n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"  # {mark}")]
    return line


def own_lines(stack: Stack) -> list[int]:
    """The lines of the stack that are in this file, outermost first."""
    assert all(frame.file == __file__ for frame in stack.frames if frame.own)
    return [frame.line for frame in stack.frames if frame.own]


async def while_suspended(coroutine: Coroutine[Any, Any, object], iterations: int = 5) -> Stack:
    """The stack of a coroutine that a task has run until it waits; it is ended then."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(iterations):
        await asyncio.sleep(0)
    assert not task.done()
    try:
        return stack_of(coroutine)
    finally:
        task.cancel()
        await asyncio.wait([task])


# Awaitables of a handler


async def hang() -> None:
    await asyncio.Event().wait()  # the innermost await


async def test_a_stack_has_the_await_and_every_caller() -> None:
    async def outer() -> None:
        await hang()  # the call of hang

    stack = await while_suspended(outer())

    assert own_lines(stack) == [line_of("the call of hang"), line_of("the innermost await")]
    assert stack.frames[-1].function == "Event.wait"
    assert not stack.frames[-1].own
    assert stack.place is not None
    assert str(stack.place) == f"{__file__}:{line_of('the innermost await')} in hang"
    assert stack.waits_in == "asyncio.locks.Event.wait"
    assert not stack.executing


async def test_a_bare_future_is_named_by_its_type() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()  # a bare future

    stack = await while_suspended(wait())

    assert own_lines(stack) == [line_of("a bare future")]
    assert stack.waits_in == "asyncio.Future"


async def _generator() -> AsyncIterator[int]:
    await hang()  # in the generator
    yield 1


async def _iterates() -> None:
    async for _ in _generator():  # over the generator
        pass


class _Wrapped:
    """Awaits through its own iterator, not through a generator."""

    def __init__(self) -> None:
        self.coroutine = hang()

    def __await__(self) -> Generator[Any, Any, None]:
        return self.coroutine.__await__()


async def _awaits_object() -> None:
    await _Wrapped()  # an object


async def _managed() -> None:
    @contextlib.asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        await hang()  # in the manager
        yield

    async with manager():  # enters the manager
        pass


@pytest.mark.parametrize(
    ("waiting", "marks"),
    [
        (_iterates, ["over the generator", "in the generator"]),
        (_awaits_object, ["an object"]),
        (_managed, ["enters the manager", "in the manager"]),
    ],
    ids=["async generator", "awaitable object", "context manager"],
)
async def test_wrapped_coroutines_are_unwrapped(
    waiting: Callable[[], Coroutine[Any, Any, None]], marks: list[str]
) -> None:
    stack = await while_suspended(waiting())

    assert own_lines(stack) == [*map(line_of, marks), line_of("the innermost await")]


# Through tasks


async def _awaits_task() -> None:
    await asyncio.create_task(hang(), name="the child")  # a task


async def _waits_for() -> None:
    await asyncio.wait_for(hang(), 60)  # wait_for


async def _waits() -> None:
    await asyncio.wait([asyncio.create_task(hang())])  # wait


async def _gathers() -> None:
    await asyncio.gather(hang(), asyncio.sleep(0))  # gather


async def _times_out() -> None:
    async with asyncio.timeout(60):
        await hang()  # timeout


async def _groups() -> None:
    async with asyncio.TaskGroup() as group:  # task group
        group.create_task(hang())


async def _groups_of_anyio() -> None:
    async with anyio.create_task_group() as group:  # anyio's task group
        group.start_soon(hang)


async def _nests() -> None:
    async with asyncio.TaskGroup() as group:  # outer group
        group.create_task(_gathers())


@pytest.mark.parametrize(
    ("waiting", "marks"),
    [
        (_awaits_task, ["a task"]),
        (_waits_for, ["wait_for"]),
        (_waits, ["wait"]),
        (_gathers, ["gather"]),
        (_times_out, ["timeout"]),
        (_groups, ["task group"]),
        (_groups_of_anyio, ["anyio's task group"]),
        (_nests, ["outer group", "gather"]),
    ],
)
async def test_a_stack_follows_an_awaited_task(
    waiting: Callable[[], Coroutine[Any, Any, None]], marks: list[str]
) -> None:
    stack = await while_suspended(waiting())

    innermost = line_of("the innermost await")
    assert own_lines(stack) == [*map(line_of, marks), innermost]
    assert stack.place is not None
    assert stack.place.line == innermost
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_a_stack_stops_at_a_gather_of_several_tasks() -> None:
    async def many() -> None:
        await asyncio.gather(*[hang() for _ in range(9)])  # nine hang

    stack = await while_suspended(many())

    assert own_lines(stack) == [line_of("nine hang")]
    assert stack.waits_in == "asyncio.tasks._GatheringFuture"


async def test_tasks_that_await_each_other_in_a_cycle_do_not_loop() -> None:
    tasks: list[asyncio.Task[object]] = []

    async def first() -> None:
        await asyncio.wait(tasks)

    async def second() -> None:
        await asyncio.wait(tasks)

    tasks += [asyncio.create_task(first()), asyncio.create_task(second())]
    await asyncio.sleep(0)

    assert stack_of(tasks[0]).place is not None
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stack_is_bounded() -> None:
    async def deeper(levels: int) -> None:
        if levels:
            await deeper(levels - 1)
        await hang()

    stack = await while_suspended(deeper(500))

    assert 10 < len(stack.frames) < 100


def test_a_call_that_blocks_the_loop_is_seen_from_another_thread() -> None:
    seen: list[Stack] = []
    coroutines: list[CoroutineType[Any, Any, None]] = []
    blocked = threading.Event()

    def blocks() -> None:
        blocked.set()
        has_read.wait(10)  # blocks the loop

    async def handler() -> None:
        blocks()  # calls what blocks

    def read_stacks() -> None:
        blocked.wait(10)
        seen.append(stack_of(coroutines[0]))
        has_read.set()

    async def main() -> None:
        coroutines.append(handler())  # type: ignore[arg-type]
        await coroutines[0]

    has_read = threading.Event()
    thread = threading.Thread(target=read_stacks)
    thread.start()
    asyncio.run(main())
    thread.join()

    assert own_lines(seen[0]) == [line_of("calls what blocks"), line_of("blocks the loop")]
    assert seen[0].executing
    assert seen[0].waits_in == "threading.Event.wait"


# The application's own code


async def test_an_installed_application_is_recognized_by_its_package(tmp_path: Path) -> None:
    """In an image, the application is often a package next to the libraries."""
    files = {name: tmp_path / "site-packages" / name / "main.py" for name in ("shop", "library")}
    for name, call in (("library", "event.wait()"), ("shop", "library(event)")):
        files[name].parent.mkdir(parents=True)
        files[name].write_text(f"async def {name}(event, library=None):\n    await {call}\n")
    functions: dict[str, Any] = {}
    for file in files.values():
        exec(compile(file.read_text(), str(file), "exec"), functions)
    shop = functools.partial(functions["shop"], library=functions["library"])

    stack = await while_suspended(shop(asyncio.Event()))

    assert [frame.function for frame in stack.frames] == ["shop", "library", "Event.wait"]
    assert stack.place is not None
    assert stack.place.function == "shop"


# Safety


class _Touchy:
    """An awaitable of the application that must not be accessed."""

    def __init__(self, accessed: list[str]) -> None:
        object.__setattr__(self, "accessed", accessed)

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "accessed").append(name)
        return object.__getattribute__(self, name)

    def __repr__(self) -> NoReturn:
        raise AssertionError

    def __await__(self) -> "_Touchy":
        return self

    def __iter__(self) -> "_Touchy":
        return self

    def __next__(self) -> None:
        return None

    def cr_frame(self) -> NoReturn:
        raise AssertionError

    def cr_await(self) -> NoReturn:
        raise AssertionError


async def test_reading_a_stack_calls_no_application_code() -> None:
    accessed: list[str] = []

    async def wait() -> None:
        await _Touchy(accessed)

    coroutine = wait()
    coroutine.send(None)
    accessed.clear()

    stack = stack_of(coroutine)

    coroutine.close()
    assert stack.place is not None
    assert stack.place.function.endswith("wait")
    assert [name for name in accessed if name != "close"] == []


async def test_an_object_without_a_stack_has_an_empty_one() -> None:
    async def ends() -> None: ...

    ended = ends()
    await ended
    never = ends()

    for nothing in (None, ended, object(), 3, asyncio.get_running_loop().create_future()):
        assert stack_of(nothing).frames == ()
    assert [frame.function for frame in stack_of(never).frames] == [
        "test_an_object_without_a_stack_has_an_empty_one.ends"
    ], "it has not begun"
    never.close()


def test_a_stack_can_be_read_while_everything_changes() -> None:
    """From a thread, without a pause, while the tasks it follows come and go."""
    current: list[Any] = [None]
    failures: list[BaseException] = []
    reads = stacks = 0
    over = threading.Event()

    async def leaf(depth: int) -> None:
        if depth:
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(leaf(depth - 1))
        else:
            await asyncio.wait_for(asyncio.sleep(0), 1)

    async def main() -> None:
        rounds = 0
        while not failures and (rounds < 300 or reads <= 100 or stacks <= 10):
            rounds += 1
            current[0] = coroutine = leaf(3)
            await coroutine
        over.set()

    def read_stacks() -> None:
        nonlocal reads, stacks
        try:
            while not over.is_set():
                reads += 1
                stacks += bool(stack_of(current[0]).frames)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=read_stacks)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)

    assert not failures
    assert reads > 100
    assert stacks > 10


def test_reading_a_stack_restores_the_garbage_collector() -> None:
    assert gc.isenabled()
    stack_of(None)
    assert gc.isenabled()
    gc.disable()
    try:
        stack_of(None)
        assert not gc.isenabled()
    finally:
        gc.enable()
