"""Calls whose coroutine a handler must await: a run that drops one fails, because nothing of the call has happened."""

import asyncio
import dis
import sys
from types import CodeType
from typing import Final

from aioshard.engine.worker import SERVING
from aioshard.errors import HandlerError


class AwaitedCall:
    """An argument of a coroutine that notices when the coroutine is dropped before it has begun.

    A coroutine that never begins releases its arguments unused, so `__del__` runs where the mistake is made.
    """

    __slots__ = ("_code", "_delivery", "_function", "_instruction", "_starts", "_topic", "_worker")

    def __init__(self, function: str, topic: str, depth: int = 2) -> None:
        """Remember the calling code and the run that it belongs to.

        One is made per message, so it remembers only values that are cheap to get; `__del__` finds the rest.

        Args:
            function: The called function, for the error, such as `context.publish`.
            topic: Its first argument.
            depth: Number of frames up to the calling code.
        """
        worker = SERVING.get(None)
        delivery = None if worker is None else worker.delivery  # read once: in a thread, the run may end meanwhile
        self._worker = None if delivery is None else worker
        if delivery is None:
            return
        self._delivery: Final = delivery
        self._starts: Final = delivery.starts
        self._function: Final = function
        self._topic: Final = topic
        frame = sys._getframe(depth)  # noqa: SLF001 - documented, and a hundred times cheaper than `inspect`
        self._code: Final = frame.f_code
        self._instruction: Final = frame.f_lasti

    def begin(self) -> None:
        """Note that the coroutine runs."""
        self._worker = None

    def __del__(self) -> None:
        worker = self._worker
        if worker is None:
            return
        loop = worker.task.get_loop()
        if loop.is_closed():
            return
        delivery = self._delivery
        error = HandlerError(
            f"{self._function}({self._topic!r}) was called at {self._code.co_filename}:"
            f"{_line_of(self._code, self._instruction)} and never ran, so nothing was published: await it in an "
            "'async def', and do not cancel its task before it begins"
        )
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # a plain handler in its thread
            here = None
        if here is loop:
            worker.refuse(delivery, self._starts, error)
        else:
            # It arrives before the end of the thread, which is announced in the same way.
            loop.call_soon_threadsafe(worker.refuse, delivery, self._starts, error)


def _line_of(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction, as `frame.f_lineno` does."""
    lines = [line for start, line in dis.findlinestarts(code) if start <= instruction and line is not None]
    return lines[-1] if lines else code.co_firstlineno
