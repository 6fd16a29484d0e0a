"""Waiting for a coroutine where nobody can await: also in a notebook, whose own event loop runs already."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["blocking"]

T = TypeVar("T")


def blocking(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end in an event loop of its own, in a thread of its own.

    Args:
        make: Makes the coroutine.

    Example:
        >>> async def answer() -> int:
        ...     return 42
        >>> blocking(answer)
        42
    """
    with concurrent.futures.ThreadPoolExecutor(1, "aioshard blocking") as pool:
        return pool.submit(lambda: asyncio.run(make())).result()
