"""What a handler may know beside its record."""

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
    """A context whose handler may publish."""

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
        """As `App.publish`: returns the offset when the brokers have acknowledged.

        Nothing that the handler was given is complete before it returns, so what it has published is there when the
        offsets of that are committed. After a crash it may be there twice.

        Raises:
            TransportError: Not acknowledged.
        """
        return await self.publisher(message(topic, value, key=key, headers=headers, partition=partition))


@dataclasses.dataclass(frozen=True, slots=True)
class Context(_Publishes):
    """What a handler may know beside the record: declare it as the second parameter.

    Example:
        >>> async def on_order(record: Record, context: Context) -> None:
        ...     if context.attempt > 1:
        ...         print("again:", context.idempotency_key)
    """

    record: Record
    attempt: int
    """Counted from 1."""
    deadline: float | None
    """Loop time at which the attempt times out; None without a time-out."""
    revoked: asyncio.Event
    """Set when the partition is being taken away: end soon, or the run is cancelled."""
    replay: bool
    """True where history is processed on Spark."""
    state: Any
    """What the app's `resources` yielded; None without."""
    publisher: Publish = dataclasses.field(default=_no_app, repr=False)
    """Where `publish` goes."""

    @property
    def idempotency_key(self) -> str:
        """`topic/partition/offset`: the same for every delivery of the record."""
        return f"{self.record.topic}/{self.record.partition}/{self.record.offset}"


@dataclasses.dataclass(frozen=True, slots=True)
class BatchContext(_Publishes):
    """What a batch handler may know beside its records: declare it as the second parameter.

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
    """Loop time at which the attempt times out; None without a time-out."""
    revoked: asyncio.Event
    """Set when a partition of one of the records is being taken away: end soon, or the run is cancelled."""
    replay: bool
    """True where history is processed on Spark."""
    state: Any
    """What the app's `resources` yielded; None without."""
    publisher: Publish = dataclasses.field(default=_no_app, repr=False)
    """Where `publish` goes."""
    records: Sequence[Record] = ()
    """Those of the batch, in the order of what the handler was given: for keys, and to name what failed."""

    def idempotency_key(self, record: Record) -> str:
        """`topic/partition/offset` of a record: the same for every delivery of it, in whichever batch.

        A batch has none of its own: the next attempt may come with other records.
        """
        return f"{record.topic}/{record.partition}/{record.offset}"
