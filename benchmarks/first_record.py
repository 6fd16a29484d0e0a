"""An app that prints the CPU seconds that it had used when its first record arrived; see `p19`."""

import os
import time

from aioshard import App, Record

app = App(os.environ["GROUP"], auto_offset_reset="earliest")
used: list[float] = []


@app.consume(os.environ["TOPIC"])
async def print_first(_: Record) -> None:
    """Print the CPU seconds once."""
    if not used:
        used.append(time.process_time())
        print(*used, flush=True)
