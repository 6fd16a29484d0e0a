import asyncio

from aioshard import App, Record

app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")


@app.consume("orders", shard_by="key", concurrency=256)
async def on_order(record: Record) -> None:
    await asyncio.sleep(0.01)  # here you would call a database or a service
    print(record.key, record.offset, flush=True)


if __name__ == "__main__":
    app.run()
