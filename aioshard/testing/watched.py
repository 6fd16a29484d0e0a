"""Notify watchers of changes."""

import asyncio
from collections.abc import Callable

__all__ = ["Watched"]


class Watched:
    """Calls its watchers after every change, in the same step.

    Example:
        >>> thing = Watched()
        >>> unwatch = thing.watch(lambda: print("changed"))
        >>> thing.notify()
        changed
        >>> unwatch()
        >>> thing.notify()
    """

    def __init__(self) -> None:
        self._watchers: dict[int, Callable[[], None]] = {}
        self._watched = 0

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call *changed* after every change; call the returned function to stop that."""
        self._watched += 1
        number = self._watched
        self._watchers[number] = changed

        def unwatch() -> None:
            self._watchers.pop(number, None)

        return unwatch

    def notify(self) -> None:
        """Notify all watchers of a change."""
        for changed in tuple(self._watchers.values()):
            changed()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until *condition* holds; it is checked after every change."""
        changed = asyncio.Event()
        unwatch = self.watch(changed.set)
        try:
            while not condition():
                changed.clear()
                await changed.wait()
        finally:
            unwatch()
