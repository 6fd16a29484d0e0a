"""The behavior of a member process in a scenario, chosen by the test."""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from aioshard import CircuitBreaker, DeadLetter, Park, ParkLater, Record
from aioshard.core.options import OnFailure

VARIABLE = "GUARANTEES_MEMBER"
"""Environment variable with the JSON of a `Behaviour`."""

HANG = b"hang"
"""Prefix of the value of a record on which a member hangs, if any."""

POISON = b"{not json"
"""Prefix of a value that cannot be decoded."""

BAD = b"bad"
"""Prefix of a key whose every attempt raises until it is healed."""

HANGING = b"hangs"
"""Prefix of a key whose every attempt hangs until it is cancelled, until it is healed."""

Policy = Any
"""`on_failure` as JSON has it: "halt", "skip", or what `dead_letter` and `parking` make; see `Behaviour.policy`."""


def dead_letter(topic: str, *, window: int | None = None) -> Policy:
    """`on_failure=DeadLetter(topic)`; with a circuit breaker where *window* is given, else without."""
    return {"dead letters": topic, "breaker": None if window is None else {"window": window}}


def parking(topic: str, *, delay: float, attempts: int | None = None) -> Policy:
    """`on_failure=Park(topic)`."""
    return {"parked": topic, "delay": delay, "attempts": attempts}


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """One member process.

    Attributes:
        directory: Where it reports, and where files tell it things: `release` ends every hanging run, `down` makes
            every run fail while it is there, `healed` heals every key and `healed-<key>` one.
        process: Its name in the reports.
        form: The handler: a coroutine with or without context, or a function in a thread or in a worker process.
        base: Seconds that every run takes.
        spread: Seconds that half of the runs take in addition, at most; see `duration`.
        hangs: How it hangs: until it is cancelled, or beyond (in a thread it always is beyond).
        hangs_on: Which records it hangs on.
        hangs_once: Share of the records whose first attempt in a process hangs until it is cancelled.
        fails_once: Share of the records whose first attempt in a process raises.
        parks_for: Seconds for which a record of a BAD key is parked instead of failing.
        report_intake: Whether each record is reported when the engine takes it in.
        explains: Whether its samples hold what `App.explain` says.
        on_failure: See `policy`.
        timeout: Of each attempt.
        retry: Arguments of `Retry`.
        shard_by: How the sharding function goes wrong for a record whose value is POISON.
        shards: Fixed shards instead of *concurrency*.
        shard_queue_size: Of these.
        output: Topic in which each record that is processed is published, under its coordinates as key.
        beside: Other handlers of the same app: what is different, *directory*, *topic* and more.
    """

    directory: str
    process: str
    group: str
    topic: str
    settings: Mapping[str, Any]
    form: Literal["context", "record", "thread", "process"] = "context"
    concurrency: int = 64
    base: float = 0.0
    spread: float = 0.0
    hangs: Literal["never", "until cancelled", "until released"] = "never"
    hangs_on: Literal["marked", "all"] = "marked"
    hangs_once: float = 0.0
    fails_once: float = 0.0
    parks_for: float | None = None
    report_intake: bool = False
    explains: bool = False
    on_failure: Policy = "halt"
    timeout: float | None = None
    retry: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shard_by: Literal["key", "raises", "cannot be hashed", "cannot be compared"] = "key"
    shards: int | None = None
    shard_queue_size: int | None = None
    output: str | None = None
    beside: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of `json`."""
        return cls(**json.loads(text))

    def json(self) -> str:
        """For the environment of the process."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def all(self) -> list[Self]:
        """That of each handler of the app."""
        return [self, *(dataclasses.replace(self, **{"beside": (), **other}) for other in self.beside)]

    @property
    def policy(self) -> OnFailure:
        """The handler's `on_failure`."""
        match self.on_failure:
            case {"dead letters": topic, "breaker": breaker}:
                return DeadLetter(topic, breaker=None if breaker is None else CircuitBreaker(**breaker))
            case {"parked": topic, "delay": delay, "attempts": attempts}:
                return Park(topic, delay=delay, attempts=attempts)
            case "halt":
                return "halt"
            case "skip":
                return "skip"
        raise ValueError(self.on_failure)

    def duration(self, record: Record) -> float:
        """Seconds for one record, the same in every run: half of the records take only *base*."""
        return self.base + self.spread * max(2 * _chance(record) - 1, 0.0)

    def hangs_at(self, record: Record) -> bool:
        """Whether the run of *record* hangs for as long as *hangs* says."""
        return self.hangs != "never" and (self.hangs_on == "all" or (record.value or b"").startswith(HANG))

    def hangs_until_cancelled(self, record: Record, attempt: int) -> bool:
        """Whether an attempt hangs until it has timed out."""
        if (record.key or b"").startswith(HANGING) and not self.healed(record.key):
            return True
        return self.hangs_once > 0 and attempt == 1 and _chance(record) * 1000 % 1 < self.hangs_once

    def fail(self, record: Record, attempt: int) -> None:
        """Raises for a record whose key is not healed, that cannot be decoded, or while the backend is down.

        And at the first attempt, for a share of the records.
        """
        if attempt == 1 and _chance(record) * 1000 % 1 < self.fails_once:
            raise ConnectionError("the back end is busy")
        if (record.key or b"").startswith(BAD) and not self.healed(record.key):
            if self.parks_for is not None:
                raise ParkLater(self.parks_for, "closed for maintenance")
            raise ConnectionError(f"the account of {(record.key or b'').decode()} is locked")
        if (record.value or b"").startswith(POISON) and not self.healed(record.key):
            json.loads(record.value or b"")
        if Path(self.directory, "down").exists():
            raise ConnectionError("the back end is down")

    def healed(self, key: bytes | None) -> bool:
        """Whether a key no longer fails."""
        names = ("healed", f"healed-{(key or b'').decode()}")
        return any(Path(self.directory, name).exists() for name in names)

    def released(self) -> bool:
        """Whether hanging runs may end."""
        return Path(self.directory, "release").exists()


def _chance(record: Record) -> float:
    """From 0 to 1, the same in every run."""
    return zlib.crc32(b"%d/%d" % (record.partition, record.offset)) / 0xFFFFFFFF
