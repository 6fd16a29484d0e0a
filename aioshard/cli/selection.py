"""Which records of a side topic a command is about: its filters as options."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import click

from aioshard.cli.moments import parse_time
from aioshard.cli.tables import bytes_as_text
from aioshard.records import Record
from aioshard.serde.side_records import Coordinates, Failure

__all__ = ["Selection", "coordinates", "filters", "is_key"]

F = TypeVar("F", bound=Callable[..., Any])


def _since_epoch(text: str) -> float:
    return parse_time(text).timestamp()


def coordinates(text: str) -> Coordinates:
    """The record that an option names.

    Raises:
        BadParameter: *text* names none.
    """
    found = Coordinates.parse(text)
    if found is None:
        raise click.BadParameter(f"{text!r} was found, TOPIC/PARTITION/OFFSET was expected, such as orders/0/41")
    return found


class Selection(NamedTuple):
    """What all has to hold of a record; without any, every record is meant."""

    partitions: frozenset[int] = frozenset()
    """Of the side topic."""
    handler: str | None = None
    group: str | None = None
    error: str | None = None
    topic: str | None = None
    """Where the record came from."""
    key: str | None = None
    records: frozenset[Coordinates] = frozenset()
    since: float | None = None
    until: float | None = None

    def __bool__(self) -> bool:
        """Whether anything is left out."""
        return self != Selection()

    def takes(self, original: Record, failure: Failure) -> bool:
        """Whether a record is meant; that its partition of the side topic is, the reader sees to."""
        return (
            self.handler in {None, failure.handler}
            and self.group in {None, failure.group}
            and self.error in {None, failure.error}
            and self.topic in {None, original.topic}
            and (self.key is None or is_key(original.key, self.key))
            and (not self.records or Coordinates.of(original) in self.records)
            and (self.since is None or failure.failed_at >= self.since)
            and (self.until is None or failure.failed_at < self.until)
        )


def is_key(key: bytes | None, given: str) -> bool:
    """Whether *given* names a key: as its text, or as commands show it."""
    return key is not None and (key == given.encode("utf-8", "surrogateescape") or bytes_as_text(key) == given)


_OPTIONS = (
    click.option(
        "--partition", "partitions", type=click.IntRange(0), multiple=True, help="Partition of TOPIC; may be repeated."
    ),
    click.option("--handler", metavar="NAME", help="Handler that failed."),
    click.option("--group", metavar="ID", help="Consumer group whose handler failed."),
    click.option("--error", metavar="CLASS", help="Class of the exception."),
    click.option("--topic", "source", metavar="SOURCE", help="Topic that the record came from."),
    click.option("--key", metavar="KEY", help="Key of the record, as text or as shown."),
    click.option(
        "--record",
        "records",
        type=coordinates,
        metavar="TOPIC/PARTITION/OFFSET",
        multiple=True,
        help="Where the record came from; may be repeated.",
    ),
    click.option(
        "--since", type=_since_epoch, metavar="TIME", help="Failed at this time (UTC) or later; -6h is six hours ago."
    ),
    click.option("--until", type=_since_epoch, metavar="TIME", help="Failed before this time."),
)


def filters(command: F) -> F:
    """The options that make a `Selection`; the command gets it as `selection`."""

    @functools.wraps(command)
    def selecting(
        *arguments: Any,
        partitions: tuple[int, ...],
        handler: str | None,
        group: str | None,
        error: str | None,
        source: str | None,
        key: str | None,
        records: tuple[Coordinates, ...],
        since: float | None,
        until: float | None,
        **others: Any,
    ) -> Any:
        selection = Selection(
            partitions=frozenset(partitions),
            handler=handler,
            group=group,
            error=error,
            topic=source,
            key=key,
            records=frozenset(records),
            since=since,
            until=until,
        )
        return command(*arguments, selection=selection, **others)

    taken: Any = selecting
    for option in reversed(_OPTIONS):
        taken = option(taken)
    return cast("F", taken)
