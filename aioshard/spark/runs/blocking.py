"""Run a coroutine from synchronous code, also in a notebook whose own event loop is already running."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["blocking"]

T = TypeVar("T")


def blocking(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to completion in a new event loop on a separate thread.

    Args:
        make: Creates the coroutine.

    Example:
        >>> async def answer() -> int:
        ...     return 42
        >>> blocking(answer)
        42
    """
    with concurrent.futures.ThreadPoolExecutor(1, "aioshard blocking") as pool:
        return pool.submit(lambda: asyncio.run(make())).result()
