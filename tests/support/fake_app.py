"""Hand-made reports of an app, for tests of what displays them."""

from aioshard import App
from aioshard.observe import (
    Diagnosis,
    HandlerStatistics,
    PartitionStatistics,
    Statistics,
    TransactionStatistics,
)

PARTITION = PartitionStatistics(
    topic="orders",
    partition=3,
    epoch=1,
    position=120,
    committed=100,
    committable=101,
    end_offset=150,
    lag=50,
    lag_seconds=61.5,
    incomplete=19,
    buffered_records=18,
    buffered_bytes=9_000,
    paused=None,
    oldest_incomplete_age=2.5,
    held_back=7,
)
HANDLER = HandlerStatistics(
    name="on_order",
    topics=("orders",),
    concurrency=64,
    busy=5,
    shards=7,
    processed=1_000,
    retried=11,
    skipped=2,
    dead_lettered=3,
    parked=4,
    halted=0,
    outliving=(),
)
STATISTICS = Statistics(
    state="running",
    group_id="billing",
    member_id="m-1",
    rebalances=2,
    commits=30,
    commit_failures=1,
    replayed=6,
    already_done=7,
    buffered_records=18,
    buffered_bytes=9_000,
    client_losses=1,
    trouble=None,
    partitions=(PARTITION,),
    handlers=(HANDLER,),
    transactions=TransactionStatistics(
        fenced=8,
        messages=80,
        open_seconds=0.5,
        committed=41,
        aborted=9,
        decided_committed=3,
        decided_aborted=2,
        undecided=1,
        producer_epochs=14,
    ),
)
DIAGNOSIS = Diagnosis(state="running", findings=(), partitions=(), outliving=())


class FakeApp(App):
    """An app that does not run, and tells what a test wants."""

    def __init__(
        self, statistics: Statistics = STATISTICS, diagnosis: Diagnosis = DIAGNOSIS, explanation: str = ""
    ) -> None:
        super().__init__("billing")
        self.current = statistics
        self.diagnosis = diagnosis
        self.explanation = explanation
        self.asked = 0
        """How often for statistics."""

    def statistics(self) -> Statistics:
        self.asked += 1
        return self.current

    def explain(self) -> str:
        return self.explanation

    def diagnose(self) -> Diagnosis:
        return self.diagnosis
