"""Threads that query continuously while the event loop changes the data."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Self


class Queries:
    """Asks without pause, from a thread for each question."""

    def __init__(self, *queries: Callable[[], object]) -> None:
        self.asked = Counter[int]()
        self.failures: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=query) for query in enumerate(queries)]

    def _ask(self, index: int, question: Callable[[], object]) -> None:
        while not self._over.is_set():
            try:
                question()
            except BaseException as error:  # noqa: BLE001 - shown by the test
                self.failures.append(error)
            self.asked[index] += 1

    async def __aenter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
