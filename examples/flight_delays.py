"""Classify the flights of a topic: live with `aioshard run`, as a backfill with `aioshard spark`."""

import json
from typing import Any

from aioshard import App, Record, Retry

app = App("flight-delays", auto_offset_reset="earliest")


def delay_class(delay: int | None) -> str:
    if delay is None:
        return "cancelled"  # a flight that never left has no delay; the first version said "on time"
    if delay <= 15:
        return "on time"
    return "late" if delay <= 120 else "very late"


@app.consume("flights", shard_by="key", concurrency=256, retry=Retry(attempts=3))
async def classify(record: Record) -> dict[str, Any]:
    flight = json.loads(record.value or b"{}")
    return {"number": flight["number"], "class": delay_class(flight["departure_delay"])}
