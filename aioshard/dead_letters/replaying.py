"""One run over the dead letters of a topic: read again, edited, and sent, processed or marked as done in chunks."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from aioshard.app import App
from aioshard.dead_letters.audit import audit, places_as_text
from aioshard.dead_letters.edits import Transform, edited, why_failed
from aioshard.dead_letters.filters import EVERYTHING
from aioshard.dead_letters.finishing import AsDone
from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.plan import Plan
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.dead_letters.results import Result, Work
from aioshard.dead_letters.runs import ThroughHandlers
from aioshard.dead_letters.sending import ToTopic
from aioshard.ports import record_size
from aioshard.records import counted
from aioshard.serde.side_records import Coordinates
from aioshard.settings import Settings


class SendBack(NamedTuple):
    """Their records are sent back to their topics."""

    keep_time: bool = False
    """Whether the records keep their timestamps; otherwise they get the current time."""


class Process(NamedTuple):
    """The handlers of an app run on them."""

    app: App
    """The app, not running."""


class Finish(NamedTuple):
    """They are done, and nothing else happens."""


How = SendBack | Process | Finish
"""The end of the dead letters of a run."""

Destination = ToTopic | ThroughHandlers | AsDone


def verb_of(how: How) -> str:
    """Return the verb for messages, as in: dead letters were sent back."""
    match how:
        case SendBack():
            return ToTopic.verb
        case Process():
            return ThroughHandlers.verb
        case Finish():
            return AsDone.verb


async def replay(
    settings: Settings,
    topic: DeadLetterTopic,
    plan: Plan,
    result: Result,
    *,
    who: str,
    how: How,
    transform: Transform | None = None,
    stop: asyncio.Event,
) -> None:
    """Take over from any other run, work on the dead letters of a plan, and write the audit log.

    Args:
        settings: The brokers.
        topic: The topic, with all partitions.
        plan: Its dead letters that are due.
        result: Receives how far the run has come, also if it fails.
        who: The operator, for the audit log.
        how: How they end: sent back, processed, or only marked as done.
        transform: Changes the records before.
        stop: Ends the run early, after the chunk that is in progress.

    Raises:
        TakenOverError: Another run has taken over.
        AioshardError: The run was cut short.
    """
    if not (plan.due or plan.covered):
        return
    async with Ledger.opened(settings, topic) as ledger:
        plan.adopt(topic)
        destination = _destination_of(how, topic, ledger, stop)
        try:
            await _finish_covered(plan, ledger, topic.name, who)
            await ledger.copy()
            async for chunk in _chunks(planned(topic, plan, transform, result), destination, stop):
                await _process(destination, chunk, result, topic.name, who)
                await ledger.copy()
        finally:
            result.stopped = stop.is_set()


def _destination_of(how: How, topic: DeadLetterTopic, ledger: Ledger, stop: asyncio.Event) -> Destination:
    match how:
        case SendBack(keep_time):
            return ToTopic(topic.administration, ledger, keep_time=keep_time)
        case Process(app):
            return ThroughHandlers(app, ledger, stop)
        case Finish():
            return AsDone(ledger)


async def preview(topic: DeadLetterTopic, plan: Plan, transform: Transform) -> Result:
    """Return how many dead letters of a plan a transform would change, and for which ones it fails.

    Raises:
        TransportError: The records cannot be read.
    """
    result = Result()
    async for item in planned(topic, plan, transform, result):
        result.finish([item])
    return result


async def _chunks(
    work: AsyncIterator[Work], destination: Destination, stop: asyncio.Event
) -> AsyncIterator[list[Work]]:
    """Yield dead letters that fit together, in the order of their records; nothing more once *stop* is set."""
    chunk: list[Work] = []
    size = 0
    async for item in work:
        if stop.is_set():
            return
        chunk.append(item)
        size += record_size(item.record.key, item.record.value, item.record.headers)
        if len(chunk) >= destination.most_records or size >= destination.most_bytes:
            yield sorted(chunk, key=_source_of)
            chunk = []
            size = 0
    if chunk and not stop.is_set():
        yield sorted(chunk, key=_source_of)


def _source_of(item: Work) -> Coordinates:
    return item.letter.source


async def planned(
    topic: DeadLetterTopic, plan: Plan, transform: Transform | None, result: Result
) -> AsyncIterator[Work]:
    """Read the dead letters of a plan again, and yield them as the transform changes them.

    Args:
        topic: The topic.
        plan: Its dead letters.
        transform: Changes the records; None leaves them as they are.
        result: Receives those that the transform leaves alone, or fails for.

    Raises:
        TransportError: The records cannot be read.
    """
    async for letter in topic.letters(EVERYTHING, *plan.bounds()):
        places = plan.due.get(letter.place)
        if places is None:
            continue
        item = await _edited(Work(letter, letter.original, places), transform, result)
        if item is not None:
            yield item


async def _finish_covered(plan: Plan, ledger: Ledger, topic: str, who: str) -> None:
    """Store that dead letters are done whose records were finished by others."""
    if plan.covered:
        sentence = f"{counted(len(plan.covered), 'dead letter')} to be done, because others of their records are"
        audit("finish", topic, places_as_text(plan.covered), who, sentence)
        await ledger.store(plan.covered)


async def _process(destination: Destination, chunk: list[Work], result: Result, topic: str, who: str) -> None:
    """Send or process dead letters.

    The audit log has them before anything changes: a process that is killed can write nothing more.
    """
    places = places_as_text(place for item in chunk for place in item.places)
    changed = sum(item.record is not item.letter.original for item in chunk)
    sentence = f"{counted(len(chunk), 'record')} to be {destination.verb}"
    if changed:
        sentence += f", {changed:,} of them edited"
    audit(destination.action, topic, places, who, sentence)
    before = result.done.total()
    result.places.clear()
    try:
        await destination.process(chunk, result)
    finally:
        done = result.done.total() - before
        if done < len(chunk):
            sentence = f"{done:,} of {counted(len(chunk), 'record')} {destination.verb}"
            audit(destination.action, topic, places_as_text(result.places), who, sentence)


async def _edited(item: Work, transform: Transform | None, result: Result) -> Work | None:
    """Return a dead letter as the transform changes it; None if it stays as it is, which *result* then knows."""
    if transform is None:
        return item
    try:
        record = await edited(item.record, transform)
    except Exception as error:  # noqa: BLE001 - the user's own function
        result.fail(item, why_failed(error))
        return None
    if record is None:
        result.left += 1
        return None
    return item._replace(record=record)
