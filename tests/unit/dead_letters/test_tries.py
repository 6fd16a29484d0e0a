"""A dry run runs handlers with their resources, and neither publishes nor commits anything."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aioshard import App, Batch, Context, DeadLetter, Record, Retry, message
from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.dead_letters.tries import Tried, try_dead_letters
from aioshard.errors import HandlerError
from aioshard.ports import Message
from aioshard.serde.side_records import Coordinates
from aioshard.testing import TestClient, run
from tests.support.dead_letters import failure, record


def letter(number: int, topic: str = "orders", **fields: Any) -> StoredDeadLetter:
    return StoredDeadLetter(
        Coordinates("orders.dlt", 0, number), record(number, topic=topic, **fields), failure(), done=False
    )


class Shop:
    """An app whose handlers publish in every way, and what they have seen."""

    def __init__(self, **settings: Any) -> None:
        self.opened = 0
        self.ran: list[tuple[str, int]] = []
        self.app = App("billing", resources=self.resources, **settings)
        self.app.consume("orders", retry=Retry(attempts=5), on_failure=DeadLetter("orders.dlt"), publish_to="returned")(
            self.on_order
        )
        self.app.consume("batches", batch=Batch(100, linger=5.0))(self.on_batch)
        self.app.consume("plain")(self.on_plain)

    @contextlib.asynccontextmanager
    async def resources(self, _: object) -> AsyncIterator[str]:
        self.opened += 1
        yield "the state"

    async def on_order(self, record: Record, context: Context[str]) -> Message:
        assert context.state == self.app.state == "the state"
        self.ran.append((record.topic, record.offset))
        await context.publish("by-context", record.value, key=b"k", headers={"a": "b"})
        await self.app.publish("by-app", record.value)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.app.publish("by-task", record.value))
        if record.value == b"bad":
            raise ValueError("bad")
        return message("returned", {"total": record.offset})

    async def on_batch(self, records: list[Record]) -> str:
        self.ran += [(record.topic, record.offset) for record in records]
        await self.app.publish("by-batch", records[0].value)
        return f"{len(records)} records"

    def on_plain(self, record: Record) -> str:
        self.ran.append((record.topic, record.offset))
        return threading.current_thread().name


def topics(tried: Tried) -> list[str]:
    return sorted(published.topic for published in tried.messages)


EVERYWHERE = ["by-app", "by-context", "by-task", "returned"]


def test_messages_are_collected_and_results_shown() -> None:
    shop = Shop()

    trial = run(try_dead_letters(shop.app, [letter(5), letter(3, value=b"x")]))

    first, second = trial.tried
    assert (first.dead_letter.source.offset, second.dead_letter.source.offset) == (3, 5)
    assert topics(first) == topics(second) == EVERYWHERE
    by_topic = {published.topic: published for published in first.messages}
    assert by_topic["by-context"] == Message("by-context", b"x", b"k", (("a", b"b"),))
    assert by_topic["returned"].value == b'{"total":3}'
    assert (first.error, first.left_alone, trial.unattributed) == (None, False, [])
    assert shop.opened == 1
    assert shop.app.settings.auto_offset_reset is None  # as before: the app itself may start now


def test_a_run_has_its_duration() -> None:
    app = App("billing")

    @app.consume("orders")
    async def on_order(_: Record) -> None:
        await asyncio.sleep(0.02)

    (tried,) = run(try_dead_letters(app, [letter(1)])).tried

    assert tried.seconds is not None
    assert tried.seconds > 0


def test_a_failed_run_is_not_repeated_and_does_not_hold_back_its_key() -> None:
    shop = Shop()

    trial = run(try_dead_letters(shop.app, [letter(1, value=b"bad"), letter(2)]))

    assert [tried.error for tried in trial.tried] == ["ValueError: bad", None]
    assert topics(trial.tried[0]) == ["by-app", "by-context", "by-task"]
    assert shop.ran == [("orders", 1), ("orders", 2)]


def test_batches_and_plain_functions_have_a_result_for_each_record() -> None:
    shop = Shop()

    trial = run(try_dead_letters(shop.app, [letter(1, "batches"), letter(2, "batches"), letter(3, "plain")]))

    assert [tried.result for tried in trial.tried[:2]] == ["1 records", "1 records"]
    assert [topics(tried) for tried in trial.tried] == [["by-batch"], ["by-batch"], []]
    assert trial.tried[2].result != threading.current_thread().name


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_a_running_app_is_not_disturbed(guarantee: str) -> None:
    """Its resources are used, and its own records are published and committed as ever, at the same time."""
    shop = Shop(processing_guarantee=guarantee)

    async def test() -> None:
        async with TestClient(shop.app) as client:
            await client.publish("orders", b"live", partition=0)
            trial, _ = await asyncio.gather(try_dead_letters(shop.app, [letter(7)]), client.settle())

            assert [topics(tried) for tried in trial.tried] == [EVERYWHERE]
            assert trial.unattributed == []
            for topic in EVERYWHERE:
                published = [found.value for found in client.records(topic)]
                assert published == [b'{"total":0}' if topic == "returned" else b"live"]
            assert client.committed("orders", 0) == 1
            assert shop.app.statistics().state == "running"

            await client.publish("orders", b"later", partition=0)
            await client.settle()
            assert [found.value for found in client.records("by-app")] == [b"live", b"later"]

    run(test())
    assert shop.opened == 1


def test_records_of_a_topic_that_was_created_again_all_run() -> None:
    shop = Shop()

    trial = run(try_dead_letters(shop.app, [letter(1, value=b"a"), letter(1, value=b"b")]))

    assert sorted(tried.record.value or b"" for tried in trial.tried) == [b"a", b"b"]


def test_a_transform_changes_leaves_or_fails() -> None:
    shop = Shop()

    def fix(original: Record) -> bytes | None:
        if original.offset == 1:
            return b"fixed"
        if original.offset == 2:
            return None
        raise KeyError("currency")

    trial = run(try_dead_letters(shop.app, [letter(1), letter(2), letter(3)], transform=fix))

    changed, left, failed = trial.tried
    assert (changed.record.value, changed.error, changed.left_alone) == (b"fixed", None, False)
    assert (left.error, left.left_alone, left.messages, left.seconds) == (None, True, (), None)
    assert failed.error == "the transform failed: KeyError: 'currency'"
    assert shop.ran == [("orders", 1)]
    assert changed.as_object()["edited"] is True


@pytest.mark.parametrize("transform", [None, lambda _: message("elsewhere", b"")])
def test_nothing_runs_if_a_dead_letter_has_no_handler(transform: Any) -> None:
    shop = Shop()
    letters = [letter(1), letter(2, "unknown" if transform is None else "orders")]

    with pytest.raises(HandlerError):
        run(try_dead_letters(shop.app, letters, transform=transform))

    assert shop.ran == []


def test_a_hidden_payload_is_not_in_the_result() -> None:
    shop = Shop()
    trial = run(try_dead_letters(shop.app, [letter(1, value=b"bad")]))

    shown = trial.tried[0].as_object(payload=False)

    assert (shown["error"], shown["messages"], shown["succeeded"]) == ("ValueError", 3, False)
    assert "bad" not in repr(shown)
    assert {published["topic"] for published in trial.tried[0].as_object()["messages"]} == set(EVERYWHERE[:3])


def test_a_stop_leaves_the_rest_out() -> None:
    shop = Shop()

    async def test() -> None:
        stop = asyncio.Event()
        stop.set()
        assert (await try_dead_letters(shop.app, [letter(1)], stop=stop)).tried == []

    run(test())
    assert shop.ran == []
