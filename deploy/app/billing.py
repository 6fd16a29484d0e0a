"""The app of the deployment examples. Settings that differ between environments are AIOSHARD_* variables."""

import asyncio
import logging

from aioshard import App, Record

logger = logging.getLogger("billing")

app = App("billing", auto_offset_reset="earliest")


@app.consume("orders", shard_by="key", concurrency=256)
async def on_order(record: Record) -> None:
    """Process one order of each customer at a time."""
    await asyncio.sleep(0.01)  # here you would call a database or a service
    logger.debug("order %s/%d", record.partition, record.offset)
