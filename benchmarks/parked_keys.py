"""An app of which a tenth of the keys fails for a while; it prints, each second, how many records ended; see `p22`.

Its only argument is a JSON object with the fields of `Outage`.
"""

import asyncio
import json
import sys
import time
from collections import defaultdict
from typing import Any, NamedTuple

from aioshard import App, Park, Record
from aioshard.loops import loop_factory, tuned_gc


class Outage(NamedTuple):
    """One run."""

    bootstrap: str
    topic: str
    side_topic: str
    group: str
    delay: float
    """Seconds after which a parked key is tried again."""
    seconds: float
    """Seconds from the first record for which a tenth of the keys fails; 0 without failure."""
    watch: float
    """Seconds for which the run lasts after that."""
    concurrency: int = 128
    handling: float = 0.005
    """Seconds that the handler takes for each record."""


def fails(key: bytes | None) -> bool:
    """Whether a key is among those that fail."""
    return key is not None and key.endswith(b"0")


class Observed:
    """The records that ended, and the order of each key."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.healthy: defaultdict[int, int] = defaultdict(int)
        """Records of the keys that never fail, by second."""
        self.others: defaultdict[int, int] = defaultdict(int)
        """Records of the other keys that were processed, by second."""
        self.failures = 0
        self.disordered = 0
        self.repeated = 0
        self._latest: dict[tuple[int, bytes | None], int] = {}

    def note(self, record: Record, second: int) -> None:
        """Note a record that was processed."""
        counts = self.others if fails(record.key) else self.healthy
        counts[second] += 1
        name = (record.partition, record.key)
        latest = self._latest.get(name, -1)
        self.repeated += record.offset == latest
        self.disordered += record.offset < latest
        self._latest[name] = record.offset


async def observe(outage: Outage) -> dict[str, Any]:
    """Run the app until it has been watched, and return what was observed."""
    observed = Observed()
    clock = time.monotonic
    app = App(
        outage.group,
        bootstrap_servers=outage.bootstrap,
        auto_offset_reset="earliest",
        session_timeout=6.0,
        heartbeat_interval=1.0,
        group_protocol="classic",
    )

    @app.consume(
        outage.topic,
        concurrency=outage.concurrency,
        on_failure=Park(outage.side_topic, delay=outage.delay),
    )
    async def handle(record: Record) -> None:
        if observed.began is None:
            observed.began = clock()
        elapsed = clock() - observed.began
        await asyncio.sleep(outage.handling)
        if elapsed < outage.seconds and fails(record.key):
            observed.failures += 1
            raise ConnectionError("the partner is down")
        observed.note(record, int(clock() - observed.began))

    async with app:
        while observed.began is None:
            await asyncio.sleep(0.05)
        await asyncio.sleep(outage.seconds + outage.watch - (clock() - observed.began))
        used = time.process_time()
        parked = app.statistics().handlers[0].parked
    return {
        "healthy": dict(observed.healthy),
        "others": dict(observed.others),
        "failures": observed.failures,
        "parked": parked,
        "disordered": observed.disordered,
        "repeated": observed.repeated,
        "cpu_seconds": used,
    }


if __name__ == "__main__":
    with tuned_gc(), asyncio.Runner(loop_factory=loop_factory()) as runner:
        print(json.dumps(runner.run(observe(Outage(**json.loads(sys.argv[1]))))), flush=True)
