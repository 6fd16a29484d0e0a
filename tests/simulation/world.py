"""Several processes of one group, simulated in one event loop, while everything goes wrong.

The real engine runs on the in-memory broker under virtual time. The runs of handlers are compared with the published
records, and the guarantees are asserted after every step of the loop.
"""

import asyncio
import bisect
import math
import random
import unittest.mock
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from aioshard import App, Context, Record, Retry
from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run, holds
from aioshard.engine.epoch import Epoch
from aioshard.engine.runtime import Engine
from aioshard.errors import AioshardError, ClientLostError, CommitError, CommitRefusedError, TransportError
from aioshard.ports import Committed, GroupListener, Membership, Message
from aioshard.records import TopicPartition
from aioshard.testing import InMemoryBroker, InMemoryProducer, InMemorySideTopics, InMemoryTransport
from aioshard.testing import run as run_virtually

TOPIC = "flights"
GROUP = "simulated"
DRAIN, COMMIT, SESSION = 2.0, 1.0, 6.0
SETTINGS: dict[str, Any] = {
    "auto_offset_reset": "earliest",
    "session_timeout": SESSION,
    "heartbeat_interval": 0.5,
    "rebalance_timeout": 10.0,
    "drain_timeout": DRAIN,
    "commit_timeout": COMMIT,
    "commit_interval": 0.2,
    "shutdown_timeout": 6.0,
    "start_timeout": None,
    "stuck_after": 3.0,
    "max_buffered_records": 40,
    "max_buffered_bytes": 40 * 600,
}
OVERSIZED = 30_000
MARGIN = 1.0
"""Seconds after the end of the session within which a member that is cut off has to have ended its runs."""


class TimedListener:
    """Notes when `revoked` takes longer than the timeouts of the group allow (I7)."""

    def __init__(self, listener: GroupListener, breaches: list[str]) -> None:
        self._listener = listener
        self._breaches = breaches

    def lost(self, partitions: Collection[TopicPartition]) -> None:
        self._listener.lost(partitions)

    async def revoked(self, partitions: Collection[TopicPartition]) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._listener.revoked(partitions)
        took = clock() - began
        if took > DRAIN + COMMIT + 0.01:
            self._breaches.append(f"I7: the revoke callback took {took} s")

    def assigned(self, partitions: Collection[TopicPartition], membership: Membership) -> None:
        self._listener.assigned(partitions, membership)


class ClusterTransport(InMemoryTransport):
    """A client whose engine is held to its deadline, and whose coordinator may have moved.

    A look-up of commits is answered after the commits that were sent before it, as on one connection.
    """

    breaches: list[str]
    cut_at = math.inf
    _answers_nothing = _answers_right = -math.inf

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unanswered = 0
        """Number of commits without an answer."""
        self._answered = asyncio.Event()

    async def start(
        self, topics: Collection[str], pattern: str | None, listener: GroupListener, *, needs_all: bool = True
    ) -> None:
        await super().start(topics, pattern, TimedListener(listener, self.breaches), needs_all=needs_all)

    def cut_off(self) -> None:
        super().cut_off()
        self.cut_at = min(self.cut_at, asyncio.get_running_loop().time())

    def reconnect(self) -> None:
        super().reconnect()
        self.cut_at = math.inf

    @property
    def is_overdue(self) -> bool:
        """Whether it has been cut off for so long that nothing of it may run any more."""
        return asyncio.get_running_loop().time() > self.cut_at + SESSION + MARGIN

    def ask_old_coordinator(self, seconds: float) -> None:
        """Ask a broker that is no longer the coordinator: its answers are errors at first, and empty later."""
        now = asyncio.get_running_loop().time()
        self._answers_nothing, self._answers_right = now + seconds / 2, now + seconds

    async def commit(
        self,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership,
        messages: Sequence[Message] | None = None,
    ) -> None:
        if asyncio.get_running_loop().time() < self._answers_right:
            raise CommitError("NOT_COORDINATOR")
        self._unanswered += 1
        self._answered.clear()
        try:
            await super().commit(offsets, membership, messages)
        finally:
            self._unanswered -= 1
            if not self._unanswered:
                self._answered.set()

    async def ask_offsets(
        self, partitions: Collection[TopicPartition]
    ) -> tuple[str | None, Mapping[TopicPartition, Committed | None]]:
        """The answer of the broker that is asked: its top-level error, and the partitions that are in it."""
        if self._unanswered:
            await self._answered.wait()
        found = await super().committed(partitions)
        now = asyncio.get_running_loop().time()
        if now < self._answers_right:
            return ("NOT_COORDINATOR" if now < self._answers_nothing else None), {}
        return None, found

    async def committed(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Committed | None]:
        error, found = await self.ask_offsets(partitions)
        if error is not None or len(found) < len(partitions):
            raise TransportError(error or "a partition is missing in the answer")
        return found


class Process:
    """One member: an app with its client and the current runs of its handler."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.number = number
        self.running: dict[bytes, Record] = {}
        self.told_to_end: set[Record] = set()
        """Those of them that were cancelled, and may take their time."""
        self.transports: list[ClusterTransport] = []
        self.app = self._app()
        self.finish = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"process {number}")
        self.alive = True

    @property
    def engine(self) -> Engine | None:
        return self.app._engine

    def _app(self) -> App:
        app = App(GROUP, **SETTINGS | {"auto_offset_reset": self.world.reset} | dict(self.world.settings))
        options = self.world.shards | self.world.consume_options()

        @app.consume(TOPIC, shard_by=self.world.shard_by, **options)
        async def handle(record: Record, context: Context) -> None:
            await self.world.handle(self, record, context)

        return app

    def _make_transport(self) -> ClusterTransport:
        world = self.world
        transport = world.transport_class(
            world.broker,
            GROUP,
            latency=world.latency,
            max_batch_records=world.rng.choice([3, 10, 500]),
            max_fetch_offsets=world.rng.choice([None, 5]),
            rebalance_timeout=SETTINGS["rebalance_timeout"],
            session_timeout=SESSION,
        )
        transport.breaches = world.breaches
        self.transports.append(transport)
        return transport

    def _make_producer(self) -> InMemoryProducer:
        world = self.world
        return InMemoryProducer(world.broker, latency=lambda: world.latency("publish"), timeout=5.0)

    def _make_side_topics(self) -> InMemorySideTopics:
        return InMemorySideTopics(self.world.broker, max_records=self.world.rng.choice([3, 500]))

    @property
    def runs(self) -> bool:
        """Whether it has started."""
        return self.engine is not None and self.engine.state == "running"

    @property
    def member_id(self) -> str:
        """The id under which its client has joined, also if the group has forgotten it."""
        return self.transports[-1]._member_id if self.transports else ""

    @property
    def is_member(self) -> bool:
        """Whether the group has not dropped it."""
        return self.member_id in self.world.broker.group(GROUP).members

    def has_told_to_end(self, record: Record) -> bool:
        """Whether a run was cancelled; it may hear of that in the next turn of the loop."""
        workers = () if self.engine is None else self.engine.handlers.workers
        cancelled = (delivery.record for worker in workers if worker.cancelled for delivery in worker.deliveries)
        return record in self.told_to_end or record in cancelled

    @property
    def is_overdue(self) -> bool:
        """Whether its client is cut off, and its session has been over for a while."""
        return bool(self.transports) and self.transports[-1].is_overdue

    async def _run(self) -> None:
        try:
            async with self.app.started(
                self._make_transport, self._make_producer, self._make_side_topics, now=self.world.broker.now
            ):
                await self.finish.wait()
        except AioshardError as error:
            if self.alive and not isinstance(error, AioshardError):
                raise

    async def stop(self) -> None:
        """As SIGTERM does."""
        self.finish.set()
        await asyncio.wait([self.task])
        self.alive = False
        if not self.task.cancelled() and self.task.exception() is not None:
            raise self.task.exception()  # type: ignore[misc]

    async def kill(self) -> None:
        """As `kill -9` does: nothing of it reaches the broker any more."""
        self.alive = False
        for transport in self.transports:
            transport.crash()
        engine = self.engine
        if engine is not None:
            for worker in engine.handlers.workers:
                worker.interrupt()
            await engine._tasks.close(0.0)
        self.task.cancel()
        self.running.clear()


class World:
    """The broker, the processes, and the published and processed records."""

    transport_class: type[ClusterTransport] = ClusterTransport
    settings: Mapping[str, Any] = {}
    """Settings of the apps besides `SETTINGS`."""

    def __init__(self, seed: int, *, shard_by: Any = "key", fixed_shards: bool = False, clean: bool = False) -> None:
        self.clean = clean
        """Whether nothing fails and every handler is quick: then nothing may run twice (I12)."""
        self.rng = random.Random(seed)
        self.reset = "latest" if seed % 3 == 0 else "earliest"
        self.broker = InMemoryBroker(partitions=3, clock=lambda: 0.0)
        self.broker.create_topic(TOPIC, 3)
        self.shard_by = shard_by
        fixed = {"shards": 5, "shard_queue_size": (None, 1, 4)[seed // 4 % 3]}
        self.shards: dict[str, Any] = fixed if fixed_shards else {"concurrency": 4}
        self.calm = False
        self.done: dict[TopicPartition, set[int]] = defaultdict(set)
        self.offsets: dict[TopicPartition, list[int]] = defaultdict(list)
        self.of_key: dict[tuple[TopicPartition, bytes], list[int]] = defaultdict(list)
        self.processes: list[Process] = []
        self.runs = 0
        self.committed_runs = 0
        """Runs of finished records that were stored with commits."""
        self.latest: dict[TopicPartition, tuple[Committed, Sequence[Run]]] = {}
        """The latest commit of each partition, and its stored completions."""
        self.breaches: list[str] = []
        """Breaches found in tasks of the engine or transport, where raising would not end the test."""
        self._checked: dict[TopicPartition, int] = defaultdict(int)
        self._checked_commits = 0
        self._number = 0

    def consume_options(self) -> dict[str, Any]:
        """How the handlers of all processes are registered."""
        return {"retry": Retry(attempts=1000, initial=0.05, maximum=1.0)}

    # Handlers --------------------------------------------------------------------------

    async def handle(self, process: Process, record: Record, context: Context) -> None:  # noqa: ARG002 - the other form is tested too
        """Run one attempt, of a length that chance decides, and check the runs that may be concurrent."""
        self.runs += 1
        self._check_start(process, record)
        self._check_not_stored(process, record)
        key = record.key
        if key is not None:
            process.running[key] = record
        try:
            if await self._work(process, record) and process.alive:
                self.done[record.topic_partition].add(record.offset)
        finally:
            if key is not None and process.running.get(key) is record:
                del process.running[key]

    async def _work(self, process: Process, *records: Record) -> bool:
        """Whether the work was done; a run that was cancelled and returns nevertheless has done nothing."""
        chance = self.rng.random()
        if self.clean:
            # Even all that may be buffered, of one key, then fits a drain.
            await asyncio.sleep(self.rng.choice([0, 0.001, 0.02, 0.04]))
            return True
        if self.calm or chance < 0.5:
            if chance < 0.2:
                await asyncio.sleep(0.001)
            return True
        if chance < 0.58:
            message = "a failing attempt"
            raise ValueError(message)
        if chance < 0.95:
            await asyncio.sleep(self.rng.choice([0, 0.001, 0.02, 0.3]))
            return True
        try:
            await asyncio.sleep(20.0)  # outlasts every drain
        except asyncio.CancelledError:
            if chance < 0.97:
                raise
            process.told_to_end.update(records)
            await asyncio.sleep(self.rng.choice([0, 1.0, 4.0]))  # swallows its cancellation
            if chance < 0.98:
                message = "cancelled, and took its time"
                raise ValueError(message) from None
            return False
        return True

    def _check_start(self, process: Process, record: Record) -> None:
        key = record.key
        if key is None:
            return
        other = process.running.get(key)
        if other is not None:
            self._breach(f"I4: {record.offset} starts while {other} of its key runs in process {process.number}")
        topic_partition = record.topic_partition
        self._check_other_processes(process, record)
        earlier = self.of_key[topic_partition, key]
        done = self.done[topic_partition]
        for offset in reversed(earlier[: earlier.index(record.offset)]):
            if offset not in done and not self.is_terminal(topic_partition, offset):
                self._breach(f"I4: {topic_partition} {record.offset} starts before {offset} of its key was done")

    def _check_other_processes(self, process: Process, record: Record) -> None:
        """A member starts nothing once its session is over, and no two members run a key concurrently."""
        process.told_to_end.discard(record)
        if process.is_overdue:
            self._breach(f"I4: {record} starts in process {process.number}, cut off for longer than its session")
        for other in self.living:
            rival = other.running.get(record.key or b"") if other is not process else None
            if rival is None or rival.topic_partition != record.topic_partition or other.has_told_to_end(rival):
                continue
            if process.is_overdue or other.is_overdue or (process.is_member and other.is_member):
                self._breach(
                    f"I4: {record} starts in process {process.number} while {rival} of its key runs in {other.number}"
                )

    def _check_not_stored(self, process: Process, record: Record) -> None:
        """Check that the next owner does not rerun completions of the group's latest commit.

        A process that the group has dropped, and that has not heard of it, may run what its successor has finished.
        """
        transport = process.engine.client.transport if process.engine is not None else None
        owner = self.broker.group(GROUP).owner(record.topic_partition)
        if transport is None or transport.membership().member_id != owner:
            return
        committed, finished = self.latest.get(record.topic_partition, (None, ()))
        now = self.broker.group(GROUP).committed(record.topic_partition)
        again = self.runs_again(record.topic_partition, record.offset)
        below = now is not None and record.offset < now.offset
        if not again and (below or (committed == now and holds(finished, record.offset))):
            self._breach(f"I12: {record.topic_partition} {record.offset} runs, and was committed as finished")

    def _breach(self, sentence: str) -> None:
        self.breaches.append(sentence)

    def is_terminal(self, topic_partition: TopicPartition, offset: int) -> bool:  # noqa: ARG002 - for other worlds
        """Whether a record that was not processed has reached its end otherwise."""
        return False

    def runs_again(self, topic_partition: TopicPartition, offset: int) -> bool:  # noqa: ARG002 - for other worlds
        """Whether a record that is complete may be run again because it is parked."""
        return False

    def may_be_passed(self, topic_partition: TopicPartition, offset: int) -> bool:
        """Whether a commit may pass a record that was not processed."""
        return self.is_terminal(topic_partition, offset)

    # Invariants of every step ------------------------------------------------------------

    def check(self) -> None:
        """Assert the guarantees; called after every step of the event loop."""
        assert not self.breaches, self.breaches
        commits = self.broker.commits
        while self._checked_commits < len(commits):
            request = commits[self._checked_commits]
            self._checked_commits += 1
            if request.applied:
                assert request.owned, f"I9: {request} was accepted for a partition that was not ours"
                for topic_partition, committed in request.offsets.items():
                    self._check_never_ahead(topic_partition, committed.offset)
                    self._check_stored(topic_partition, committed)
        for process in self.processes:
            if process.alive and process.engine is not None:
                check_engine(process.engine)

    def _check_never_ahead(self, topic_partition: TopicPartition, committed: int) -> None:
        before = self.latest.get(topic_partition, (Committed(0, ""), ()))[0].offset
        assert committed >= before, f"I3: {topic_partition} was committed to {before}, and then to {committed}"
        done = self.done[topic_partition]
        offsets = self.offsets[topic_partition]
        index = self._checked[topic_partition]
        while index < len(offsets) and offsets[index] < committed:
            passed = offsets[index] in done or self.may_be_passed(topic_partition, offsets[index])
            assert passed, f"I1: {topic_partition} was committed to {committed} past {offsets[index]}"
            index += 1
        self._checked[topic_partition] = index

    def _check_stored(self, topic_partition: TopicPartition, committed: Committed) -> None:
        """Check that stored completions are finished: nobody runs them again."""
        metadata = CommitMetadata.read(committed.metadata, committed.offset)
        assert not metadata.ignored, f"{topic_partition}: {metadata.ignored}"
        offsets, done = self.offsets[topic_partition], self.done[topic_partition]
        for run in metadata.finished:
            for number in range(bisect.bisect_left(offsets, run.start), bisect.bisect_left(offsets, run.end)):
                offset = offsets[number]
                passed = offset in done or self.may_be_passed(topic_partition, offset)
                assert passed, f"I1: {topic_partition} {offset} was stored as finished with commit {committed.offset}"
        self.committed_runs += len(metadata.finished)
        self.latest[topic_partition] = committed, metadata.finished

    # Events ------------------------------------------------------------------------------

    def latency(self, operation: str) -> float:
        """Most requests are quick; some take as long as a commit may."""
        if self.calm or self.clean:
            return 0.0
        if operation == "heartbeat":
            return self.rng.choice([0.0, 0.1, 0.5])
        return self.rng.choice([0.0, 0.0, 0.001, 0.02, 0.02, 0.4])

    def publish(self, count: int) -> None:
        """Add records, some without a key, some large, with holes between them."""
        for _ in range(count):
            key = self.rng.choice([None, b"hot", b"hot", *(b"k%d" % number for number in range(6))])
            value = b"x" * (OVERSIZED if self.rng.random() < 0.01 else self.rng.choice([1, 1, 400]))
            record = self.broker.publish(TOPIC, value, key=key, partition=self.rng.randrange(3))
            self.offsets[record.topic_partition].append(record.offset)
            if key is not None:
                self.of_key[record.topic_partition, key].append(record.offset)
            if self.rng.random() < 0.1:
                self.broker.log(TOPIC, record.partition).skip(self.rng.randrange(1, 8))

    async def live_through(self, events: int, pauses: Sequence[float]) -> None:
        """Live a life: the given number of events, and then the end of all trouble."""
        self.start_process()
        if self.reset == "latest":  # what is there before the group has a position does not count
            positions = self.broker.group(GROUP).committed
            await self.broker.until(lambda: all(positions(TopicPartition(TOPIC, number)) for number in range(3)))
        self.publish(30)
        for _ in range(events):
            await self.something_happens()
            await asyncio.sleep(self.rng.choice(pauses))
        await self.calm_down()
        for process in self.living:
            await stop_quietly(process)

    def start_process(self) -> None:
        self._number += 1
        self.processes.append(Process(self, self._number))

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    async def something_happens(self) -> None:  # noqa: C901, PLR0912 - one line for each thing that may happen
        """One event, drawn by chance."""
        living = self.living
        action = self.rng.choice(
            ["publish"] * 3 + ["rebalance", "start", "stop"]
            if self.clean
            else ["publish"] * 6
            + ["rebalance", "rebalance", "revoke", "assign", "lose", "lose one", "commit error", "commit refused"]
            + ["acknowledgement lost", "client lost", "start", "stop", "kill", "away", "truncate", "outside commit"]
            + ["coordinator moves", "cut off", "leader"]
        )
        group = self.broker.group(GROUP)
        partition = self.rng.randrange(3)
        match action:
            case "publish":
                self.publish(self.rng.randrange(1, 40))
            case "rebalance":
                self.broker.group(GROUP).rebalance()
            case "revoke":
                self.broker.group(GROUP).revoke(TopicPartition(TOPIC, partition))
            case "assign":
                for withheld in sorted(group.withheld):
                    self.broker.group(GROUP).assign(withheld)
            case "lose":
                self.broker.group(GROUP).lose()
            case "lose one" if group.members:
                group.leave(self.rng.choice(group.members))
            case "commit error":
                self.broker.fail_next_commit(CommitError("the broker had no time"))
            case "commit refused":
                self.broker.fail_next_commit(CommitRefusedError("the broker says the group has moved on"))
            case "acknowledgement lost":
                self.broker.fail_next_commit(CommitError("the answer was lost"), applied=True)
            case "client lost":
                self.broker.fail_next_poll(ClientLostError("the client died"))
            case "start" if len(living) < 3:
                self.start_process()
            case "stop" if len(living) > 1:
                await stop_quietly(self.rng.choice(living))
            case "kill" if len(living) > 1:
                await self.rng.choice(living).kill()
            case "away":
                self.broker.available = not self.broker.available
            case "outside commit":
                self._progress_outside([name for name in group.withheld if group.owner(name) is None])
            case "truncate":
                self._truncate(TopicPartition(TOPIC, partition))
            case "coordinator moves":
                await self._move_coordinator()
            case "cut off" if living:
                self.cut_off(self.rng.choice(living), self.rng.choice([0.3, 3.0, 12.0]))
            case "leader":
                led = TopicPartition(TOPIC, partition) not in self.broker.leaderless
                self.broker.set_leader(TOPIC, partition, available=not led)
            case _:
                pass

    async def _move_coordinator(self) -> None:
        """Each client learns of it at its own time; in half of the cases a member dies meanwhile."""
        if len(self.living) > 1 and self.rng.random() < 0.5:
            await self.rng.choice(self.living).kill()
        for process in self.living:
            for transport in process.transports:
                transport.ask_old_coordinator(self.rng.choice([0.1, 1.0, 8.0]))

    def cut_off(self, process: Process, seconds: float) -> None:
        """Let nothing of the coordinator reach a process for a while."""
        for transport in process.transports[-1:]:
            transport.cut_off()
            asyncio.get_running_loop().call_later(seconds, transport.reconnect)

    def _progress_outside(self, withheld: Collection[TopicPartition]) -> None:
        """Somebody outside who has the withheld partitions processes and commits some records."""
        for topic_partition in sorted(withheld):
            offsets = self.offsets[topic_partition]
            committed = self.broker.committed(GROUP, *topic_partition) or 0
            upto = self.rng.choice([offset for offset in offsets if offset >= committed] or [committed])
            self.done[topic_partition].update(offset for offset in offsets if offset < upto)
            self.broker.group(GROUP).commit_from_outside({topic_partition: max(upto, committed)})

    def _truncate(self, topic_partition: TopicPartition) -> None:
        """Retention deletes the start of a log, records that nobody has processed among them."""
        offsets = self.offsets[topic_partition]
        if offsets:
            before = self.rng.choice(offsets)
            self.done[topic_partition].update(offset for offset in offsets if offset < before)
            self.broker.log(TOPIC, topic_partition.partition).truncate_before(before)

    async def calm_down(self) -> None:
        """Nothing goes wrong any more: everything has to be processed and committed (I3, I10, I11)."""
        self.calm = True
        self.broker.available = True
        for withheld in sorted(self.broker.group(GROUP).withheld):
            self.broker.group(GROUP).assign(withheld)
        if not self.living:
            self.start_process()
        if not all(topic_partition not in self.broker.leaderless for topic_partition in self.offsets):
            self.start_process()
            await self._until_finished()  # what has a leader
        for topic_partition in self.offsets:
            self.broker.set_leader(*topic_partition, available=True)
        await self._until_finished()

    async def _until_finished(self) -> None:
        deadline = asyncio.get_running_loop().time() + 600.0
        while not (self.finished() and all(process.runs for process in self.living)):
            assert asyncio.get_running_loop().time() < deadline, "I11: nothing moves\n" + self.describe()
            self.release_all()
            await asyncio.sleep(0.5)

    def release_all(self) -> None:
        """Do what an operator does; nothing, where nothing halts."""

    def finished(self) -> bool:
        """Whether all partitions that have a leader are processed and committed."""
        return all(
            all(offset in self.done[tp] or self.is_terminal(tp, offset) for offset in offsets)
            and (self.broker.committed(GROUP, *tp) or 0) >= self.broker.log(*tp).end
            for tp, offsets in self.offsets.items()
            if tp not in self.broker.leaderless
        )

    def describe(self) -> str:
        lines = [
            f"{tp}: missing {sorted(set(offsets) - self.done[tp])[:5]}, committed "
            f"{self.broker.committed(GROUP, *tp)}, end {self.broker.log(*tp).end}"
            for tp, offsets in self.offsets.items()
        ]
        for process in self.living:
            lines.append(process.app.explain())
            if process.engine is not None and process.engine.failed.done():
                lines.append(f"failed with {process.engine.failed.exception()!r}")
        return "\n".join(lines)


def live(life: Coroutine[Any, Any, None], *, seed: int, on_step: Callable[[], None]) -> None:
    """Run a life of a world, in which the clock of the wall is that of the loop: so a seed repeats its run.

    Parked records are due by that clock, also in a process that starts later.
    """
    with unittest.mock.patch("time.time", new=_wall_clock):
        run_virtually(life, seed=seed, on_step=on_step)


def _wall_clock() -> float:
    try:
        return 1_700_000_000.0 + asyncio.get_running_loop().time()
    except RuntimeError:  # the log asks too, before the loop runs and after it
        return 1_700_000_000.0


async def stop_quietly(process: Process) -> None:
    """Stop a process whose handlers may outlast its shutdown timeout."""
    try:
        await process.stop()
    except AioshardError:
        process.alive = False


def check_engine(engine: Engine) -> None:
    """Check the invariants of one engine between two steps."""
    epochs: list[Epoch] = [*engine.rebalance.partitions]
    read_ahead = [handler.parking.replays.read_ahead for handler in engine.handlers if handler.parking is not None]
    for handler in engine.handlers:
        if handler.parking is not None:
            epochs += handler.parking.partitions
    records = sum(epoch.held_usage.records for epoch in epochs) + sum(usage.records for usage in read_ahead)
    size = sum(epoch.buffered_bytes for epoch in epochs) + sum(usage.bytes for usage in read_ahead)
    oversized = 2 if any(handler.parking is not None for handler in engine.handlers) else 1
    buffer = engine.buffer
    unsent = sum(epoch.unsent_bytes for epoch in epochs)
    assert (buffer.records, buffer.bytes) == (records, size + unsent), (
        "I6: the buffer's count is not what the epochs hold"
    )
    assert records <= buffer.bounds.records, f"I6: {records} records are buffered"
    # One record larger than the bound is admitted alone, and so is one that is run again.
    alone = oversized * (OVERSIZED + 600)
    assert size <= buffer.bounds.bytes or size - alone <= buffer.bounds.bytes, f"I6: {size} bytes"
    for partition in engine.rebalance.partitions:
        committable, committed = partition.tracker.committable, partition.commits.acknowledged
        assert committed is None or partition.gate or committed <= committable, "I1: ahead of ourselves"
