"""Counts and durations of the records of one handler, per topic."""

from collections import defaultdict

from aioshard.core.histogram import Histogram
from aioshard.engine.outcomes import Outcome
from aioshard.observe import TopicStatistics


class TopicCounts:
    """Counts of the records of one topic; owned by the event loop, written by workers, read from any thread.

    Invariants:
        * No number ever decreases.
    """

    __slots__ = (
        "dead_lettered",
        "durations",
        "expired",
        "next_waited",
        "parked",
        "processed",
        "replayed",
        "retried",
        "skipped",
        "superseded",
        "timed",
        "waited",
        "waits",
    )

    def __init__(self) -> None:
        self.processed = 0
        self.skipped = 0
        self.dead_lettered = 0
        self.parked = 0
        self.superseded = 0
        self.expired = 0
        self.retried = 0
        self.replayed = 0
        """Runs of records that this process had started before: they were cancelled, or their epoch had ended."""
        self.durations = Histogram()
        """Durations of the handler's runs in seconds, including failed runs but not cancelled ones."""
        self.waits = Histogram()
        """Seconds from the arrival of records to the start of their first run."""
        self.timed = 0
        """How many of `processed` are in `durations`; see `RunTimes`."""
        self.waited = 0
        """How many records `waits` represents."""
        self.next_waited = float("-inf")
        """Loop time from which on the next record to start is a sample for `waits`."""

    def count(self, outcome: Outcome) -> None:
        """Count a complete record."""
        match outcome:
            case Outcome.PROCESSED:
                self.processed += 1
            case Outcome.SKIPPED:
                self.skipped += 1
            case Outcome.DEAD_LETTERED:
                self.dead_lettered += 1
            case Outcome.PARKED:
                self.parked += 1
            case Outcome.SUPERSEDED:
                self.superseded += 1
            case Outcome.EXPIRED:
                self.expired += 1

    def statistics(self, topic: str) -> TopicStatistics:
        """Return the counts as those of *topic*. Safe from any thread."""
        return TopicStatistics(
            topic=topic,
            processed=self.processed,
            retried=self.retried,
            skipped=self.skipped,
            dead_lettered=self.dead_lettered,
            parked=self.parked,
            durations=self.durations.counts(),
            waits=self.waits.counts(),
            superseded=self.superseded,
            expired=self.expired,
        )


class Counters:
    """Counts of the records of one handler over all its topics; they continue across rebalances."""

    def __init__(self) -> None:
        self.topics: defaultdict[str, TopicCounts] = defaultdict(TopicCounts)
        """Counts of every topic that this process has owned a partition of."""

    @property
    def processed(self) -> int:
        """Processed records."""
        return sum(counts.processed for counts in tuple(self.topics.values()))

    @property
    def durations(self) -> list[tuple[int, ...]]:
        """The number of attempts in each bucket of durations, of each topic."""
        return [counts.durations.counts().counts for counts in tuple(self.topics.values())]

    @property
    def retried(self) -> int:
        """Attempts after a record's first one."""
        return sum(counts.retried for counts in tuple(self.topics.values()))

    @property
    def replayed(self) -> int:
        """Runs of records that this process had started before."""
        return sum(counts.replayed for counts in tuple(self.topics.values()))

    def statistics(self) -> tuple[TopicStatistics, ...]:
        """Return the counts of each topic, by name. Safe from any thread."""
        return tuple([counts.statistics(topic) for topic, counts in sorted(self.topics.items())])
