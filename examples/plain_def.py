"""A plain function as a handler: it runs in a thread, for libraries that block."""

import time

from aioshard import App, Record

app = App("thumbnails", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")
made: list[int] = []


@app.consume("images", shard_by="record", concurrency=8)
def on_image(record: Record) -> None:
    time.sleep(0.01)  # blocks its thread, not the event loop; at most 8 run at a time
    made.append(record.offset)


if __name__ == "__main__":
    app.run()
