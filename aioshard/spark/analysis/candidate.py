"""A configuration that is asked about: what a run would have been with it."""

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from aioshard.errors import SettingsError

__all__ = ["Candidate"]

_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration of a handler and of its group; what is None is as it was recorded.

    Attributes:
        shards: Number of fixed shards; 0 is shards on demand.
        concurrency: Workers of a handler with shards on demand; a fixed shard has one of its own.
        max_buffered_records: Bound of one member's memory.
        partitions: Of each topic.
        members: Of the group; each has the handler, and a bound, of its own.
        dies_at: Seconds after the start at which one member dies; None where none does.
        takeover: Who gets its partitions: `neighbour` gives all of them to one member, as range does, `spread`
            deals them out, `standby` gives them to a member that had none.
        session_timeout: Seconds after its death until its partitions are given to others.

    Raises:
        SettingsError: A value makes no sense.

    Example:
        >>> Candidate(shards=0, concurrency=128).label
        'on demand, concurrency 128'
        >>> Candidate.parse("shards=64,members=3").label
        '64 fixed shards, 3 members'
    """

    shards: int | None = None
    concurrency: int | None = None
    max_buffered_records: int | None = None
    partitions: int | None = None
    members: int = 1
    dies_at: float | None = None
    takeover: str = "spread"
    session_timeout: float = 45.0

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_buffered_records", "partitions", "members"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{name}={value}: at least 1 was expected")
        if self.shards is not None and self.shards < 0:
            raise SettingsError(f"shards={self.shards}: a positive number, or 0 for shards on demand, was expected")
        if self.shards and self.concurrency is not None:
            raise SettingsError(
                f"shards={self.shards} and concurrency={self.concurrency}: a fixed shard has one worker; leave out one"
            )
        if self.takeover not in {"neighbour", "spread", "standby"}:
            raise SettingsError(f"takeover={self.takeover!r}: 'neighbour', 'spread' or 'standby' was expected")
        if self.dies_at is not None and self.members == 1 and self.takeover != "standby":
            raise SettingsError("dies_at with members=1: nobody is left; say members=2 or more, or takeover=standby")

    @classmethod
    def parse(cls, text: str) -> Self:
        """A candidate as the command line takes it: `name=value`, parted by commas.

        Raises:
            SettingsError: A name is not known, or a value is none.

        Example:
            >>> Candidate.parse("concurrency=32,dies_at=1.5,members=2").dies_at
            1.5
        """
        types: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, given, value = (piece.strip() for piece in part.partition("="))
            name = name.replace("-", "_")
            if name not in types or not given:
                raise SettingsError(f"{part!r} in {text!r}: NAME=VALUE was expected, NAME one of {', '.join(types)}")
            if name == "takeover":
                values[name] = value
            elif name == "shards" and value.replace("-", " ") == "on demand":
                values[name] = 0
            elif _NUMBER.fullmatch(value) and ("." not in value or "float" in str(types[name])):
                values[name] = float(value) if "float" in str(types[name]) else int(value)
            else:
                raise SettingsError(f"{part!r} in {text!r}: a number was expected")
        return cls(**values)

    def as_recorded(self, *, shards: int | None, concurrency: int | None, max_buffered_records: int) -> Self:
        """The same with what the journal says in place of what is left open; None for *shards* is on demand.

        Raises:
            SettingsError: The journal does not say how many workers a handler with shards on demand had.
        """
        chosen = self.shards
        if chosen is None:
            chosen = 0 if self.concurrency is not None else (shards or 0)
        workers = None if chosen else (self.concurrency or concurrency)
        if not chosen and workers is None:
            raise SettingsError(
                "the journal does not say how many workers the handler had: give concurrency=N with the candidate"
            )
        bound = self.max_buffered_records or max_buffered_records
        return replace(self, shards=chosen, concurrency=workers, max_buffered_records=bound)

    @property
    def workers(self) -> int:
        """How many records one member runs at once, at most."""
        return self.shards or self.concurrency or 0

    @property
    def label(self) -> str:
        """The candidate in words."""
        parts: list[str] = []
        if self.shards:
            parts.append(f"{self.shards} fixed shards")
        elif self.shards == 0 or self.concurrency is not None:
            parts.append("on demand")
        if self.concurrency is not None:
            parts.append(f"concurrency {self.concurrency}")
        if self.partitions is not None:
            parts.append(f"{self.partitions} partitions")
        if self.members > 1 or self.dies_at is not None:
            parts.append(f"{self.members} member{'s' if self.members > 1 else ''}")
        if self.dies_at is not None:
            parts.append(f"one dies after {self.dies_at:g} s, {self.takeover}")
        return ", ".join(parts) or "as recorded"
