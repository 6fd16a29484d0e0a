"""Values that are requested once each, whoever waits for them, and how often they are requested again."""

import asyncio
from collections import Counter
from typing import Any

from aioshard.errors import RegistryUnavailableError
from aioshard.schema_registry.client import Loaded, UnusableSchemaError


class Registry:
    """Answers once `answer` is set."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def request(self, key: int) -> str:
        self.requests[key] += 1
        return await asyncio.shield(self.answer)


async def waiting(loaded: Loaded[int, str], count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(loaded.wait(1)) for _ in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_all_waiters_share_one_request() -> None:
    registry = Registry()
    loaded = Loaded(registry.request)
    tasks = await waiting(loaded, 5)
    registry.answer.set_result("schema")
    await asyncio.gather(*tasks)

    assert registry.requests == {1: 1}
    assert loaded.known == {1: "schema"}


async def test_a_waiter_that_is_cancelled_passes_its_request_on() -> None:
    registry = Registry()
    loaded = Loaded(registry.request)
    first, *others = await waiting(loaded, 3)
    first.cancel()
    await asyncio.wait([first])
    registry.answer.set_result("schema")
    await asyncio.gather(*others)

    assert first.cancelled()
    assert registry.requests == {1: 2}
    assert loaded.known == {1: "schema"}


async def test_a_waiter_that_does_not_request_does_not_end_the_request() -> None:
    registry = Registry()
    loaded = Loaded(registry.request)
    first, second, third = await waiting(loaded, 3)
    second.cancel()
    await asyncio.wait([second])
    registry.answer.set_result("schema")
    await asyncio.gather(first, third)

    assert registry.requests == {1: 1}


async def test_a_failure_reaches_all_waiters_and_is_not_remembered() -> None:
    registry = Registry()
    loaded = Loaded(registry.request)
    tasks = await waiting(loaded, 3)
    registry.answer.set_exception(RegistryUnavailableError("no answer"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    registry.answer = asyncio.get_running_loop().create_future()
    registry.answer.set_result("schema")
    await loaded.wait(1)

    assert [type(result) for result in results] == [RegistryUnavailableError] * 3
    assert registry.requests == {1: 2}


async def test_a_missing_schema_is_requested_again_after_a_while() -> None:
    now = 100.0
    registry = Registry()
    loaded = Loaded(registry.request, clock=lambda: now)
    registry.answer.set_exception(UnusableSchemaError("it is not there"))
    await loaded.wait(1)
    await loaded.wait(1)

    assert registry.requests == {1: 1}
    assert loaded.why_unusable(1) == "it is not there"

    now += 10.0
    registry.answer = asyncio.get_running_loop().create_future()
    registry.answer.set_result("schema")

    assert loaded.why_unusable(1) is None
    await loaded.wait(1)
    assert loaded.known == {1: "schema"}


async def test_missing_schemas_do_not_fill_the_memory() -> None:
    async def missing(key: int) -> str:
        raise UnusableSchemaError(str(key))

    loaded: Loaded[int, Any] = Loaded(missing)
    for key in range(5_000):
        await loaded.wait(key)

    assert sum(loaded.is_decided(key) for key in range(5_000)) <= 1_000
