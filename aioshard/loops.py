"""Which event loop the package runs in where the choice is ours."""

import asyncio
from collections.abc import Callable

__all__ = ["in_real_time", "loop_factory"]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes event loops: uvloop where it is installed, else asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not there on Windows
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def in_real_time(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the clock of a loop is that of the machine, and not the virtual one of the test kit."""
    return not getattr(loop, "virtual_time", False)
