"""Stacks of runs: follows the awaits of a coroutine through tasks and our own threads, from any thread.

Nothing here calls application code, and nothing here raises. The state may change while it is read; the result then
describes one moment, or is shorter.
"""

import asyncio
import functools
import gc
import itertools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple, TypeGuard, TypeVar

import anyio

from aioshard import records
from aioshard.observe import Frame, Stack

T = TypeVar("T")

_AIOSHARD = str(Path(records.__file__).parent) + os.sep
_ANYIO = str(Path(anyio.__file__).parent) + os.sep
_OUTER = (sysconfig.get_path("stdlib"), "<frozen", "uvloop", _AIOSHARD, _ANYIO)
"""Beginnings of the files whose frames lie around a handler."""
_INSTALLED = ("/site-packages/", "/dist-packages/")
LOOP_MODULES = ("asyncio.base_events", "asyncio.events", "selectors")
"""Modules of an event loop's own frames."""
_WAITING = (
    ("asyncio.tasks", "wait_for"),
    ("asyncio.tasks", "_wait"),
    ("asyncio.taskgroups", "__aexit__"),
    ("asyncio.taskgroups", "_aexit"),  # since 3.12.8 and 3.13.1
    ("anyio._backends._asyncio", "__aexit__"),
)
"""Functions whose local variables name the tasks that they wait for; no other variables are read.

`asyncio.capture_call_graph` of Python 3.14 cannot replace this. It leads from a task to the tasks that wait for it, and
we need the opposite direction. It also knows tasks only, and the task of a worker outlives the run that is read.
"""
_LONGEST = 64
"""Maximum number of frames of one stack."""
_DEEPEST = 4
"""Maximum number of levels of tasks awaiting tasks in `waits_for`."""
_GENERATORS: dict[type, Callable[[Any], tuple[FrameType | None, object]]] = {
    CoroutineType: lambda one: (one.cr_frame, None if one.cr_running else one.cr_await),
    GeneratorType: lambda one: (one.gi_frame, None if one.gi_running else one.gi_yieldfrom),
    AsyncGeneratorType: lambda one: (one.ag_frame, _inside(one)),
}
"""Return the frame, and what it awaits.

Before CPython 3.13, reading the awaitable of a frame that is executing may follow an invalid pointer and crash the
process: CPython guesses the next instruction from bytes that may be a counter. No other thread runs between the two
attributes. An asynchronous generator does not say whether it is executing.
"""
_WRAPPERS = ("async_generator_asend", "async_generator_athrow", "coroutine_wrapper", "anext_awaitable", "FutureIter")
"""Objects between a coroutine and its awaitable that do not expose it; the garbage collector knows it."""
_NOWHERE = Stack(frames=(), place=None, waits_in=None, executing=False, thread=None)


class ThreadRun:
    """Identifies the thread that runs a handler; `attempts._in_thread` holds one in a local variable meanwhile."""

    ident: int | None = None


def stack_of(awaited: object) -> Stack:
    """Return the stack of a coroutine or task.

    It includes the task that its innermost call awaits, unless there are several, and the thread of a plain handler.

    Args:
        awaited: The awaitable of a worker; None has no frames.

    Returns:
        The stack; it has no frames if nothing could be found out.
    """
    return _read(lambda: _stack_of(awaited), _NOWHERE)


def waits_for(awaited: object, task: "asyncio.Task[Any]") -> bool:
    """Return whether an awaitable waits, directly or indirectly, for a task.

    A task that was started but is not awaited yet does not count.
    """
    return _read(lambda: _waits_for(awaited, task, _DEEPEST), otherwise=False)


def stack_above(thread: int | None, runner: FrameType | None) -> Stack:
    """Return the stack of a thread above the frame that runs its event loop.

    Args:
        thread: Identifier of the thread; None has no frames.
        runner: That frame; None for the whole stack.

    Returns:
        The stack; it has no frames if the event loop is idle.
    """

    def read() -> Stack:
        above = list(itertools.takewhile(lambda frame: frame is not runner, _frames_of(thread)))[::-1]
        return _stack(list(itertools.dropwhile(lambda frame: module_of(frame) in LOOP_MODULES, above)), executing=True)

    return _read(read, _NOWHERE)


def waiting_place(awaited: object) -> str:
    """Return where an awaitable is suspended: `file:line in function` of each frame, innermost last."""
    frames = [(Path(frame.f_code.co_filename), frame) for frame in _walk(awaited).frames]
    names = (f"{file.parent.name}/{file.name}:{frame.f_lineno} in {frame.f_code.co_name}" for file, frame in frames)
    return " > ".join(names) or "an unknown place"


def module_of(frame: FrameType) -> str:
    """Return the name of a frame's module."""
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else "?"


# Reading ----------------------------------------------------------------------------------

_READING = threading.RLock()
"""Held while frames are read: the reader has disabled the garbage collector of the whole process."""
if sys.platform != "win32":
    # A child forked in the middle of that would have no garbage collector, and would never get the lock.
    os.register_at_fork(before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release)


def _read(read: Callable[[], T], otherwise: T) -> T:
    """Read frames; return *otherwise* if they changed meanwhile, or are of an unknown kind.

    The garbage collector does not run meanwhile. CPython 3.11 creates a frame's object on first access, and may collect
    garbage while doing so. Finalizers then let other threads run, so the frame may end before its object exists. The
    object then refers to memory that has been reused, and the process crashes, right there or much later.
    """
    with _READING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return read()
        except Exception:  # noqa: BLE001 - they are read from any thread
            return otherwise
        finally:
            if collects:
                gc.enable()


# Coroutines and tasks -----------------------------------------------------------------------


class _Walk(NamedTuple):
    """Result of following a chain of awaits."""

    frames: list[FrameType]
    """Outermost first."""
    future: "asyncio.Future[Any] | None"
    """Future that the last frame waits for."""
    executing: bool = False
    """Whether the last frame was executing at that moment."""


def _walk(awaited: object) -> _Walk:
    if _is_task(awaited):
        awaited = awaited.get_coro()
    frames: list[FrameType] = []
    for _ in range(2 * _LONGEST):
        if awaited is None or _is_future(awaited):
            break
        if (read := _GENERATORS.get(type(awaited))) is None:
            awaited = _inside(awaited)
            continue
        frame, awaited = read(awaited)
        if frame is not None:
            frames.append(frame)
            if awaited is None and (called := _called_from(frame)) is not None:
                return _Walk(frames + called, None, executing=True)
    return _Walk(frames, awaited if _is_future(awaited) else None)


def _inside(wrapper: object) -> object:
    """Return the awaitable in an object that does not expose it: the last one that the garbage collector knows."""
    for referent in reversed(gc.get_referents(wrapper)):
        kind = type(referent)
        if kind in _GENERATORS or kind.__name__ in _WRAPPERS or _is_future(referent):
            return referent
    return None


def _called_from(frame: FrameType) -> list[FrameType] | None:
    """Return the frames that *frame* has called, innermost last; None if no thread executes it now."""
    for thread in tuple(sys._current_frames()):  # noqa: SLF001 - documented despite its name
        stack = _frames_of(thread)
        if frame in stack:
            return stack[: stack.index(frame)][::-1]
    return None


def _stack_of(awaited: object) -> Stack:
    frames: list[FrameType] = []
    while True:
        walk = _walk(awaited)
        if (thread := _thread_of(walk)) is not None:
            return _stack_of_thread(thread)
        frames += walk.frames
        tasks = _awaited_tasks(walk)
        if len(tasks) != 1 or not walk.frames or len(frames) >= _LONGEST:
            return _stack(frames, future=walk.future, executing=walk.executing)
        awaited = tasks[0]


def _waits_for(awaited: object, task: "asyncio.Task[Any]", levels: int) -> bool:
    walk = _walk(awaited)
    if walk.executing:
        # An eager task (Python 3.12) begins inside the call that creates it.
        begun = _walk(task).frames[:1]
        return any(frame in walk.frames for frame in begun)
    tasks = _awaited_tasks(walk)
    return task in tasks or (levels > 0 and any(_waits_for(other, task, levels - 1) for other in tasks))


def _awaited_tasks(walk: _Walk) -> "list[asyncio.Task[Any]]":
    """Return the unfinished tasks that a run waits for: one task, or those of `gather`, `wait`, `wait_for`, a group."""
    future = walk.future
    found: list[object] = [future]
    for frame in walk.frames[-1:]:
        if future is not None and (module_of(frame), frame.f_code.co_name) in _WAITING:
            names = frame.f_locals
            found += (names.get("fut"), *(names.get("fs") or ()), *getattr(names.get("self"), "_tasks", ()))
    for gathering in [other for other in found if type(other).__module__ == "asyncio.tasks"]:
        found += getattr(gathering, "_children", ())
    return [task for task in found if _is_task(task) and not task.done()]


def _is_future(awaited: object) -> TypeGuard["asyncio.Future[Any]"]:
    # Not `isinstance`, which may run an application's `__class__` property.
    return issubclass(type(awaited), asyncio.Future)


def _is_task(awaited: object) -> TypeGuard["asyncio.Task[Any]"]:
    return issubclass(type(awaited), asyncio.Task)


# Threads --------------------------------------------------------------------------------------


def _thread_of(walk: _Walk) -> int | None:
    """Return the thread that runs the handler for one of our coroutines."""
    for frame in walk.frames:
        if frame.f_code.co_name == "_in_thread" and frame.f_code.co_filename.startswith(_AIOSHARD):
            for value in tuple(frame.f_locals.values()):
                if type(value) is ThreadRun and value.ident is not None:
                    return value.ident
    return None


def _frames_of(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, innermost first."""
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001 - documented despite its name
    return [] if frame is None else [outer for outer, _ in traceback.walk_stack(frame)]


def _stack_of_thread(thread: int) -> Stack:
    frames = _frames_of(thread)[::-1]
    inner = list(itertools.dropwhile(lambda frame: frame.f_code.co_filename.startswith(_OUTER), frames))
    name = next((known.name for known in threading.enumerate() if known.ident == thread), str(thread))
    return _stack(inner, executing=True, thread=name)


# Frames ---------------------------------------------------------------------------------------


def _stack(
    frames: Sequence[FrameType],
    *,
    future: "asyncio.Future[Any] | None" = None,
    executing: bool,
    thread: str | None = None,
) -> Stack:
    """Describe frames; the place is the application's innermost call, or the handler itself if it is installed."""
    frames = frames[-_LONGEST:]
    described = [_describe(frame) for frame in frames]
    numbers = range(len(described))
    own = [number for number in numbers if described[number].own]
    handler = [number for number in numbers if not described[number].file.startswith(_OUTER)]
    at = own[-1] if own else handler[0] if handler else len(described) - 1
    waits_in = None if future is None else f"{type(future).__module__.lstrip('_')}.{type(future).__qualname__}"
    if at + 1 < len(described):
        waits_in = f"{module_of(frames[at + 1])}.{described[at + 1].function}"
    return Stack(
        frames=tuple(described),
        place=described[at] if described else None,
        waits_in=waits_in,
        executing=executing and bool(described),
        thread=thread,
    )


def _describe(frame: FrameType) -> Frame:
    code = frame.f_code
    return Frame(
        file=code.co_filename,
        line=frame.f_lineno or code.co_firstlineno,
        function=code.co_qualname.replace("<locals>.", ""),
        own=not _is_library(code.co_filename),
    )


@functools.lru_cache(maxsize=1_000)
def _is_library(file: str) -> bool:
    """Return whether a file belongs to the standard library, an installed package or aioshard."""
    return file.startswith(_OUTER) or any(place in file.replace(os.sep, "/") for place in _INSTALLED)
