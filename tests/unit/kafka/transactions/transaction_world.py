"""Processes that read, publish and commit in transactions, and all that may go wrong around them.

Everything happens in virtual time and by one random number generator, so each seed is another history.

    run_history(seed)   # raises `ViolationError`
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

from aioshard.errors import AioshardError, ClientLostError, MessagesRefusedError, TransportError
from aioshard.kafka.offsets import GroupOffsets, Member
from aioshard.kafka.transactions.identity import TransactionalId
from aioshard.kafka.transactions.transactions import Transactions
from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    OFFSET_FETCH,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.kafka.wire.start import new_cluster
from aioshard.ports import Message
from aioshard.records import TopicPartition
from tests.support.memory_network import MemoryNetwork, run_on_network
from tests.support.model_broker import Received
from tests.support.model_cluster import ModelCluster
from tests.support.model_producers import Identity
from tests.support.model_transaction_state import State
from tests.support.model_transactions import HELD, LOST_ANSWER, LOST_REQUEST, NO_FAULT, Fault, ModelTransactions
from tests.support.model_transactions import failed as failed_with
from tests.support.model_transactions import refused as refused_with

GROUP = "group"
INPUTS = [TopicPartition("inputs", 0), TopicPartition("inputs", 1)]
OUTPUTS = "outputs"
OUTPUT_PARTITIONS = 3
RECORDS = 40
"""Records of each input."""
TIMEOUT = 8.0
"""Seconds of a transaction, and of each call."""
FAULTS_END = 20.0
CALM = 100.0
"""Seconds after the last fault in which all records must be done."""

REFUSALS: Mapping[Api, Sequence[int]] = {
    FIND_COORDINATOR: [15, 15, 14],
    INIT_PRODUCER_ID: [51, 51, 14, 15, 16, 7, -1],
    ADD_PARTITIONS_TO_TXN: [51, 51, 3, 29, 17, 48, 14, 15, 16, 7, -1, 47, 49, 90, 120, 53],
    ADD_OFFSETS_TO_TXN: [51, 51, 30, 48, 14, 15, 16, 7, -1, 47, 49, 90, 120, 53],
    PRODUCE: [
        *(3, 5, 6, 56, 72, 74, 75, 100, 19, 51, 14, 15, 16, 7, 20, -1),
        *(10, 18, 17, 32, 43, 44, 76, 87, 29, 31, 45, 59, 2, 47, 48, 120, 49, 90, 53, 99),
    ],
    TXN_OFFSET_COMMIT: [
        *(22, 25, 27, 82, 113, 12, 28, 3, 7, 14, 15, 16, 51, 29, 30, 47, 48, 49, 90, 120, -1, 99),
    ],
    END_TXN: [7, 14, 15, 16, 51, 51, 48, 47, 49, 90, 120, -1, 53, 99],
    OFFSET_FETCH: [14, 15, 16, 7, -1],
}
"""Codes of requests that brokers do not handle."""
FAILURES: Mapping[Api, Sequence[int]] = {
    INIT_PRODUCER_ID: [7, -1],
    ADD_PARTITIONS_TO_TXN: [7, -1],
    ADD_OFFSETS_TO_TXN: [7, -1],
    PRODUCE: [7, 20, -1, 3, 5, 6, 56, 99],
    TXN_OFFSET_COMMIT: [7, -1, 99],
    END_TXN: [7, -1, 99],
}
"""Codes of requests that brokers handle all the same."""
KINDS = ("lost request", "lost answer", "held", "slow", "incomplete", "failed", "refused")
"""The kinds of faults."""
_OF_PARTS = (ADD_PARTITIONS_TO_TXN, PRODUCE, TXN_OFFSET_COMMIT)
_CANNOT_COMMIT = 48


class ViolationError(AssertionError):
    """Something that must never happen."""


def outputs_of(source: TopicPartition, offset: int) -> list[Message]:
    """The messages of a record: none, one or two."""
    count = (offset * 7 + source.partition) % 3
    return [
        Message(
            OUTPUTS,
            f"{source.partition}.{offset}.{number}".encode(),
            partition=(offset * 5 + number * 2 + source.partition) % OUTPUT_PARTITIONS,
        )
        for number in range(count)
    ]


@dataclass(frozen=True)
class Plan:
    """The kind of a history.

    Attributes:
        levels: The levels of `transaction.version`, of which each change takes the next one.
        most_epoch: The largest epoch.
        repeats_last_epoch: See `Coordinator`.
        fault_rate: The probability of a fault of a request.
        apis: The requests with such faults; None for all.
        kinds: The kinds of such faults.
        is_quiet: Whether nothing else happens, except that late requests arrive.
        forgets_ids: Whether the coordinator forgets transactional ids, as after days without a transaction.
    """

    levels: Sequence[int]
    most_epoch: int = 2**15 - 1
    repeats_last_epoch: bool = True
    fault_rate: float = 0.15
    apis: Collection[Api] | None = None
    kinds: Sequence[str] = KINDS
    is_quiet: bool = False
    forgets_ids: bool = False


def plan_of(rng: random.Random) -> Plan:
    """Chooses a plan: mostly the second version."""
    return Plan(
        levels=rng.choice([[2], [2], [2], [1], [0], [2, 1], [1, 2]]),
        most_epoch=rng.choice([2**15 - 1, 2**15 - 1, 6, 15]),
        fault_rate=rng.choice([0.02, 0.06, 0.15]),
    )


@dataclass
class Assignment:
    """The membership of a process, as the group has told it."""

    member: Member
    partitions: Collection[TopicPartition]


NOTHING = Assignment(Member(0, "nobody"), ())


class Process:
    """A process with its engine: it reads inputs, publishes their outputs and commits, in transactions.

    A transaction that was not committed is put back. After one with an unknown outcome, it begins again at the
    committed offsets.
    """

    def __init__(self, world: "World", name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.member_id = f"{name}-{number}"
        self.transactional = world.new_id(f"{GROUP}:{name}")
        self.assignment = NOTHING
        self.ended: BaseException | None = None
        self._positions: dict[TopicPartition, int] = {}
        self._known: Assignment = NOTHING
        self._clients: list[tuple[Cluster, Transactions]] = []
        self.task = asyncio.create_task(self._run(), name=self.member_id)

    async def kill(self) -> None:
        """Ends it as `kill -9` does: nothing more is sent."""
        self.world.model.trace.append(f"{self.world.now:8.3f} {self.member_id} is killed")
        for cluster, _ in self._clients:
            await cluster.close()
        self.task.cancel()
        await asyncio.wait([self.task])

    async def stop(self) -> None:
        """Ends it in good order."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        """Works with one client after the other."""
        try:
            while True:
                await self._live()
        except AioshardError as error:
            self.ended = error
            if self.transactional.is_fenced:
                self.world.check_fenced(self)

    async def _live(self) -> None:
        world = self.world
        cluster = new_cluster(world.brokers.settings)
        cluster.start()
        offsets = GroupOffsets(cluster, GROUP)
        transactions = world.new_transactions(cluster, self.transactional, offsets)
        client = (cluster, transactions)
        self._clients.append(client)
        self._positions.clear()
        until = world.now + world.rng.choice([5.0, 20.0, 1000.0])
        try:
            while world.now < until or world.is_calm:
                await self._step(transactions, offsets)
        finally:
            await transactions.close()
            await cluster.close()
            self._clients.remove(client)

    async def _step(self, transactions: Transactions, offsets: GroupOffsets) -> None:
        assignment = self.assignment
        if assignment.member.generation > self._known.member.generation + 1:
            self._positions.clear()  # others may have had them meanwhile
        self._known = assignment
        self._positions = {
            name: position for name, position in self._positions.items() if name in assignment.partitions
        }  # fmt: skip
        if assignment.partitions - self._positions.keys():
            await self._begin_again(transactions, offsets, assignment)
        batch = self._choose()
        if batch is None:
            await asyncio.sleep(0.5)
            return
        if not self.world.is_calm:
            await asyncio.sleep(self.world.rng.choice([0.0, 0.05, 0.3]))
        messages, next_positions = batch
        undecided = transactions.counts.undecided
        patience = self.world.rng.choice([0.01, 0.1, 1.0]) if self.world.happens(0.03) else 1000.0
        try:
            async with asyncio.timeout(patience):
                await transactions.commit(messages, self._offsets(next_positions), assignment.member)
        except (MessagesRefusedError, WireError) as refused:
            self._note(f"refused: {refused}")
            await asyncio.sleep(0.1)
        except (TransportError, TimeoutError) as error:
            is_known = transactions.counts.undecided == undecided and not isinstance(error, TimeoutError)
            self._note(f"{'aborted' if is_known else 'unknown'}: {error}")
            if isinstance(error, ClientLostError):
                raise
            if not is_known or self.world.happens(0.3):
                self._positions.clear()
        else:
            self._note(f"committed {next_positions}")
            self._positions |= next_positions

    def _note(self, text: str) -> None:
        self.world.model.trace.append(f"{self.world.now:8.3f} {self.member_id} {text}")

    async def _begin_again(
        self, transactions: Transactions, offsets: GroupOffsets, assignment: Assignment
    ) -> None:  # fmt: skip
        """Reads the committed offsets, when no transaction may change them any more."""
        committed: Mapping[TopicPartition, CommittedOffset] | None = None
        while committed is None:
            if self.assignment is not assignment:
                return
            try:
                await transactions.settle()
                committed = await offsets.committed(sorted(assignment.partitions))
            except ClientLostError:
                raise
            except (TransportError, WireError) as error:
                self._note(f"cannot begin: {error}")
                await asyncio.sleep(0.2)
        for name in sorted(assignment.partitions):
            known = committed.get(name)
            self.world.check(known is None or known.metadata == _text(known.offset), f"{known} has another text")
            self._positions[name] = 0 if known is None else known.offset
        self._note(f"begins at {self._positions}")

    def _choose(self) -> tuple[list[Message], dict[TopicPartition, int]] | None:
        """Chooses the records of the next transaction: the outputs, and the positions behind them."""
        messages: list[Message] = []
        positions: dict[TopicPartition, int] = {}
        for name, position in sorted(self._positions.items()):
            count = min(self.world.rng.randint(0, 3), RECORDS - position)
            for offset in range(position, position + count):
                messages += outputs_of(name, offset)
            if count:
                positions[name] = position + count
        return (messages, positions) if positions else None

    def _offsets(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, CommittedOffset]:
        return {name: CommittedOffset(position, -1, _text(position)) for name, position in positions.items()}


def _text(offset: int) -> str:
    return f"up to {offset}"


class World:
    """Processes, brokers and faults.

    Attributes:
        new_transactions: Makes the producer of a client, the one that is tested.
    """

    def __init__(self, network: MemoryNetwork, seed: int, plan: Plan | None = None) -> None:
        self.rng = random.Random(seed)
        self.plan = plan or plan_of(self.rng)
        self.brokers = ModelCluster(network, 2)
        self.brokers.create("inputs", len(INPUTS))
        self.brokers.create(OUTPUTS, OUTPUT_PARTITIONS)
        self.model = ModelTransactions(self.brokers, GROUP, level=self.plan.levels[0])
        self.model.coordinator.most_epoch = self.plan.most_epoch
        self.model.coordinator.repeats_last_epoch = self.plan.repeats_last_epoch
        self.model.sweep = 2.0
        self.model.choose_fault = self.choose_fault
        self.model.marker_delay = lambda: self.rng.choice([0.001, 0.01, 0.05, 0.3])
        self.is_calm = False
        self.processes: list[Process] = []
        self.violations: list[str] = []
        self._levels = itertools.cycle(self.plan.levels)
        self._numbers = itertools.count(1)
        self._epochs_of_new_processes: list[str] = []
        self._watch_new_processes()

    # The clients under test -------------------------------------------------------------------

    def new_id(self, name: str) -> TransactionalId:
        """Makes the transactional id of a process."""
        return TransactionalId(name)

    def new_transactions(self, cluster: Cluster, transactional: TransactionalId, offsets: GroupOffsets) -> Transactions:
        """Makes the producer of a client."""
        return Transactions(cluster, transactional, offsets, GROUP, timeout=TIMEOUT)

    # Time and chance ------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return asyncio.get_running_loop().time()

    def happens(self, probability: float) -> bool:
        """Whether something rare happens; never in calm times."""
        return not self.is_calm and self.rng.random() < probability

    def check(self, fact: bool, text: str) -> None:
        """Notes a violation unless a fact is true."""
        if not fact:
            self.violations.append(f"{self.now:.3f}: {text}")

    # Fences ---------------------------------------------------------------------------

    def _watch_new_processes(self) -> None:
        """Notes each epoch that is issued to a producer without one: it fences the producer that has the id."""
        init = self.model.coordinator.init

        def watched(transactional_id: str, timeout: float, expected: Identity | None) -> tuple[int, Identity]:
            answer = init(transactional_id, timeout, expected)
            if expected is None:
                self._epochs_of_new_processes.append(transactional_id)
            return answer

        self.model.coordinator.init = watched  # type: ignore[method-assign]

    def check_fenced(self, process: Process) -> None:
        """Only a rival may fence a process: another one, or a late copy of the request with which it began."""
        rivals = self._epochs_of_new_processes.count(process.transactional.name)
        is_first_version = min(self.plan.levels) < 2  # then, brokers fence a producer whose transaction they abort
        is_at_the_edge = not self.plan.repeats_last_epoch  # then, brokers fail for good
        self.check(rivals > 1 or is_first_version or is_at_the_edge, f"{process.member_id} was fenced without a rival")

    # Faults of requests ---------------------------------------------------------------

    def choose_fault(self, request: Received) -> Fault:  # noqa: PLR0911 - one for each kind
        """Chooses the fault of a request."""
        api = request.api
        is_concerned = self.plan.apis is None or api in self.plan.apis
        if not is_concerned or not self.happens(self.plan.fault_rate):
            return NO_FAULT
        if api in (FIND_COORDINATOR, OFFSET_FETCH):
            return refused_with(self.rng.choice(REFUSALS[api]))
        part = self.rng.choice([None, self.rng.randrange(6)]) if api in _OF_PARTS else None
        match self.rng.choice(self.plan.kinds):
            case "lost request":
                return LOST_REQUEST
            case "lost answer":
                return LOST_ANSWER
            case "held":
                return HELD
            case "slow":
                return Fault(delay=self.rng.choice([0.05, 0.5, 3.0, 10.5, 12.0]))
            case "incomplete" if api in _OF_PARTS:
                return Fault(part=self.rng.randrange(6), is_omitted=True)
            case "failed":
                return failed_with(self.rng.choice(FAILURES[api]), part)
            case _:
                return self._refusal(request, part)

    def _refusal(self, request: Received, part: int | None) -> Fault:
        code = self.rng.choice(REFUSALS[request.api])
        if request.api is END_TXN and code == _CANNOT_COMMIT:
            known = self.model.coordinator.transactions.get(request.values.transactional_id)
            identity = (request.values.producer_id, request.values.epoch)
            is_open = known is not None and known.state is State.ONGOING
            if not is_open or known is None or identity != (known.producer_id, known.epoch):
                return NO_FAULT  # brokers never answer that after a commit of this epoch
        return refused_with(code, part)

    # Events ---------------------------------------------------------------------------

    async def move_coordinator(self) -> None:
        """Lets another broker coordinate."""
        kind = self.rng.choice(list(CoordinatorKind))
        self.model.move(kind, self.rng.choice([1, 2]), self.rng.choice([0.0, 0.3, 3.0, 9.0]))

    async def move_leader(self) -> None:
        """Lets another broker lead a partition."""
        log = self.brokers.logs[TopicPartition(OUTPUTS, self.rng.randrange(OUTPUT_PARTITIONS))]
        log.lead(self.rng.choice([1, 2]))

    async def cut(self) -> None:
        """Cuts all connections to a broker."""
        for session in self.brokers.brokers[self.rng.choice([1, 2])].open_sessions:
            session.close()

    async def hold_markers(self) -> None:
        """Holds the markers back for a while."""
        self.model.hold_markers()
        await asyncio.sleep(self.rng.choice([0.5, 3.0, 12.0]))
        self.model.release_markers()

    async def change_level(self) -> None:
        """Changes the level of the feature."""
        self.model.set_level(next(self._levels))

    async def rebalance(self) -> None:
        """Changes the members or their partitions; the processes hear of it later."""
        living = [process for process in self.processes if not process.task.done()]
        generation = self.model.group.generation + 1
        members = {process: Member(generation, process.member_id) for process in living}
        self.model.group.generation = generation
        self.model.group.members = {member.member_id for member in members.values()}
        owners = {name: self.rng.choice(living) for name in INPUTS} if living else {}
        loop = asyncio.get_running_loop()
        for process, member in members.items():
            owned = frozenset(name for name, owner in owners.items() if owner is process)
            delay = self.rng.choice([0.0, 0.05, 0.5, 2.0])
            loop.call_later(delay, self._tell, process, Assignment(member, owned))

    def _tell(self, process: Process, assignment: Assignment) -> None:
        if assignment.member.generation > process.assignment.member.generation:
            process.assignment = assignment

    async def kill(self) -> None:
        """Kills a process; the group notices later."""
        living = [process for process in self.processes if not process.task.done()]
        if living:
            await self.rng.choice(living).kill()

    async def start(self, name: str | None = None) -> None:
        """Starts a process, perhaps with the name of one that is alive."""
        name = name or self.rng.choice(["first", "second"])
        self.processes.append(Process(self, name, next(self._numbers)))
        await self.rebalance()

    async def release(self) -> None:
        """Lets a held request arrive."""
        if self.model.held:
            self.model.release(self.rng.choice(self.model.held))

    async def forget_id(self) -> None:
        """Lets the coordinator forget a transactional id."""
        known = list(self.model.coordinator.transactions)
        if known:
            self.model.coordinator.forget(self.rng.choice(known))

    async def _disturb(self) -> None:
        """Lets something happen again and again."""
        events: list[Callable[[], Awaitable[None]]] = [
            *(self.move_coordinator, self.move_leader, self.cut, self.hold_markers, self.rebalance, self.rebalance),
            *(self.kill, self.start, self.release, self.release, self.release, self.release),
        ]
        if len(self.plan.levels) > 1:
            events += [self.change_level, self.change_level]
        if self.plan.forgets_ids:
            events += [self.forget_id] * 4
        pause = 0.4
        if self.plan.is_quiet:
            events = [self.release]
            pause = 0.2
        while self.now < FAULTS_END:
            await asyncio.sleep(self.rng.expovariate(1 / pause))
            await self.rng.choice(events)()

    async def _keep_alive(self) -> None:
        """Removes dead members from the group, and starts processes again that have ended."""
        while True:
            await asyncio.sleep(1.0)
            living = {process.member_id for process in self.processes if not process.task.done()}
            if not self.model.group.members <= living:
                await self.rebalance()
            for name in ("first", "second"):
                if not any(process.name == name and not process.task.done() for process in self.processes):
                    await self.start(name)

    # A history ------------------------------------------------------------------------

    async def run(self) -> None:
        """Lives through a history, and checks what has become of it."""
        keeper = asyncio.create_task(self._keep_alive(), name="keep alive")
        try:
            await self.start("first")
            await self.start("second")
            await self._disturb()
            self.is_calm = True
            await self._settle()
        finally:
            keeper.cancel()
            await asyncio.wait([keeper])
            for process in self.processes:
                await process.stop()
            await self.model.close()
        if not keeper.cancelled():
            keeper.result()
        self._check_outputs()
        if self.violations:
            raise ViolationError("\n".join(self.violations))

    async def _settle(self) -> None:
        """Waits until all records are done and all transactions have ended, while late requests still arrive."""
        await self.rebalance()
        self.model.move(CoordinatorKind.TRANSACTION, 1)
        self.model.move(CoordinatorKind.GROUP, 1)
        end = self.now + CALM
        while self.now < end and not (self._is_done() and self.model.is_calm):
            await asyncio.sleep(0.5)
            if self.rng.random() < 0.3:
                await self.release()
        if self.now >= end:
            self.violations.append(f"it does not end; committed: {self.model.committed}")

    def _is_done(self) -> bool:
        committed = self.model.committed
        return all(name in committed and committed[name].offset == RECORDS for name in INPUTS)

    def _check_outputs(self) -> None:
        visible = self.model.visible(OUTPUTS)
        done = {name: self.model.committed[name].offset for name in INPUTS if name in self.model.committed}
        for partition in range(OUTPUT_PARTITIONS):
            for source in INPUTS:
                expected = [
                    message.value
                    for offset in range(done.get(source, 0))
                    for message in outputs_of(source, offset)
                    if message.partition == partition
                ]
                prefix = f"{source.partition}.".encode()
                found = [value for value in visible[partition] if value.startswith(prefix)]
                self.check(found == expected, f"outputs {partition} of {source}: {_difference(found, expected)}")


def _difference(found: Sequence[bytes | None], expected: Sequence[bytes | None]) -> str:
    lost = [value for value in expected if value not in found]
    doubled = sorted({value for value in found if value is not None and found.count(value) > 1})
    return f"lost {lost}, doubled {doubled}, found {found}"


def run_history(seed: int, world: type[World] = World, plan: Plan | None = None) -> World:
    """Lives through the history of a seed.

    Raises:
        ViolationError: Something went wrong that must never go wrong. Its notes have the end of the trace.
    """

    async def live(network: MemoryNetwork) -> World:
        loop = asyncio.get_running_loop()
        with mock.patch.object(time, "monotonic", loop.time):
            history = world(network, seed, plan)
            try:
                await history.run()
            except ViolationError as violation:
                violation.args = (f"seed {seed}, {history.plan}: {violation}",)
                violation.trace = history.model.trace  # type: ignore[attr-defined]
                raise
        return history

    return run_on_network(live, seed=seed)
