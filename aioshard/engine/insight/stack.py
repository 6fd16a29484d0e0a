"""Stacks of runs: follows the awaits of a coroutine through tasks and threads, from any thread.

Nothing here calls application code, and nothing here raises. The state may change while it is read; the result then
describes one moment, or is shorter.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
)
from typing import Any, NamedTuple, TypeGuard

from aioshard import records
from aioshard.engine.loop_watch import Holder, LoopWatch
from aioshard.engine.runtime import Engine
from aioshard.engine.worker import Worker
from aioshard.observe import Frame, Stack

__all__ = [
    "AIOSHARD",
    "ThreadRun",
    "called_by_own",
    "described",
    "find_holder",
    "function_of",
    "home_of",
    "is_library",
    "is_own",
    "module_of",
    "stack_above",
    "stack_of",
    "waits_for",
]

_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen", "uvloop")
_INSTALLED = ("site-packages", "dist-packages")
AIOSHARD = str(Path(records.__file__).parent) + os.sep
"""Path of this package, taken from a top-level module because this one may move."""
_ANYIO = "anyio"
"""Package whose frames lie between the engine and a handler in a thread."""


def described(frame: FrameType, home: str) -> Frame:
    """Describe a frame; *home* is the result of `home_of` for its stack."""
    code = frame.f_code
    return Frame(
        file=code.co_filename,
        line=frame.f_lineno or code.co_firstlineno,
        function=function_of(frame),
        own=is_own(frame, home),
    )


def function_of(frame: FrameType) -> str:
    """Return the qualified name of a frame's function."""
    return frame.f_code.co_qualname.replace("<locals>.", "")


def module_of(frame: FrameType) -> str:
    """Return the name of a frame's module."""
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else "?"


def called_by_own(frames: Sequence[FrameType], home: str) -> str | None:
    """Return the library function that the innermost frame of the application has called, if any."""
    called: FrameType | None = None
    for frame in reversed(frames):
        if is_own(frame, home):
            break
        called = frame
    return None if called is None else f"{module_of(called)}.{function_of(called)}"


def _is_installed(file: str) -> bool:
    return any(f"/{place}/" in file.replace(os.sep, "/") for place in _INSTALLED)


def is_library(frame: FrameType) -> bool:
    """Return whether a frame belongs to the standard library, an installed package or aioshard."""
    return _is_of_library(frame.f_code.co_filename)


@functools.lru_cache(maxsize=1_000)
def _is_of_library(file: str) -> bool:
    return file.startswith((*_STANDARD_LIBRARY, AIOSHARD)) or _is_installed(file)


def is_own(frame: FrameType, home: str) -> bool:
    """Return whether a frame belongs to the application; *home* is the result of `home_of` for its stack."""
    return not is_library(frame) or bool(home and frame.f_code.co_filename.startswith(home))


def home_of(frames: Sequence[FrameType]) -> str:
    """Return the folder of an application that is itself an installed package, by its outermost frame; else `""`."""
    if not all(is_library(frame) for frame in frames):
        return ""
    for frame in frames:
        file = frame.f_code.co_filename
        parts = Path(file).parts
        if _is_installed(file) and not file.startswith(AIOSHARD) and _ANYIO not in parts:
            place = next(n for n, part in enumerate(parts) if part in _INSTALLED)
            return str(Path(*parts[: place + 2]))
    return ""


_LONGEST = 64
"""Maximum number of frames of one stack."""
_MOST_TASKS = 3
_DEEPEST = 4
"""Maximum number of tasks shown that are awaited together, and of levels of tasks awaiting tasks."""


_LOOPS = ("asyncio.base_events", "asyncio.events", "selectors")
"""Modules of an event loop's own frames."""

_GENERATORS: dict[type, tuple[str, str]] = {
    CoroutineType: ("cr_frame", "cr_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}
_WRAPPERS = ("async_generator_asend", "async_generator_athrow", "coroutine_wrapper", "anext_awaitable")
"""Objects between a coroutine and its awaitable that do not expose the awaitable; the garbage collector knows it."""


class ThreadRun:
    """Identifies the thread that runs something; aioshard's coroutines keep one as a local variable while they wait."""

    __slots__ = ("ident",)

    def __init__(self) -> None:
        self.ident: int | None = None

    def begins(self) -> None:
        """Record that the current thread runs it."""
        self.ident = threading.get_ident()

    def ends(self) -> None:
        """Record that the thread no longer runs it."""
        self.ident = None


class _Walk(NamedTuple):
    """Result of following a chain of awaits."""

    frames: list[FrameType]
    """Outermost first."""
    future: "asyncio.Future[Any] | None"
    """Future that the last frame waits for."""
    executing: bool
    """Whether the last frame was executing at that moment."""


_NOWHERE = Stack(frames=(), waits_in=None, executing=False, name=None, thread=None, tasks=(), more_tasks=0)

_READING = threading.RLock()
"""Held while frames are read: the reader has disabled the garbage collector of the whole process."""
if sys.platform != "win32":
    # A child forked in the middle of that would have no garbage collector, and would never get the lock.
    os.register_at_fork(before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from running while a frame is read.

    CPython 3.11 creates a frame's object on first access, and may collect garbage while doing so. Finalizers then let
    other threads run, so the frame may end before its object exists. The object then refers to memory that has been
    reused, and the process crashes, right there or much later.
    """
    with _READING:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def stack_of(awaited: object) -> Stack:
    """Return the stack of an awaitable: a coroutine, a task or another future.

    Args:
        awaited: The awaitable of a worker; None has no frames.

    Returns:
        The stack; it has no frames if nothing could be found out.
    """
    try:
        with _uncollected():
            return _stack(awaited, set(), 0)
    except Exception:  # noqa: BLE001 - it changed while being read, or is of an unknown kind
        return _NOWHERE


def waits_for(awaited: object, sought: "asyncio.Task[Any] | int") -> bool:
    """Return whether an awaitable waits, directly or indirectly, for a task or for a thread (given by its identifier).

    A task or thread that was started but is not awaited yet does not count.
    """
    try:
        with _uncollected():
            return _waits_for(awaited, sought, set(), 0)
    except Exception:  # noqa: BLE001 - as in `stack_of`
        return False


def _waits_for(awaited: object, sought: "asyncio.Task[Any] | int", seen: set[int], depth: int) -> bool:
    seen.add(id(awaited))
    walk = _walk(awaited.get_coro() if _is_task(awaited) else awaited)
    if isinstance(sought, int) and _thread_of(walk) == sought:
        return True
    found = _awaited_futures(walk)
    if any(one is sought for one in found):  # before going deeper: there may be thousands of them
        return True
    deeper = [one for one in found if id(one) not in seen] if depth < _DEEPEST else []
    return any(_waits_for(one, sought, seen, depth + 1) for one in deeper)


def _stack(awaited: object, seen: set[int], depth: int) -> Stack:
    seen.add(id(awaited))
    name: str | None = None
    if _is_task(awaited):
        name = awaited.get_name()
        awaited = awaited.get_coro()
    walk = _walk(awaited)
    thread = _thread_of(walk)
    if thread is not None:
        return _stack_of_thread(thread, name)
    home = home_of(walk.frames)
    tasks, more = _awaited_tasks(walk, seen, depth)
    return Stack(
        frames=tuple(described(frame, home) for frame in walk.frames),
        waits_in=called_by_own(walk.frames, home) or _kind_of(walk.future),
        executing=walk.executing,
        name=name,
        thread=None,
        tasks=tasks,
        more_tasks=more,
    )


def stack_above(thread: int, runner: FrameType | None) -> Stack:
    """Return the stack of a thread above the frame that runs its event loop.

    Args:
        thread: Identifier of the thread.
        runner: That frame; None for the whole stack.

    Returns:
        The stack; it has no frames if the event loop is idle.
    """
    try:
        with _uncollected():
            innermost = sys._current_frames().get(thread)  # noqa: SLF001 - documented despite its name
            frames = list(itertools.takewhile(lambda frame: frame is not runner, _callers(innermost)))[::-1]
            called = itertools.dropwhile(lambda frame: module_of(frame) in _LOOPS, frames)
            return _executed(list(called)[-_LONGEST:], None)
    except Exception:  # noqa: BLE001 - it changed while being read
        return _NOWHERE


# Coroutines ---------------------------------------------------------------------------------


def _walk(awaited: object) -> _Walk:
    frames: list[FrameType] = []
    for _ in range(2 * _LONGEST):
        if awaited is None or len(frames) >= _LONGEST:
            break
        if _is_future(awaited):
            return _Walk(frames, awaited, executing=False)
        names = _attributes_of(awaited)
        if names is None:
            awaited = _inside(awaited)
            continue
        frame: FrameType | None = getattr(awaited, names[0])
        following = getattr(awaited, names[1])
        if frame is not None:
            frames.append(frame)
            if following is None and (called := _called_from(frame)) is not None:
                return _Walk(frames + called, None, executing=True)
        awaited = following
    return _Walk(frames, None, executing=False)


def _attributes_of(awaited: object) -> tuple[str, str] | None:
    """Return the attributes of a coroutine or generator for its frame and its awaitable; None for other objects."""
    kind = type(awaited)
    if kind in _GENERATORS:
        return _GENERATORS[kind]
    # Compiled coroutines, such as Cython's, have the same attributes. This does not call properties of user classes.
    told = [name for name, of in kind.__dict__.items() if isinstance(of, GetSetDescriptorType | MemberDescriptorType)]
    return next((names for names in _GENERATORS.values() if names[0] in told and names[1] in told), None)


def _inside(wrapper: object) -> object:
    """Return the awaitable of a wrapper that does not expose it; None if the garbage collector does not know it."""
    for referent in gc.get_referents(wrapper):
        kind = type(referent)
        if kind in _GENERATORS or kind.__name__ in _WRAPPERS or _is_future(referent):
            found: object = referent
            return found
    return None


def _called_from(frame: FrameType) -> list[FrameType] | None:
    """Return the frames that *frame* has called, innermost last; None if no thread executes it now."""
    for innermost in sys._current_frames().values():  # noqa: SLF001 - documented despite its name
        called: list[FrameType] = []
        at: FrameType | None = innermost
        while at is not None:
            if at is frame:
                return called[::-1][:_LONGEST]
            called.append(at)
            at = at.f_back
    return None


# Awaited tasks --------------------------------------------------------------------------------


def _awaited_tasks(walk: _Walk, seen: set[int], depth: int) -> tuple[tuple[Stack, ...], int]:
    """Return the stacks of awaited tasks that have not ended, and how many more there are."""
    found = [one for one in _awaited_futures(walk) if not one.done() and id(one) not in seen]
    if depth >= _DEEPEST:
        return (), len(found)
    stacks = tuple(_stack(one, seen, depth + 1) for one in found[:_MOST_TASKS])
    shown = tuple(stack for stack in stacks if stack.frames or stack.tasks)
    return shown, len(found) - len(stacks)


def _awaited_futures(walk: _Walk) -> Iterable["asyncio.Future[Any]"]:
    future = walk.future
    if future is None:
        return ()
    if _is_task(future):
        return (future,)
    children = getattr(future, "_children", None) if type(future).__module__ == "asyncio.tasks" else None
    if children is not None:  # gather
        return tuple(children)
    shielded = _closed_over(future, "_outer_done_callback", "inner")
    if _is_future(shielded):
        return (shielded,)
    for frame in reversed(walk.frames):
        if not is_library(frame):
            break
        waited_for = _waited_for_in(frame)
        if waited_for:
            return waited_for
    return ()


def _waited_for_in(frame: FrameType) -> tuple["asyncio.Future[Any]", ...]:
    """Return the futures that `asyncio.wait_for`, `asyncio.wait` or a task group (asyncio, anyio) waits for."""
    module, name = module_of(frame), frame.f_code.co_name
    if module == "asyncio.tasks" and name in {"wait_for", "_wait"}:
        local = frame.f_locals
        candidates: Iterable[object] = (local.get("fut"),) if name == "wait_for" else tuple(local.get("fs") or ())
    elif module in {"asyncio.taskgroups", "anyio._backends._asyncio"} and name in {"__aexit__", "_aexit"}:
        candidates = tuple(getattr(frame.f_locals.get("self"), "_tasks", ()))
    else:
        return ()
    return tuple(one for one in candidates if _is_future(one))


def _closed_over(future: "asyncio.Future[Any]", function: str, variable: str) -> object:
    """Return a closure variable of the asyncio callback that runs when *future* ends."""
    for callback, *_ in getattr(future, "_callbacks", None) or ():
        if type(callback) is FunctionType and callback.__name__ == function and callback.__closure__ is not None:
            cells = dict(zip(callback.__code__.co_freevars, callback.__closure__, strict=True))
            if variable in cells:
                held: object = cells[variable].cell_contents
                return held
    return None


# Threads --------------------------------------------------------------------------------------


def _thread_of(walk: _Walk) -> int | None:
    """Return the thread that a coroutine waits for: one of aioshard, of an executor or of anyio."""
    for frame in walk.frames:
        if frame.f_code.co_filename.startswith(AIOSHARD):
            for value in tuple(frame.f_locals.values()):
                if type(value) is ThreadRun and value.ident is not None:
                    return value.ident
    if walk.future is None:
        return None
    source = _closed_over(walk.future, "_call_check_cancel", "source")
    for ident, innermost in sys._current_frames().items():  # noqa: SLF001 - documented despite its name
        if any(_runs_for(frame, walk.future, source) for frame in _callers(innermost)):
            return ident
    return None


def _runs_for(frame: FrameType, future: "asyncio.Future[Any]", source: object) -> bool:
    """Return whether a frame belongs to a pool thread that works for *future*, or for the *source* of its result."""
    match module_of(frame), frame.f_code.co_qualname:
        case "concurrent.futures.thread", "_WorkItem.run":
            return source is not None and getattr(frame.f_locals.get("self"), "future", None) is source
        case "anyio._backends._asyncio", "WorkerThread.run":
            return frame.f_locals.get("future") is future
    return False


def _callers(innermost: FrameType | None) -> Iterator[FrameType]:
    frame = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stack_of_thread(ident: int, name: str | None) -> Stack:
    innermost = sys._current_frames().get(ident)  # noqa: SLF001 - documented despite its name
    frames = list(_callers(innermost))[::-1]
    home = home_of(frames)
    first = next((n for n, frame in enumerate(frames) if is_own(frame, home)), 0)
    thread = next((thread.name for thread in threading.enumerate() if thread.ident == ident), str(ident))
    stack = _executed(frames[first:][-_LONGEST:], name)  # the outer frames of the thread say nothing
    return dataclasses.replace(stack, thread=thread)


def _executed(frames: Sequence[FrameType], name: str | None) -> Stack:
    home = home_of(frames)
    return Stack(
        frames=tuple(described(frame, home) for frame in frames),
        waits_in=called_by_own(frames, home),
        executing=bool(frames),
        name=name,
        thread=None,
        tasks=(),
        more_tasks=0,
    )


# Types -------------------------------------------------------------------------------------


def _kind_of(future: "asyncio.Future[Any] | None") -> str | None:
    if future is None:
        return None
    kind = type(future)
    return f"{kind.__module__.lstrip('_')}.{kind.__qualname__}"


def _is_future(one: object) -> TypeGuard["asyncio.Future[Any]"]:
    # Not `isinstance`, which may run an application's `__class__` property.
    return issubclass(type(one), asyncio.Future)


def _is_task(one: object) -> TypeGuard["asyncio.Task[Any]"]:
    return issubclass(type(one), asyncio.Task)


_IDLE = Holder(
    "no Python code runs in it; a call of a C library holds it, or other threads or processes leave it no time", None
)


def find_holder(engine: Engine, watch: LoopWatch) -> Holder:
    """Find the code that blocks an engine's event loop; safe from any thread.

    Args:
        engine: Engine whose handlers may block it; anything else in the process may do so too.
        watch: Watches the event loop.
    """
    thread = watch.thread
    stack = None if thread is None else stack_above(thread, watch.runner)
    place = None if stack is None else stack.place
    if stack is None or place is None:
        return _IDLE
    called = f" in {stack.waits_in}" if place.own and stack.waits_in is not None else ""
    where, code = f"at {place}{called}", f"{place.file} {place.function}"
    task = asyncio.current_task(watch.loop)
    if task is not None:
        ours = next((one for one in _busy(engine) if one[1].name == task.get_name()), None)
        # Otherwise look for a handler that waits for a task it has created, or that has renamed its task.
        ours = ours or next((one for one in _busy(engine) if waits_for(one[1].running, task)), None)
        if ours is not None:
            name, worker = ours
            sentence = f"handler {name} computes or blocks without an await, with {_records(worker)}, {where}"
            return Holder(sentence, f"{name} {code}")
    who = "a callback" if task is None else f"task {task.get_name()!r}"
    return Holder(f"{who}, which is no handler, computes or blocks without an await, {where}", code)


def _records(worker: Worker) -> str:
    deliveries = tuple(worker.deliveries)
    if not deliveries:
        return "a record that it has just ended"
    more = f" and {len(deliveries) - 1} more of its batch" if len(deliveries) > 1 else ""
    return f"record {deliveries[0]!r}{more}"


def _busy(engine: Engine) -> Iterator[tuple[str, Worker]]:
    for running in engine.handlers:
        for worker in tuple(running.workers):
            if worker.deliveries:
                yield running.spec.name, worker
