"""The input and the output of one measured process."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

IN_ENVIRONMENT = "AIOSHARD_BENCHMARK"
"""Environment variable with the spec of Spark tasks, as JSON."""

Work = Literal["count", "check", "sleep", "hang", "journal", "planned", "hash", "compute"]
"""The work of the handler: only count; mark each record; sleep and mark; never return; sleep and write the record and
the time to a file; sleep as long as the record says, compute 500 × SHA-256, or compute *turns* of a loop. The last
three also observe order and concurrency, as `check` and `sleep` do if the number of keys is given."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One run of one contestant."""

    contestant: str
    bootstrap: str
    topic: str
    group: str
    ends: tuple[int, ...]
    """End offset of each partition; every offset below has a record."""
    records: int
    """Number of records after which the run ends."""
    concurrency: int
    work: Work
    seconds: float = 0.0
    """Seconds that the handler sleeps."""
    slow_seconds: float = 0.0
    """Seconds that it sleeps for one record in a hundred."""
    watch_seconds: float = 0.0
    """With `hang`: seconds for which the process is watched."""
    journal: str = ""
    """With `journal`: the file. SIGTERM ends the run with a drain."""
    member: int = 0
    """Number of this member; a replacement takes the number of its predecessor."""
    keys: int = 0
    """Number of keys, which are numbers of eight digits. With `check` and `sleep`, 0 leaves the order unobserved;
    `planned`, `hash` and `compute` need it."""
    turns: int = 0
    """With `compute`: iterations of the loop."""
    present: int = 0
    """Number of offsets with a record, if not all of them have one."""
    warm_up: str = ""
    """Topic that the process consumes first, unmeasured, to warm up."""
    warm_up_ends: tuple[int, ...] = ()
    spawned_at: float = 0.0
    """When the process was started, in seconds of the machine's monotonic clock."""
    output: str = ""
    """The topic to which a contestant publishes."""
    uvloop: bool = True

    def to_json(self) -> str:
        """Return the spec for the command line of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        """Parse the output of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        return cls(**(values | {name: tuple(values[name]) for name in ("ends", "warm_up_ends")}))

    def warming_up(self) -> "Spec":
        """Return the spec of the warm-up run, which has a separate group."""
        ends = self.warm_up_ends
        group = f"{self.group}-warm-up"
        return replace(self, topic=self.warm_up, ends=ends, group=group, records=sum(ends), present=0, warm_up="")


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one run.

    CPU is user and system time of the consuming process from the end of the warm-up, which is the first tenth of the
    records, to the last record; start-up and joining the group are not included. After a warm-up with another topic,
    it is counted from the first record. Wall time is from the first record to the last one.
    """

    records: int
    cpu_seconds: float
    cpu_records: int
    """Records between the two readings of CPU time."""
    wall_seconds: float
    wall_records: int
    repeated: int = 0
    """Records that ran more than once; 0 if the handler only counts."""
    missing: int = 0
    """Records that never ran; 0 if the handler only counts, or the topic is read in part."""
    rss: int = 0
    """Resident memory at the end, in bytes."""
    peak_rss: int = 0
    """Maximum resident memory, in bytes."""
    dropped: int = 0
    """Rows that a journal dropped."""
    late_growth: int = 0
    """Bytes by which memory grew in the last third of the watched time."""
    disordered: int = 0
    """Records that started while another of their key ran, or after a later one; 0 if the order is not observed."""
    peak_concurrency: int = 0
    """Maximum number of concurrent runs; 0 if the order is not observed."""
    longest_pause: float = 0.0
    """Maximum seconds from one start of a handler to the next, for handlers that publish."""
    nearly_seconds: float = 0.0
    """Seconds from the first record until 99 % were done, if records are marked."""
    start_seconds: float = 0.0
    """Seconds from the start of the process to its first record."""

    @property
    def cpu_per_record(self) -> float:
        """Microseconds per record, which is also CPU seconds per million records."""
        return self.cpu_seconds / max(self.cpu_records, 1) * 1e6

    @property
    def rate(self) -> float:
        """Records per second from the first to the last."""
        return self.wall_records / self.wall_seconds if self.wall_seconds else 0.0
