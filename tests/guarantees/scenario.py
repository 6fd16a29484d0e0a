"""A scenario: a topic, a group, member processes that come and go, and the story of it all."""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from json import loads
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiokafka.admin import AIOKafkaAdminClient

from tests.guarantees.behaviour import VARIABLE, Behaviour
from tests.guarantees.checks import CommitsAt, Guarantee, Story, verify
from tests.guarantees.observations import Observations, Place
from tests.support.cluster import KafkaCluster, Message
from tests.support.kafka_libs import PROJECT

__all__ = ["SHORT", "Member", "Scenario", "even_keys", "skewed_keys"]

SHORT: Mapping[str, Any] = {
    "auto_offset_reset": "earliest",
    "session_timeout": 6,
    "heartbeat_interval": 0.5,
    "rebalance_timeout": 12,
    "drain_timeout": 3,
    "commit_timeout": 3,
    "commit_interval": 0.2,
    "start_timeout": 40,
    "shutdown_timeout": 10,
}
"""Settings of members: everything comes soon."""

POLL_INTERVAL = 0.02
SAMPLE_INTERVAL = 0.05
TAIL_LINES = 25


class Member:
    """One process of the group.

    Attributes:
        process: Its name in the observations: the member's, and how often that was started.
        began: When it was started, in nanoseconds of the monotonic clock.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.process = behaviour.process
        self._directory = Path(behaviour.directory)
        self._log = self._directory / f"{self.process}.log"
        environment = os.environ | {VARIABLE: behaviour.json(), "PYTHONPATH": str(PROJECT)}
        command = [sys.executable, "-m", "aioshard", "run", "tests.guarantees.member:app"]
        self.began = time.monotonic_ns()
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                command, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._popen.poll() is None

    @property
    def sample(self) -> dict[str, Any]:
        """The latest sample of its statistics, empty before the first one; see `member.Report`."""
        file = self._directory / f"{self.process}.json"
        sample: dict[str, Any] = loads(file.read_text()) if file.exists() else {}
        return sample

    @property
    def statistics(self) -> dict[str, Any]:
        """`Statistics.asdict()` of the latest sample."""
        statistics: dict[str, Any] = self.sample.get("statistics", {"state": "not started", "partitions": []})
        return statistics

    @property
    def partitions(self) -> dict[int, dict[str, Any]]:
        """The statistics of the partitions that it owns and may work on."""
        return {found["partition"]: found for found in self.statistics["partitions"] if not _is_closed(found)}

    @property
    def log(self) -> str:
        """All that it printed."""
        return self._log.read_text()

    @property
    def tail(self) -> str:
        """The last lines of what it printed, for messages."""
        lines = self.log.splitlines()[-TAIL_LINES:]
        return "\n".join([f"--- {self.process}, {'alive' if self.alive else self._popen.returncode}:", *lines])

    def ask_to_end(self) -> None:
        """SIGTERM."""
        self._popen.send_signal(signal.SIGTERM)

    async def ended(self, timeout: float = 30.0) -> int:
        """Waits for the end; returns the exit code."""
        return await asyncio.to_thread(self._popen.wait, timeout)

    async def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, and waits; returns the exit code."""
        self.ask_to_end()
        return await self.ended(timeout)

    def freeze(self) -> None:
        """Lets the process stand still, until `thaw`."""
        self._popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen process go on."""
        self._popen.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, and waits."""
        self._popen.kill()
        await self.ended()


def _is_closed(partition: Mapping[str, Any]) -> bool:
    paused = partition["paused"]
    return paused is not None and ("rebalancing" in paused or "draining" in paused)


class Scenario:
    """Owns the topic, the member processes and the observation of both; used with `async with`.

    Attributes:
        produced: The key of each record that was produced.
        observations: What the members have reported.
    """

    def __init__(self, kafka: KafkaCluster, topic: str, group: str, directory: Path) -> None:
        self.kafka = kafka
        self.topic = topic
        self.group = group
        self.directory = directory
        self.produced: dict[Place, str] = {}
        self.observations = Observations(directory)
        self.members: dict[str, Member] = {}
        self.commits: list[CommitsAt] = []
        self._starts: dict[str, int] = {}
        self._admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        self._coordinator: int | None = None
        self._watch: asyncio.Task[None] | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._enough = False

    async def __aenter__(self) -> Self:
        await self._admin.start()
        self._coordinator = await self._admin.find_coordinator(self.group)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for member in self.members.values():
            if member.alive:
                await member.kill()
        tasks = [task for task in (self._watch, self._feeding) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._admin.close()

    # Records --------------------------------------------------------------------------

    async def create(self, partitions: int, config: Mapping[str, str] | None = None) -> None:
        """Creates the topic, and begins to sample the group's committed offsets."""
        await self.kafka.create_topic(self.topic, partitions, config)
        self._watch = asyncio.create_task(self._sample_commits(), name="sample commits")

    async def produce(self, messages: Sequence[Message], partition: int | None = None) -> list[Place]:
        """Appends records and notes them as produced."""
        places = await self.kafka.produce(self.topic, messages, partition)
        for place, (key, _) in zip(places, messages, strict=True):
            self.produced[place] = "" if key is None else key.decode()
        return places

    def start_feeding(self, keys: Iterator[bytes], *, backlog: int, chunk: int, least: int = 0) -> None:
        """Begins to produce a chunk each time there are fewer than *backlog* unfinished records.

        Goes on until `verify` and *least* records, so that there is load as long as the scenario lasts.
        """
        self._feeding = asyncio.create_task(self._feed(keys, backlog, chunk, least), name="feed")

    async def _feed(self, keys: Iterator[bytes], backlog: int, chunk: int, least: int) -> None:
        while len(self.produced) < least or not self._enough:
            await self.until(lambda: self.unfinished < backlog, "the members have caught up with the feed")
            await self.produce([(key, None) for key in itertools.islice(keys, chunk)])

    # Members --------------------------------------------------------------------------

    def start(self, name: str, settings: Mapping[str, Any] | None = None, **behaviour: Any) -> Member:
        """Starts a process as member *name*, which does not run at the moment."""
        self._starts[name] = self._starts.get(name, 0) + 1
        process = f"{name}.{self._starts[name]}"
        everything = {**SHORT, "bootstrap_servers": self.kafka.bootstrap, **(settings or {})}
        self.members[name] = Member(
            Behaviour(str(self.directory), process, self.group, self.topic, everything, **behaviour)
        )
        return self.members[name]

    async def until_settled(self, *names: str, timeout: float = 45.0) -> None:
        """Returns when all partitions are open, each in one of the members *names* and no other."""
        total = len(await self.kafka.partitions(self.topic))

        def settled() -> bool:
            owned = [list(self.members[name].partitions) for name in names]
            return all(owned) and sorted(number for numbers in owned for number in numbers) == list(range(total))

        await self.until(settled, f"{', '.join(names)} share {total} partitions", timeout)

    def release(self) -> None:
        """Ends every run that hangs, also those to come."""
        (self.directory / "release").touch()

    # Waiting --------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
        """Returns when *condition*, on fresh observations, holds.

        Raises:
            AssertionError: It does not within *timeout* seconds; the message shows what the members printed.
            Exception: What ended the feed, or the sampling of commits.
        """
        give_up = time.monotonic() + timeout
        self.observations.refresh()
        while not condition():
            if time.monotonic() > give_up:
                tails = "\n".join(member.tail for member in self.members.values())
                raise AssertionError(f"not within {timeout:g} s: {what}; {self.unfinished} unfinished\n{tails}")
            await asyncio.sleep(POLL_INTERVAL)
            self._raise_failures()
            self.observations.refresh()

    def _raise_failures(self) -> None:
        """Raises what ended the feed or the sampling, without which nothing that is waited for may come."""
        for task in (self._watch, self._feeding):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    @property
    def unfinished(self) -> int:
        """Records that were produced and have not finished, as of the last refresh."""
        return len(self.produced) - len(self.observations.finished)

    async def until_finished(self, count: int, timeout: float = 60.0) -> None:
        """Returns when at least *count* different records have finished."""
        await self.until(lambda: len(self.observations.finished) >= count, f"{count} records have finished", timeout)

    async def until_all_committed(self, timeout: float = 60.0) -> None:
        """Returns when the group has committed all that was produced."""
        ends = await self.kafka.end_offsets(self.topic)

        def committed() -> bool:
            last = self.commits[-1].offsets if self.commits else {}
            return all(last.get(partition, 0) == end for partition, end in ends.items())

        await self.until(committed, f"the group has committed {ends}", timeout)

    async def verify(self, *guarantees: Guarantee) -> None:
        """Lets the feed end, waits until everything is committed, and asks the guarantees.

        When that does not come they are asked all the same, because they may know why.
        """
        self._enough = True
        try:
            if self._feeding is not None:
                await self._feeding
            await self.until_all_committed()
        except AssertionError:
            verify(await self.story(), *guarantees)
            raise
        verify(await self.story(), *guarantees)

    # The story ------------------------------------------------------------------------

    async def sample_commits(self) -> CommitsAt:
        """Asks the broker once for the group's committed offsets, and notes them."""
        asked = time.monotonic_ns()
        found = await self._admin.list_consumer_group_offsets(self.group, group_coordinator_id=self._coordinator)
        offsets = {at.partition: found[at].offset for at in found if at.topic == self.topic and found[at].offset >= 0}
        self.commits.append(CommitsAt(asked, time.monotonic_ns(), offsets))
        return self.commits[-1]

    async def _sample_commits(self) -> None:
        while True:
            await self.sample_commits()
            await asyncio.sleep(SAMPLE_INTERVAL)

    async def story(self) -> Story:
        """All that happened; the sampling has ended."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            if not self._watch.cancelled() and (error := self._watch.exception()) is not None:
                raise error
        await self.sample_commits()
        ends = await self.kafka.end_offsets(self.topic)
        return Story(dict(self.produced), tuple(self.observations.refresh().seen), tuple(self.commits), ends)


def skewed_keys(seed: int, keys: int = 100) -> Iterator[bytes]:
    """Keys without end, of which the n-th is n times as rare as the first."""
    chance = random.Random(seed)
    names = [b"k%02d" % number for number in range(keys)]
    weights = list(itertools.accumulate(1 / (number + 1) for number in range(keys)))
    while True:
        yield from chance.choices(names, cum_weights=weights, k=1_000)


def even_keys(seed: int, keys: int) -> Iterator[bytes]:
    """Keys without end, none more frequent than another."""
    chance = random.Random(seed)
    while True:
        yield b"k%d" % chance.randrange(keys)
