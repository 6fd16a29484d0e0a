"""Fixed shards: the same worker handles all records of a key, so each worker can keep its own cache.

No lock is needed: a shard runs one record at a time, and no other shard uses its cache.
"""

import asyncio
import collections

from aioshard import App, Record
from aioshard.core.sharding import shard_number

SHARDS = 16
CACHED = 1_000

app = App("prices", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")
caches: list[collections.OrderedDict[bytes, str]] = [collections.OrderedDict() for _ in range(SHARDS)]


async def look_up(key: bytes) -> str:
    await asyncio.sleep(0.01)  # a slow service
    return f"name of {key.decode()}"


@app.consume("prices", shard_by="key", shards=SHARDS)
async def on_price(record: Record) -> None:
    if record.key is None:
        return  # records without a key go to the shards in turn
    cache = caches[shard_number(record.key, SHARDS)]
    if record.key not in cache:
        cache[record.key] = await look_up(record.key)
        if len(cache) > CACHED:
            cache.popitem(last=False)


if __name__ == "__main__":
    app.run()
