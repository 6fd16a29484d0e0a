"""A run counts what its action has done, left and failed for, also if the action then raises an error."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, cast

import pytest

from aioshard.dead_letters.dead_letter import Position
from aioshard.dead_letters.filters import EVERYTHING
from aioshard.dead_letters.finishing import Finish
from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.plan import make_plan
from aioshard.dead_letters.replaying import Preview, Replay, preview
from aioshard.dead_letters.results import Chunk
from aioshard.errors import TransportError
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.settings import Settings
from tests.support.dead_letters import dead_letters_in_memory, failure, record

NUMBERS = range(6)


class LedgerInMemory:
    """Stores positions in a list."""

    def __init__(self) -> None:
        self.stored: list[Position] = []

    async def store(self, done: Collection[Position], messages: Sequence[Message] = ()) -> None:
        assert not messages
        self.stored += done

    async def copy(self) -> None:
        pass


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> LedgerInMemory:
    made = LedgerInMemory()

    @contextlib.asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[LedgerInMemory]:
        yield made

    monkeypatch.setattr(Ledger, "opened", opened)
    return made


class FinishAndFail(Finish):
    """Marks the first item of a chunk as done and the second one as failed, and then raises an error."""

    async def apply(self, chunk: Chunk, ledger: Ledger) -> None:
        await super().apply(chunk, ledger)
        del chunk.done[1:]
        chunk.fail(chunk.items[1], "no such customer")
        raise TransportError("the coordinator does not answer")


def fix(original: Record) -> bytes | None:
    """Change records 0 to 2, leave 3 alone, and fail for the others."""
    if original.offset > 3:
        raise KeyError("currency")
    return None if original.offset == 3 else b"fixed"


async def replay_with(action: Finish, transform: Any = None) -> tuple[Replay, Exception | None]:
    topic, _ = dead_letters_in_memory("orders.dlt", {0: [(number, record(number), failure()) for number in NUMBERS]})
    plan = await make_plan(topic, EVERYTHING)
    replay = Replay(topic, plan, action, who="user test", transform=transform, stop=asyncio.Event())
    try:
        await replay.run(cast("Settings", None))
    except TransportError as error:
        return replay, error
    return replay, None


def test_every_record_has_one_outcome(ledger: LedgerInMemory) -> None:
    replay, _ = asyncio.run(replay_with(Finish(), fix))

    result = replay.result
    assert (result.done, result.edited, result.left_alone) == ({"orders": 3}, 3, 1)
    assert [failed.dead_letter.original.offset for failed in result.failed] == [4, 5]
    assert {failed.dead_letter.original.value for failed in result.failed} == {None}
    assert result.total() == len(NUMBERS)
    assert ledger.stored == [(0, 0), (0, 1), (0, 2)]


def test_a_run_that_is_cut_short_has_counted_what_was_done(
    ledger: LedgerInMemory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aioshard.web.audit")

    replay, error = asyncio.run(replay_with(FinishAndFail()))

    assert error is not None
    assert ledger.stored != []
    assert replay.result.done == {"orders": 1}
    assert [failed.reason for failed in replay.result.failed] == ["no such customer"]
    assert [line.split(" by ")[0] for line in caplog.messages] == [
        'finish topic="orders.dlt" records="0/0-5"',
        'finish topic="orders.dlt" records="0/0"',
    ]


def test_a_preview_counts_and_stores_nothing(ledger: LedgerInMemory) -> None:
    async def test() -> Preview:
        made = [(number, record(number), failure()) for number in NUMBERS]
        topic, _ = dead_letters_in_memory("orders.dlt", {0: made})
        return await preview(topic, await make_plan(topic, EVERYTHING), fix)

    changed, left_alone, failed = asyncio.run(test())

    assert (changed, left_alone, len(failed)) == (3, 1, 2)
    assert ledger.stored == []
