"""Choose the event loop: uvloop if it is installed."""

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of event loops: uvloop if it is installed, otherwise asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not available on Windows
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
