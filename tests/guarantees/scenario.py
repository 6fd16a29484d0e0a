"""A scenario: a topic, a group, member processes that join and leave, and the history of it all."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from aioshard import Record
from aioshard.core.sharding import shard_number
from tests.guarantees.behaviour import BAD, HANGING, Behaviour
from tests.guarantees.checks import CommitsAt, Guarantee, History, verify
from tests.guarantees.observations import Kind, Observations, RecordId
from tests.guarantees.process import Member
from tests.guarantees.sampling import Sampling
from tests.guarantees.side_topics import ids_of_dead_letters, live, parkings, requests, there
from tests.support.cluster import KafkaCluster, Message

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
READ_INTERVAL = 0.5

Policy = Literal["halt", "skip", "dead-letters", "parked"]

GroupProtocol = Literal["classic", "eager", "consumer", "mixed"]

_PROTOCOLS: Mapping[GroupProtocol, Mapping[str, Any]] = {
    "classic": {},
    "eager": {"assignor": "sticky"},
    "consumer": {"group_protocol": "consumer"},
    "mixed": {},
}
"""`eager` is the classic protocol too. Of a mixed group, every second member has the protocol `consumer`."""
PROTOCOLS = list(_PROTOCOLS)
_OF_THE_BROKER = {"session_timeout", "heartbeat_interval"}
"""Settings that belong to the broker under `consumer`; the tests' broker has much the same ones."""


class Scenario:
    """Owns the topic, the member processes and the observation of both; used with `async with`.

    Attributes:
        produced: The key of each record that was produced.
        failing: Those of them whose key fails until it is healed: nothing waits for them to finish.
        observations: The reports of the members.
        side_topic: The topic for dead letters or parked records, where there is one, else empty.
        kills: How many processes `kill` has killed.
        skipped: Records that somebody had skipped, and when.
        notes: Figures of a test for its report, by name.
        protocol: The group protocol of the members.
        shards: How many fixed shards the handler of each member has, unless `start` says it; None for shards on demand.
    """

    protocol: GroupProtocol = "classic"
    shards: int | None = None

    def __init__(self, kafka: KafkaCluster, topic: str, group: str, directory: Path) -> None:
        self.kafka = kafka
        self.topic = topic
        self.group = group
        self.directory = directory
        self.produced: dict[RecordId, str] = {}
        self.failing: set[RecordId] = set()
        self.side_topic = ""
        self.kills = 0
        self.skipped: dict[RecordId, int] = {}
        self.notes: dict[str, object] = {}
        self.observations = Observations(directory)
        self.members: dict[str, Member] = {}
        self.sampling = Sampling(kafka.bootstrap, group, topic)
        self._starts: dict[str, int] = {}
        self._policy: Policy = "halt"
        self._feeding: asyncio.Task[None] | None = None
        self._enough = False

    def beside(self, name: str) -> "Scenario":
        """A scenario of another topic, whose records the same members of the same group handle."""
        directory = self.directory / name
        directory.mkdir()
        other = Scenario(self.kafka, f"{self.topic}-{name}", self.group, directory)
        other.members = self.members
        other.sampling.survives = self.sampling.survives
        other.sampling.interval = self.sampling.interval
        return other

    def handled(self, **behaviour: Any) -> dict[str, Any]:
        """For `Behaviour.beside`: how members handle the records of this topic."""
        return {"directory": str(self.directory), "topic": self.topic, **behaviour}

    @property
    def commits(self) -> list[CommitsAt]:
        """The commits of the group, in order of time."""
        return self.sampling.commits

    async def __aenter__(self) -> Self:
        await self.sampling.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members.values():
            if member.alive:
                await member.kill()
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        await self.sampling.__aexit__()

    # Records --------------------------------------------------------------------------

    async def create(
        self,
        partitions: int,
        config: Mapping[str, str] | None = None,
        *,
        policy: Policy = "halt",
        side: Mapping[str, str] | None = None,
        side_partitions: int | None = None,
    ) -> None:
        """Creates the topic, and begins to sample the group's committed offsets.

        Args:
            partitions: How many.
            config: Of the topic.
            policy: The failure policy of the handler.
            side: Configuration of the topic for dead letters or parked records.
            side_partitions: How many that has, if others; 0 leaves it to its creator.
        """
        await self.kafka.create_topic(self.topic, partitions, config)
        self._policy = policy
        if policy in ("dead-letters", "parked"):
            self.side_topic = f"{self.topic}.{policy}"
            number = partitions if side_partitions is None else side_partitions
            if number:
                compacted = {"cleanup.policy": "compact"} if policy == "parked" else {}
                await self.kafka.create_topic(self.side_topic, number, compacted | dict(side or {}))
                await self.watch_side_topic()
        self.sampling.begin()

    async def watch_side_topic(self) -> None:
        """From now on samples tell the ends of the side topic too."""
        self.sampling.side = await self.kafka.partitions(self.side_topic)

    async def produce(self, messages: Sequence[Message], partition: int | None = None) -> list[RecordId]:
        """Appends records and notes them as produced."""
        record_ids = await self.kafka.produce(self.topic, messages, partition)
        for record_id, (key, _) in zip(record_ids, messages, strict=True):
            self.produced[record_id] = "" if key is None else key.decode()
            if key is not None and key.startswith((BAD, HANGING)):
                self.failing.add(record_id)
        return record_ids

    def keys_apart(self, prefix: bytes, count: int, *others: bytes) -> list[bytes]:
        """Keys of which none shares a fixed shard with one of *others*."""
        numbered = (b"%s%d" % (prefix, number) for number in itertools.count())
        if (shards := self.shards) is not None:
            taken = {shard_number(key, shards) for key in others}
            numbered = (key for key in numbered if shard_number(key, shards) not in taken)
        return list(itertools.islice(numbered, count))

    async def read_back(self) -> None:
        """Notes as produced what the log holds, and nothing else."""
        originals = await self.originals()
        self.produced = {record_id: (record.key or b"").decode() for record_id, record in originals.items()}
        self.failing = {
            record_id for record_id, key in self.produced.items() if key.startswith((BAD.decode(), HANGING.decode()))
        }

    def start_feeding(self, keys: Iterator[bytes], *, backlog: int, chunk: int, least: int = 0) -> None:
        """Begins to produce a chunk each time there are fewer than *backlog* unfinished records.

        Continues until `verify`, or `stop_feeding`, and *least* records, so that there is load as long as the scenario
        lasts.
        """
        self._feeding = asyncio.create_task(self._feed(keys, backlog, chunk, least), name="feed")

    async def _feed(self, keys: Iterator[bytes], backlog: int, chunk: int, least: int) -> None:
        while len(self.produced) < least or not self._enough:
            await self.until(lambda: self.unfinished < backlog, "the members have caught up with the feed", 90)
            first = len(self.produced)
            values = (None if number % 7 == 0 else b"%d" % number for number in itertools.count(first))
            await self.produce(list(zip(itertools.islice(keys, chunk), values, strict=False)))

    async def stop_feeding(self) -> None:
        """Lets the feed end when it has produced the least that it should."""
        self._enough = True
        if self._feeding is not None:
            await self._feeding

    # Members --------------------------------------------------------------------------

    def start(self, name: str, settings: Mapping[str, Any] | None = None, **behaviour: Any) -> Member:
        """Starts a process as member *name*, which does not run at the moment."""
        self._starts[name] = self._starts.get(name, 0) + 1
        process = f"{name}.{self._starts[name]}"
        of_protocol = _PROTOCOLS[self.protocol]
        everything = {**SHORT, "bootstrap_servers": self.kafka.bootstrap, **of_protocol, **(settings or {})}
        if self.protocol == "mixed" and ord(name[-1]) % 2:
            everything |= _PROTOCOLS["consumer"]
        if everything.get("group_protocol") == "consumer":
            everything = {name: value for name, value in everything.items() if name not in _OF_THE_BROKER}
            everything["rebalance_timeout"] += 4  # the heartbeat that is counted is the default one, 3 s
        behaviour = {"shards": self.shards, **behaviour}
        self.members[name] = Member(
            Behaviour(str(self.directory), process, self.group, self.topic, everything, **behaviour)
        )
        return self.members[name]

    async def until_settled(self, *names: str, timeout: float = 45.0) -> None:
        """Returns when all partitions are open, each in one of the members *names* and no other."""
        total = len(await self.kafka.partitions(self.topic))

        def is_shared() -> bool:
            owned = [list(self.members[name].partitions) for name in names]
            return all(owned) and sorted(number for numbers in owned for number in numbers) == list(range(total))

        await self.until(is_shared, f"{', '.join(names)} share {total} partitions", timeout)

    async def kill(self, name: str) -> None:
        """Kills a member, and asks what was committed by then."""
        await self.members[name].kill()
        await self.sample_commits()
        self.kills += 1

    def release(self) -> None:
        """Ends every run that hangs, also those to come."""
        self.tell("release")

    def heal(self, key: str | None = None) -> None:
        """Makes a key succeed from now on; None means every key."""
        self.tell("healed" if key is None else f"healed-{key}")

    def tell(self, what: str, *, holds: bool = True) -> None:
        """Tells all members something; see `Behaviour.directory`."""
        file = self.directory / what
        if holds:
            file.touch()
        else:
            file.unlink()

    # Waiting --------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
        """Returns when *condition*, on fresh observations, holds.

        Raises:
            AssertionError: It does not within *timeout* seconds; the message shows what the members printed.
            Exception: The error that ended the feed, or the sampling of commits.
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
        self.sampling.check()
        if self._feeding is not None and self._feeding.done() and not self._feeding.cancelled():
            self._feeding.result()

    @property
    def unfinished(self) -> int:
        """Records that were produced and have not finished, as of the last refresh; those that fail do not count."""
        finished = self.observations.finished
        return len(self.produced) - len(finished) - len(self.failing - finished)

    async def until_healthy_finished(self, timeout: float = 120.0) -> None:
        """Returns when every record has finished whose key does not fail."""
        await self.until(lambda: self.unfinished == 0, "every record of a healthy key has finished", timeout)

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

    async def until_nothing_is_parked(self, timeout: float = 120.0) -> None:
        """Returns when nothing in the park topic is parked, and every request to release something is answered."""
        give_up = time.monotonic() + timeout
        while live(records := await self.side_records()) or requests(records):
            if time.monotonic() > give_up:
                tails = "\n".join(member.tail for member in self.members.values())
                left = ", ".join([*live(records), *requests(records)])
                raise AssertionError(f"still parked, or not answered, after {timeout:g} s: {left}\n{tails}")
            await asyncio.sleep(READ_INTERVAL)

    async def verify(self, *guarantees: Guarantee) -> None:
        """Lets the feed end, waits until everything is committed, and asks the guarantees.

        When that does not come they are asked all the same, because they may know why.
        """
        try:
            await self.stop_feeding()
            await self.until_all_committed()
        except AssertionError:
            verify(await self.history(), *guarantees)
            raise
        verify(await self.history(), *guarantees)

    # The history ------------------------------------------------------------------------

    async def sample_commits(self) -> CommitsAt:
        """Asks the broker once for the group's committed offsets and the ends of the side topic, and notes them."""
        return await self.sampling.sample()

    async def originals(self) -> dict[RecordId, Record]:
        """All records of the topic, as the broker has them."""
        return {(record.partition, record.offset): record for record in await self.kafka.read(self.topic)}

    async def side_records(self) -> list[Record]:
        """All that the side topic holds, by partition and offset."""
        return await self.kafka.read(self.side_topic) if self.side_topic else []

    def figures(self) -> dict[str, object]:
        """Return the events in numbers."""
        seen = Counter(seen.kind for seen in self.observations.refresh().seen)
        return {
            "records": len(self.produced),
            "of failing keys": len(self.failing),
            "kills": self.kills,
            "runs": seen[Kind.STARTED],
            "finished": len(self.observations.finished),
            "finished again": seen[Kind.FINISHED] - len(self.observations.finished),
            "failed for good": seen[Kind.EXHAUSTED],
            **self.notes,
        }

    async def history(self) -> History:
        """All that happened; the sampling has ended."""
        await self.sampling.end()
        return await self.history_so_far()

    async def history_so_far(self) -> History:
        """All that has happened up to now."""
        await self.sample_commits()
        ends = await self.kafka.end_offsets(self.topic)
        seen = tuple(self.observations.refresh().seen)
        passed, let_go = await self._diverted()
        return History(dict(self.produced), seen, tuple(self.commits), ends, passed, let_go)

    async def _diverted(self) -> tuple[dict[RecordId, int], dict[RecordId, int]]:
        """When records that have not finished could be passed by a commit, and by others of their key."""
        passed, let_go = dict(self.skipped), dict(self.skipped)
        if self._policy == "skip":
            for seen in self.observations.seen:
                if seen.kind is Kind.EXHAUSTED:
                    passed[seen.record_id] = let_go[seen.record_id] = min(seen.at, passed.get(seen.record_id, seen.at))
        records, when = await self.side_records(), there(self.commits)
        found = parkings(records) if self._policy == "parked" else ids_of_dead_letters(records)
        for record_id, record in found:
            sampled = when(record.partition, record.offset)
            if sampled is None:
                continue
            passed[record_id] = min(sampled.by, passed.get(record_id, sampled.by))
            if self._policy == "dead-letters":
                let_go[record_id] = min(sampled.not_before, let_go.get(record_id, sampled.not_before))
        return passed, let_go


def skewed_keys(seed: int, keys: int = 100) -> Iterator[bytes]:
    """Endless keys, the n-th n times as rare as the first."""
    chance = random.Random(seed)
    names = [b"k%02d" % number for number in range(keys)]
    weights = list(itertools.accumulate(1 / (number + 1) for number in range(keys)))
    while True:
        yield from chance.choices(names, cum_weights=weights, k=1_000)


def even_keys(seed: int, keys: int) -> Iterator[bytes]:
    """Endless keys, all equally frequent."""
    chance = random.Random(seed)
    while True:
        yield b"k%d" % chance.randrange(keys)


def failing_keys(seed: int, keys: int, failing: int) -> Iterator[bytes]:
    """Endless keys, all equally frequent, of which *failing* are BAD ones."""
    chance = random.Random(seed)
    names = [b"%s%d" % (BAD if number < failing else b"k", number) for number in range(keys)]
    while True:
        yield chance.choice(names)
