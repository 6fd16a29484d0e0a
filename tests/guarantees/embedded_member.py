"""The order service of the examples, recording every run: `uvicorn tests.guarantees.embedded_member:api`.

`RUNS` is the file of the notes: a line per attempt, with partition and offset. `PACE` is how many seconds an attempt
takes beside its transaction.
"""

import asyncio
import importlib
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aioshard import App, Context, Record
from tests.support.paths import PROJECT

sys.path.insert(0, str(PROJECT / "examples" / "order_service"))
service = importlib.import_module("service")
app: App = service.app
api = service.api
runs = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
pace = float(os.environ["PACE"])


@app.middleware
async def note(record: Record, context: Context, call_next: Callable[[Any, Any], Awaitable[object]]) -> object:
    os.write(runs, b"%d %d\n" % (record.partition, record.offset))  # one write: lines of several processes stay whole
    await asyncio.sleep(pace)
    return await call_next(record, context)
