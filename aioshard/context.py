"""The context that a handler can receive in addition to its record."""

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from aioshard.engine.failing.recourse import Publish
from aioshard.errors import StateError
from aioshard.ports import Message
from aioshard.records import Record
from aioshard.serde.messages import message

__all__ = ["BatchContext", "Context"]


async def _no_app(outgoing: Message) -> int:
    raise StateError(
        f"a message for topic {outgoing.topic!r} was not published: this Context belongs to no running app"
    )


class _Publishes:
    """A context that lets its handler publish."""

    __slots__ = ()
    publisher: Publish

    async def publish(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | None = None,
        headers: Iterable[tuple[str, bytes | str | None]] = (),
        partition: int | None = None,
    ) -> int:
        """Publish as `App.publish` does; return the offset once the brokers have acknowledged.

        The handler's input is complete only after the handler has returned, so its messages are stored before the
        offsets of its input are committed. After a crash they may be published twice.

        Raises:
            TransportError: The message was not acknowledged.
        """
        return await self.publisher(message(topic, value, key=key, headers=headers, partition=partition))


@dataclasses.dataclass(frozen=True, slots=True)
class Context(_Publishes):
    """Information about an attempt: declare it as the handler's second parameter.

    Example:
        >>> async def on_order(record: Record, context: Context) -> None:
        ...     if context.attempt > 1:
        ...         print("again:", context.idempotency_key)
    """

    record: Record
    attempt: int
    """Counted from 1."""
    deadline: float | None
    """Event loop time at which the attempt times out; None without a timeout."""
    revoked: asyncio.Event
    """Set when the partition is being revoked: finish soon, or the run is cancelled."""
    replay: bool
    """True in a backfill on Spark."""
    state: Any
    """The value that the app's `resources` yielded; None without resources."""
    publisher: Publish = dataclasses.field(default=_no_app, repr=False)
    """Publishes the messages of `publish`."""

    @property
    def idempotency_key(self) -> str:
        """`topic/partition/offset`: the same for every delivery of the record."""
        return f"{self.record.topic}/{self.record.partition}/{self.record.offset}"


@dataclasses.dataclass(frozen=True, slots=True)
class BatchContext(_Publishes):
    """Information about an attempt of a batch: declare it as the batch handler's second parameter.

    Example:
        >>> async def on_numbers(numbers: list[int], context: BatchContext) -> None:
        ...     rows = [
        ...         (context.idempotency_key(record), number)
        ...         for record, number in zip(context.records, numbers, strict=True)
        ...     ]
    """

    attempt: int
    """Counted from 1; the same for all records of a batch."""
    deadline: float | None
    """Event loop time at which the attempt times out; None without a timeout."""
    revoked: asyncio.Event
    """Set when a partition of one of the records is being revoked: finish soon, or the run is cancelled."""
    replay: bool
    """True in a backfill on Spark."""
    state: Any
    """The value that the app's `resources` yielded; None without resources."""
    publisher: Publish = dataclasses.field(default=_no_app, repr=False)
    """Publishes the messages of `publish`."""
    records: Sequence[Record] = ()
    """The records of the batch, in the order of the handler's list: use them for keys, and in `BatchError`."""

    def idempotency_key(self, record: Record) -> str:
        """Return `topic/partition/offset` of a record: the same for every delivery, in any batch.

        A batch as a whole has no key: the next attempt may combine the record with others.
        """
        return f"{record.topic}/{record.partition}/{record.offset}"
