"""A plan made without a broker."""

from aioshard.spark.plans import Plan, PlannedHandler, PlannedRange

PLAN = Plan(
    id="7f3a",
    app="orders.app:app",
    group_id="orders",
    bootstrap_servers=None,
    isolation_level="read_committed",
    ranges=(
        PlannedRange(
            topic="orders", partition=0, start=5, end=9, committed=5, metadata="aioshard/1 first=3,2", finished=(7, 8)
        ),
    ),
    handlers=(
        PlannedHandler(
            name="on_order",
            topics=("orders",),
            shard_by="key",
            on_failure="halt",
            layout="partition",
        ),
    ),
    version="0.1.0",
)
