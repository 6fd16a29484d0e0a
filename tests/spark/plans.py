"""A plan that nobody has made."""

from aioshard.spark.runs.plan import CommittedThen, FinishedBeyond, Plan, PlannedHandler, PlannedRange

__all__ = ["PLAN"]

PLAN = Plan(
    id="7f3a",
    created=1767225600.25,
    app="orders.app:app",
    group_id="orders",
    bootstrap_servers=None,
    isolation_level="read_committed",
    ranges=(PlannedRange(topic="orders", partition=0, start=5, end=9),),
    committed=(CommittedThen("orders", 0, 5, "aioshard/1 first=3"),),
    handlers=(
        PlannedHandler(
            name="on_order",
            topics=("orders",),
            shard_by="key",
            shards=None,
            concurrency=64,
            on_failure="halt",
            layout="partition",
        ),
    ),
    finished=(FinishedBeyond("orders", 0, (7, 8)),),
    versions={"aioshard": "0.1.0"},
)
