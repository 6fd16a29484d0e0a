"""What a member process of a scenario does; the test chooses, `member` obeys."""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from aioshard import Record

__all__ = ["HANG", "VARIABLE", "Behaviour"]

VARIABLE = "GUARANTEES_MEMBER"
"""Environment variable with the JSON of a `Behaviour`."""

HANG = b"hang"
"""What the value of a record begins with on which a member hangs, if it does."""


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """One member process.

    Attributes:
        directory: Where it reports, and where the file `release` ends every hanging run.
        process: Its name in the reports.
        form: The handler: a coroutine with or without context, or a function in a thread.
        base: Seconds that every run takes.
        spread: Seconds that half of the runs take in addition, at most; see `duration`.
        hangs: How it hangs: until it is cancelled, or beyond (in a thread it always is beyond).
        hangs_on: Which records it hangs on.
        report_intake: Whether each record is reported when the engine takes it in.
    """

    directory: str
    process: str
    group: str
    topic: str
    settings: Mapping[str, Any]
    form: Literal["context", "record", "thread"] = "context"
    concurrency: int = 64
    base: float = 0.0
    spread: float = 0.0
    hangs: Literal["never", "until cancelled", "until released"] = "never"
    hangs_on: Literal["marked", "all"] = "marked"
    report_intake: bool = False

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of `json`."""
        return cls(**json.loads(text))

    def json(self) -> str:
        """For the environment of the process."""
        return json.dumps(dataclasses.asdict(self))

    def duration(self, record: Record) -> float:
        """Seconds for one record, the same in every run: half of the records take only *base*."""
        fraction = zlib.crc32(b"%d/%d" % (record.partition, record.offset)) / 0xFFFFFFFF
        return self.base + self.spread * max(2 * fraction - 1, 0.0)

    def hangs_at(self, record: Record) -> bool:
        """Whether the run of *record* hangs."""
        return self.hangs != "never" and (self.hangs_on == "all" or (record.value or b"").startswith(HANG))

    def released(self) -> bool:
        """Whether hanging runs may end."""
        return Path(self.directory, "release").exists()
