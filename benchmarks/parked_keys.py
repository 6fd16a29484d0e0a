"""An app of which a tenth of the keys fails for a while; it prints, each second, how many records ended; see `p22`.

Its only argument is a JSON object with the fields of `Outage`.
"""

import asyncio
import json
import sys
import time
from typing import Any

from aioshard import App, Context, Park, Record
from aioshard.loops import loop_factory, tuned_gc
from benchmarks.outage import Observed, Outage


async def observe(outage: Outage) -> dict[str, Any]:
    """Run the app until it has been watched, and return what was observed."""
    observed = Observed(outage)
    app = App(
        outage.group,
        bootstrap_servers=outage.bootstrap,
        auto_offset_reset="earliest",
        session_timeout=6.0,
        heartbeat_interval=1.0,
        group_protocol="classic",
    )

    async def handle(record: Record) -> None:
        await observed.handle(record)

    async def handle_decoded(_value: dict[str, Any], context: Context) -> None:
        await observed.handle(context.record)

    app.consume(
        outage.topic,
        concurrency=outage.concurrency,
        on_failure=Park(outage.side_topic, delay=outage.delay),
    )(handle_decoded if outage.decodes else handle)

    async with app:
        await observed.until_watched()
        used = time.process_time()
        parked = app.statistics().handlers[0].parked
    return observed.asdict() | {"parked": parked, "cpu_seconds": used}


if __name__ == "__main__":
    with tuned_gc(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        print(json.dumps(runner.run(observe(Outage(**json.loads(sys.argv[1]))))), flush=True)
