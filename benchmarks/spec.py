"""What a contestant is told, and what it answers: the two ends of one measured process."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

IN_ENVIRONMENT = "AIOSHARD_BENCHMARK"
"""The variable that tells tasks of Spark their spec, as JSON."""

Work = Literal["count", "check", "sleep", "hang", "journal", "told", "hash", "compute"]
"""What the handler does: count and nothing else; note which records came; sleep and note; never return;
sleep and write to a file which record it was, and when; sleep as long as the record says, compute 500 × SHA-256, or
compute *turns* of a loop, and note order and concurrency as well."""


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
    """How many records to process; the run ends then."""
    concurrency: int
    work: Work
    seconds: float = 0.0
    """How long the handler sleeps."""
    slow_seconds: float = 0.0
    """How long it sleeps for one record in a hundred."""
    watch_seconds: float = 0.0
    """With `hang`: how long the process is watched."""
    journal: str = ""
    """With `journal`: the file. The run ends in order when the process gets SIGTERM."""
    member: int = 0
    """Which of several members it is; one that replaces another takes its number."""
    keys: int = 0
    """With `told`, `hash` and `compute`: how many there are; they are numbers of eight digits."""
    turns: int = 0
    """With `compute`: how long it computes."""
    present: int = 0
    """How many offsets have a record, where not all of them do."""
    warm_up: str = ""
    """A topic that is consumed to its end before, in the same process; that is not measured."""
    warm_up_ends: tuple[int, ...] = ()
    spawned_at: float = 0.0
    """When the process was started, in seconds of the machine's monotonic clock."""
    output: str = ""
    """The topic to which a contestant publishes."""
    uvloop: bool = True

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        """The other direction."""
        values: dict[str, Any] = json.loads(text)
        return cls(**(values | {name: tuple(values[name]) for name in ("ends", "warm_up_ends")}))

    def warming_up(self) -> "Spec":
        """The run that comes before, in a group of its own."""
        ends = self.warm_up_ends
        group = f"{self.group}-warm-up"
        return replace(self, topic=self.warm_up, ends=ends, group=group, records=sum(ends), present=0, warm_up="")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run showed.

    CPU is user and system time of the consuming process between the record that ends the warm-up, the
    first tenth, and the last one; start-up and joining the group are not in it. Where another topic was
    consumed to warm up, it is counted from the first record. Wall time is from the first record to the last one.
    """

    records: int
    cpu_seconds: float
    cpu_records: int
    """Records between the two readings of CPU time."""
    wall_seconds: float
    wall_records: int
    repeated: int = 0
    """Records that ran more than once; 0 where the handler only counts."""
    missing: int = 0
    """Records that never ran; 0 where the handler only counts, or not all of the topic is read."""
    rss: int = 0
    """Bytes that the process held at the end."""
    peak_rss: int = 0
    """Bytes; the most that the process ever held."""
    dropped: int = 0
    """Rows that a journal did not keep."""
    late_growth: int = 0
    """Bytes by which it grew in the last third of a watched time."""
    disordered: int = 0
    """Records that started while another of their key ran, or after a later one; the watching kinds see it."""
    peak_concurrency: int = 0
    """The most handlers that ran at once; seen by `told`, `hash` and `compute`."""
    longest_pause: float = 0.0
    """Most seconds from one start of a handler to the next; seen by those that publish."""
    nearly_seconds: float = 0.0
    """From the first record until 99 % were done; known where each record is noted."""
    start_seconds: float = 0.0
    """From the start of the process to its first record of all."""

    @property
    def cpu_per_record(self) -> float:
        """Microseconds per record, which is also CPU seconds per million records."""
        return self.cpu_seconds / max(self.cpu_records, 1) * 1e6

    @property
    def rate(self) -> float:
        """Records per second from the first to the last."""
        return self.wall_records / self.wall_seconds if self.wall_seconds else 0.0
