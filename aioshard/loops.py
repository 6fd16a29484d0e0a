"""Choose the event loop where the choice is ours."""

import asyncio
from collections.abc import Callable

__all__ = ["in_real_time", "loop_factory"]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of event loops: uvloop if it is installed, otherwise asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not available on Windows
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def in_real_time(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether an event loop uses the machine's clock rather than the virtual one of the test kit."""
    return not getattr(loop, "virtual_time", False)
