"""Small incidents of real groups on a real broker, recorded as input for `promtool test rules`.

`python -m tests.tools.incidents` writes `deploy/prometheus/aioshard.incidents.test.yml`; it takes three minutes.

The run is 20 times as fast as the recording, 3 seconds for each minute: intervals and durations of the apps are divided
by 20, and recorded durations are multiplied by 20. Nothing else is changed.
"""

import asyncio
import contextlib
import itertools
import logging
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from aiokafka import AIOKafkaProducer

from aioshard import App, Record
from aioshard.telemetry.metrics import AppCollector
from tests.support.cluster import KafkaCluster
from tests.support.kafka import KafkaBroker
from tests.support.paths import PROJECT

DEPLOY = PROJECT / "deploy/prometheus"
RULES = DEPLOY / "aioshard.rules.yml"
RECORDED = DEPLOY / "aioshard.incidents.test.yml"

FACTOR = 20
"""How many times recorded time is longer than the run."""
MINUTE = 60 / FACTOR
STEP = 60
"""Recorded seconds between two samples."""
PARTITIONS = 6
MEMBERS = 3
RATE = 7
"""Records per second of the run, spread over all keys."""
TAKES = 1.0
"""Seconds of the run that a handler needs for a record."""
CONCURRENCY = 4
"""Workers of each member: 3 members finish 12 records per second at most."""
BEGINS = 10
"""The minute in which each incident begins; until then its group is healthy."""

BURST = 3
"""Load during a burst, times the usual load."""

HEAD = f"""\
# Alerts that fire in incidents of real groups. None fires during a rolling deploy.
#   promtool test rules deploy/prometheus/aioshard.incidents.test.yml
#
# `python -m tests.tools.incidents` wrote this file. Groups of {MEMBERS} members ran on a real Kafka broker, and
# each app was scraped every {STEP / FACTOR:g} s. To keep the run short, it ran {FACTOR} times as fast:
# {STEP / FACTOR:g} s of the run are {STEP} s here. The apps used durations divided by {FACTOR} (commit_interval,
# heartbeat_interval, drain_timeout, the interval for log end offsets), and durations in the samples are multiplied
# by {FACTOR}, except the delay of the event loop. `stale` marks the scrape in which a series disappeared.
# Nothing else is changed; series that no rule uses are left out.
rule_files:
  - aioshard.rules.yml

evaluation_interval: 30s

tests:
"""


class Incident(NamedTuple):
    """An incident, and the alerts that fire in it."""

    name: str
    about: str
    minutes: int
    play: Callable[["Group"], Awaitable[None]]
    alerts: tuple[str, ...]
    """Alerts that fire, as `alertname` or `alertname/partition`."""
    also: str = ""
    """An alert that may fire too: how long commits are stuck depends on the run."""


class Member:
    """A running app."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._started = asyncio.Event()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        async with self.app:
            self._started.set()
            await self._stop.wait()

    async def start(self) -> None:
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait({started, self._task}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        self._stop.set()
        await self._task


class Group:
    """A group under steady load whose members join and leave, with the samples of their metrics."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka = kafka
        self.name = name
        self.members: dict[str, Member] = {}
        self.samples: dict[str, dict[int, float]] = {}
        """Value of each series at the ticks at which it existed."""
        self.ticks: set[int] = set()
        """Ticks at which the members were scraped."""
        self.back_end = asyncio.Event()
        """Set while handlers can work."""
        self.back_end.set()
        self.load = 1
        self.began = 0.0
        self._slow: dict[str, asyncio.Event] = {}
        """Members whose next record takes 5 minutes, with an event that is set when it runs."""
        self._numbers = itertools.count(1)
        self._metrics = frozenset(re.findall(r"\baioshard_\w+", RULES.read_text()))

    async def handle(self, instance: str) -> None:
        await self.back_end.wait()
        started = self._slow.pop(instance, None)
        if started is None:
            await asyncio.sleep(TAKES)
        else:
            started.set()
            await asyncio.sleep(5 * MINUTE)

    async def join(self) -> str:
        """Start a member; returns its instance."""
        instance = f"10.0.0.{next(self._numbers)}:8080"
        app = App(
            self.name,
            bootstrap_servers=self.kafka.bootstrap,
            auto_offset_reset="earliest",
            commit_interval=1 / FACTOR,
            heartbeat_interval=3 / FACTOR,
            session_timeout=6,
            drain_timeout=6 * MINUTE,
            fetch_max_wait=0.05,
        )

        @app.consume(self.name, concurrency=CONCURRENCY)
        async def on_order(record: Record) -> None:  # noqa: ARG001
            await self.handle(instance)

        self.members[instance] = Member(app)
        await self.members[instance].start()
        return instance

    async def leave(self, instance: str) -> None:
        """Shut down a member gracefully; it is scraped until it has stopped."""
        await self.members[instance].stop()
        del self.members[instance]

    async def at(self, minute: float) -> None:
        """Wait for a minute of the recording."""
        await asyncio.sleep(max(self.began + minute * MINUTE - asyncio.get_running_loop().time(), 0.0))

    async def begin_slow(self, instance: str) -> None:
        """Make the next record of a member take 5 minutes; returns when it runs."""
        started = self._slow[instance] = asyncio.Event()
        await started.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the group under load and scrape it."""
        await self.kafka.create_topic(self.name, PARTITIONS)
        await asyncio.gather(*(self.join() for _ in range(MEMBERS)))
        await asyncio.sleep(MINUTE)
        self.began = asyncio.get_running_loop().time()
        producer = AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap)
        async with producer, asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._produce(producer)), tasks.create_task(self._scrape())]
            try:
                yield
            finally:
                for task in background:
                    task.cancel()
                self.back_end.set()
                await asyncio.gather(*(member.stop() for member in self.members.values()), return_exceptions=True)

    async def _produce(self, producer: AIOKafkaProducer) -> None:
        number = 0
        for count in itertools.count(1):
            for _ in range(self.load):
                number += 1
                await producer.send(self.name, b"", key=b"%d" % number, partition=number % PARTITIONS)
            await self.at(count / RATE / MINUTE)

    async def _scrape(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            tick = round((loop.time() - self.began) * FACTOR / STEP)
            self.ticks.add(tick)
            for instance, member in self.members.items():
                self._sample(f'up{{job="aioshard",instance="{instance}"}}', tick, 1)
                for metric in AppCollector(member.app).collect():
                    for name, labels, value, *_ in metric.samples:
                        if name in self._metrics:
                            text = {"group": "billing", "instance": instance, **labels}
                            text |= {"group": "billing"} | ({"topic": "orders"} if "topic" in labels else {})
                            series = ",".join(f'{label}="{given}"' for label, given in text.items())
                            self._sample(f"{name}{{{series}}}", tick, stretched(name, value))
            await self.at((tick + 1) * STEP / 60)

    def _sample(self, series: str, tick: int, value: float) -> None:
        self.samples.setdefault(series, {})[tick] = value


def stretched(name: str, value: float) -> float:
    """Convert a value to the longer time of the recording."""
    if "_event_loop_" in name:
        return round(value, 1)
    return round(value * FACTOR) if "_seconds" in name else value


# Incidents ------------------------------------------------------------------------------------


async def deploy(group: Group) -> None:
    """Replace one member after the other, each half a minute after it has stopped; then send a burst of load."""
    for minute, instance in zip(itertools.count(BEGINS, 2), list(group.members), strict=False):
        await group.at(minute)
        await group.leave(instance)
        await group.at(minute + 0.5)
        await group.join()
    await group.at(25)
    group.load = BURST
    await group.at(27)
    group.load = 1


async def stall(group: Group) -> None:
    """Every 8 minutes a member joins or leaves, and the rebalance waits for a record that takes 5 minutes."""
    victim, flapping = next(iter(group.members)), ""
    for minute in range(BEGINS, 50, 8):
        await group.at(minute)
        await group.begin_slow(victim)
        if flapping:
            await group.leave(flapping)
            flapping = ""
        else:
            flapping = await group.join()


async def flap(group: Group) -> None:
    """A member joins or leaves every 3 minutes; each rebalance is short."""
    for minute in range(BEGINS, 55, 6):
        await group.at(minute)
        flapping = await group.join()
        await group.at(minute + 3)
        await group.leave(flapping)


async def skew(group: Group) -> None:
    """One key suddenly has 120 records; in order they take 40 minutes."""
    await group.at(BEGINS)
    await group.kafka.produce(group.name, [(b"hot", b"")] * 120, 0)


async def hold_transaction(group: Group) -> None:
    """A producer holds a transaction open for 15 minutes."""
    await group.at(BEGINS)
    producer = AIOKafkaProducer(bootstrap_servers=group.kafka.bootstrap, transactional_id=group.name)
    async with producer:
        await producer.begin_transaction()
        await producer.send_and_wait(group.name, b"", partition=1)
        await group.at(BEGINS + 15)
        await producer.commit_transaction()


async def lose_back_end(group: Group) -> None:
    """Every handler waits for a back end that does not answer."""
    await group.at(BEGINS)
    group.back_end.clear()


INCIDENTS = (
    Incident("deploy", "A rolling deploy and a short burst of load: nothing fires.", 45, deploy, ()),
    Incident(
        "stalls",
        "Rebalances that wait for a record of 5 minutes, with progress between them.",
        50,
        stall,
        ("AioshardLagGrows", "AioshardRebalancing"),
        also="AioshardCommitStuck",
    ),
    Incident("flapping", "A member joins and leaves again and again.", 55, flap, ("AioshardRebalancesOften",)),
    Incident("skew", "One key has most of the records, which run in order.", 40, skew, ("AioshardPartitionSkew/0",)),
    Incident(
        "transaction",
        "A producer holds a transaction open.",
        35,
        hold_transaction,
        ("AioshardTransactionOpen/1",),
    ),
    Incident(
        "stopped",
        "A back end does not answer: no record finishes.",
        30,
        lose_back_end,
        ("AioshardLagGrows", *(f"AioshardCommitStuck/{partition}" for partition in range(PARTITIONS))),
    ),
)


# Recording ------------------------------------------------------------------------------------


async def record(kafka: KafkaCluster, prefix: str) -> str:
    """Play all incidents concurrently; returns the input of `promtool test rules`."""

    async def play(incident: Incident) -> Group:
        group = Group(kafka, f"{prefix}-{incident.name}")
        async with group.running():
            await incident.play(group)
            await group.at(incident.minutes)
        return group

    with patch("aioshard.engine.runtime._LOG_END_INTERVAL", 10 / FACTOR):
        groups = await asyncio.gather(*map(play, INCIDENTS))
    return HEAD + "".join(itertools.chain.from_iterable(map(_test, INCIDENTS, groups)))


def _test(incident: Incident, group: Group) -> Iterator[str]:
    yield f"  # {incident.about}\n  - name: {incident.name}\n    interval: {STEP}s\n    input_series:\n"
    last = incident.minutes * 60 // STEP
    for series, samples in sorted(group.samples.items()):
        yield f"      - series: '{series}'\n        values: '{values(samples, group.ticks, last)}'\n"
    yield expectations(incident)


def expectations(incident: Incident) -> str:
    """Test that nothing fires before the incident begins, and that only its alerts have fired at the end."""
    firing = 'alertstate="firing"' + (f',alertname!="{incident.also}"' if incident.also else "")
    lines = ["    promql_expr_test:"]
    for minute, alerts in ((BEGINS, ()), (incident.minutes, incident.alerts)):
        lines += [
            f"      - expr: max by (alertname, partition) (max_over_time(ALERTS{{{firing}}}[2h]))",
            f"        eval_time: {minute}m",
            "        exp_samples:" if alerts else "        exp_samples: []",
        ]
        for alert in alerts:
            name, _, partition = alert.partition("/")
            labels = f'alertname="{name}"' + (f',partition="{partition}"' if partition else "")
            lines.append(f"          - {{labels: '{{{labels}}}', value: 1}}")
    return "\n".join(lines) + "\n"


def values(samples: Mapping[int, float], ticks: set[int], last: int) -> str:
    """Write samples in promtool's notation: `stale` if a series has disappeared, `_` if nothing was scraped."""
    words: list[str] = []
    there = False
    for tick in range(last + 1):
        if tick in samples:
            words.append(f"{samples[tick]:g}" if samples[tick] % 1 else f"{samples[tick]:.0f}")
            there = True
        else:
            words.append("stale" if there and tick in ticks else "_")
            there = there and tick not in ticks
    return " ".join(_shortened(words))


def _shortened(words: list[str]) -> Iterator[str]:
    for word, run in itertools.groupby(words):
        count = len(list(run))
        if word == "_" and count > 1:
            yield f"_x{count}"
        elif word not in ("_", "stale") and count > 2:
            yield f"{word}x{count - 1}"
        else:
            yield from [word] * count


async def main() -> int:
    """Start a broker and record the incidents on it."""
    with tempfile.TemporaryDirectory(prefix="aioshard-incidents-", ignore_cleanup_errors=True) as directory:
        broker = KafkaBroker(Path(directory))
        logging.disable()
        try:
            await broker.start()
            RECORDED.write_text(await record(broker, "incident"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                await broker.kill()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
