"""The event loop and the garbage collector of a process that only runs an app."""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator

_COLLECT_AFTER = 5_000, 5, 5
"""Thresholds of the garbage collector. With the default first threshold (700 up to Python 3.12) and 1,000 records in
flight, it visits each record repeatedly until it is complete. Higher thresholds hardly save more CPU, and a hanging app
used up to 10 MiB more."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of event loops: uvloop if it is installed, otherwise asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not available on Windows
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


@contextlib.contextmanager
def tuned_gc() -> Iterator[None]:
    """Collect garbage less often while the context is open, and skip all objects that exist when it opens.

    Thresholds that are at least as high, or 0 because collection is off, stay unchanged.
    """
    thresholds = gc.get_threshold()
    frozen = gc.get_freeze_count()
    if 0 < thresholds[0] < _COLLECT_AFTER[0]:
        gc.set_threshold(*_COLLECT_AFTER)
    gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()
