"""The confluent-kafka transport: a group member that, in a rebalance, loses only the partitions that move."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from confluent_kafka import KafkaError, KafkaException

from aioshard.errors import ClientLostError, SettingsError, StateError
from aioshard.kafka.confluent.asking import Asked, Asking
from aioshard.kafka.confluent.calls import Calls, resolve
from aioshard.kafka.confluent.commits import Commits
from aioshard.kafka.confluent.former import Former
from aioshard.kafka.confluent.health import Health
from aioshard.kafka.confluent.intake import Intake
from aioshard.kafka.confluent.member import Member
from aioshard.kafka.confluent.options import consumer_options, is_incremental, share_of_buffer
from aioshard.kafka.confluent.topics import Topics
from aioshard.kafka.confluent.translate import reason
from aioshard.kafka.confluent.watching import watch
from aioshard.kafka.memberless import by_hand
from aioshard.kafka.questions import refuse_what_is_not_ours
from aioshard.ports import (
    NOT_A_MEMBER,
    AllowanceOf,
    Committed,
    Fault,
    FetchedBatch,
    GroupListener,
    LogRange,
    Membership,
    Oversized,
)
from aioshard.records import TopicPartition

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["ConfluentTransport"]

logger = logging.getLogger("aioshard.kafka.confluent.client")

_AT_ONCE = 500  # maximum messages per call to the client
_WAIT = 0.05  # seconds that one call to the client, and so a commit in the queue, may wait


class ConfluentTransport(Asked):
    """A member of a consumer group through confluent-kafka; implements `aioshard.ports.Transport`.

    With manual assignment (`assign`), it never joins the group: it takes those partitions at the start, and commits
    through the query client.

    One instance is one life of the client: after `close`, or after `poll` raised, build a new one. One task, the
    owner, calls the client: it reads, and between reads it runs the queued calls (commits). During a rebalance, the
    client waits for our callback inside a read; then the callback runs the queued calls.

    Invariants:
        * `poll` returns nothing of a partition before the engine has seeked and resumed it.
        * Commits are sent only between reads or inside a callback, for partitions that are ours at that moment.
          Unanswered ones are resolved before we release their partitions, so nothing is sent for those later.
        * Partitions kept in a rebalance stay buffered, and `poll` returns their records even while others drain.
    """

    def __init__(self, settings: "Settings", group_id: str) -> None:
        """Check the options; connects to nothing yet."""
        self._settings = settings
        self._group_id = group_id
        self._options = consumer_options(settings, group_id)
        self._incremental = is_incremental(settings)
        self._intake = Intake(share_of_buffer(1, settings.max_buffered_bytes // 2), incremental=self._incremental)
        self._calls = Calls()
        self._commits = Commits(group_id, settings.session_timeout, self._lose_session)
        self._asking: Asking | None = None
        self._topics: Topics | None = None
        self._member: Member | None = None
        self._listener: GroupListener | None = None
        self._membership = NOT_A_MEMBER
        self._health = Health(settings, group_id, self._interrupt)
        self._former = Former(settings)
        self._closed = False  # `close` was called: from then on, `poll` returns no records
        self._left = False  # all requests to the brokers must stop
        self._handed_back = asyncio.Event()
        self._handed_back.set()
        self._room = asyncio.Event()  # `poll` returned records, or the owner has something else to do
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        if self._member is None or self._closed:
            return None
        return self._asking.trouble if self._asking is not None else None

    # Life -----------------------------------------------------------------------------

    async def start(self, topics: Collection[str], pattern: str | None, listener: GroupListener) -> None:
        """See `Transport.start`. Matches patterns itself, every `metadata_max_age`."""
        if self._listener is not None or self._closed:
            raise StateError("this transport was started before: build a new one for each life of the client")
        self._listener = listener
        self._asking = Asking(self._settings, self._group_id)
        try:
            await self._asking.connect(topics)
            self._topics = Topics(self._asking, frozenset(topics), pattern, self._settings.metadata_max_age)
            names = await self._topics.look_up()
            given = None if self._settings.assign is None else await self._asking.partitions_by_hand()
            told = {"error_cb": self._health.hear, "on_commit": self._hear_of_commit}
            self._member = Member({**self._options, **told})
        except (KafkaException, ValueError, TypeError) as error:
            await self.close()
            raise SettingsError(f"the Kafka client refused an option: {reason(error)}") from error
        except BaseException:
            await self.close()
            raise
        if given is not None:
            await self._member.start_over(given)
            self._intake.add(given)
            self._membership = by_hand()
            listener.assigned(given, self._membership)
        else:
            await self._subscribe(names)
            if not await self._topics.exist():
                listener.assigned((), self._membership)  # the client does not join the group before a topic exists
        watching = functools.partial(
            watch,
            *(self._asking, self._topics, self._former, self._member, self._calls),
            ends=lambda: self.log_ranges(self._intake.behind()),
            subscribe=self._subscribe,
        )
        owning = functools.partial(self._own, self._member)
        self._tasks = [
            asyncio.create_task(self._until_lost(owning), name=f"confluent client of {self._group_id}"),
            asyncio.create_task(self._until_lost(watching), name=f"brokers of {self._group_id}"),
        ]

    async def close(self) -> None:
        """See `Transport.close`. Waits for a drain in progress and for the client's current call."""
        if self._closed:
            return
        self._closed = True
        self._interrupt()
        try:
            # A drain in progress ends at its own deadline; cutting it short would lose its commit.
            await self._handed_back.wait()
            self._left = True
            self._room.set()
            if self._tasks:
                await asyncio.wait(self._tasks[:1])
            if self._member is not None:
                await self._member.leave()
        except (KafkaException, RuntimeError) as error:
            logger.info("group %r was not told that we leave: %s", self._group_id, reason(error))
        finally:
            self._left = True
            self._commits.end_session()
            self._calls.close(ClientLostError("the Kafka client is closed"))
            self._intake.clear()
            self._membership = NOT_A_MEMBER
            if self._member is not None:
                self._member.abandon()
            for task in self._tasks:
                task.cancel()
            # A deadline may have ended the code above, and would also end every await that follows.
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                if self._asking is not None:
                    await self._asking.close()

    def _running(self) -> Asking:
        if self._asking is None or self._left:
            raise ClientLostError(f"the Kafka client {'is closed' if self._closed else 'was not started'}")
        return self._asking

    # The owner of the client ----------------------------------------------------------

    async def _until_lost(self, forever: Callable[[], Awaitable[None]]) -> None:
        """Run a task that must last as long as the client."""
        try:
            await forever()
        except Exception as error:  # noqa: BLE001 - the next poll raises any error
            if not self._closed:
                self._health.fail(error)

    async def _own(self, member: Member) -> None:
        """Read, and run queued calls, until the client is closed."""
        loop = asyncio.get_running_loop()
        while not self._left:
            await self._calls.serve()
            if self._closed and self._handed_back.is_set():
                await asyncio.sleep(0)  # start nothing new; `close` continues
                continue
            seconds = self._intake.crowded(loop.time())
            if seconds:
                await self._pause(seconds)
                continue
            await self._read(member, loop)

    async def _read(self, member: Member, loop: asyncio.AbstractEventLoop) -> None:
        if not self._incremental and self._intake.start_over():
            await member.start_over(self._intake.partitions)
        changes = self._intake.changes(loop.time())
        turn = await member.turn(changes, _AT_ONCE, 0.0 if self._calls.waiting else _WAIT)
        for change in turn.failed:
            self._intake.not_changed(change)
        if turn.messages:
            for message in self._intake.accept(turn.messages, loop.time()):
                self._health.note(message)
            self._interrupt()
        if turn.failed:
            await asyncio.sleep(_WAIT)  # the client does not know a new partition yet

    async def _pause(self, seconds: float) -> None:
        """Pause reading because the buffers are full."""
        self._room.clear()
        if self._calls.waiting:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._room.wait()

    async def _subscribe(self, names: frozenset[str]) -> None:
        if self._member is not None:
            await self._member.join(names, self._take_over, self._hand_back, self._lose)

    # Records --------------------------------------------------------------------------

    async def poll(self, allowance: AllowanceOf, timeout: float) -> Sequence[FetchedBatch | Fault | Oversized]:
        """See `Transport.poll`. Does not suspend if records are ready.

        An `Oversized` record ends a poll only once; later polls repeat it when they end for another reason.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._woken = False
        while True:
            self._raise_what_is_lost()
            found = self._intake.take(allowance)
            if found.records:
                self._room.set()
            remaining = deadline - loop.time()
            if found.new or self._woken or remaining <= 0:
                return found.new + found.repeated
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(remaining, resolve, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None

    def _raise_what_is_lost(self) -> None:
        if self._closed:
            raise ClientLostError("the Kafka client is closed")
        if self._health.failure is not None:
            raise self._health.failure
        self._running()

    def wake(self) -> None:
        """See `Transport.wake`."""
        self._woken = True
        self._interrupt()

    def _interrupt(self) -> None:
        """Make a waiting poll look again."""
        if self._waiter is not None:
            resolve(self._waiter)

    # Positions ------------------------------------------------------------------------

    def position(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.position`."""
        return self._intake.position(topic_partition)

    def end_offset(self, topic_partition: TopicPartition) -> int | None:
        """See `Transport.end_offset`; at most two seconds old."""
        return self._intake.end_offset(topic_partition)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.pause`."""
        self._intake.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """See `Transport.resume`.

        Raises:
            StateError: A partition was not seeked since it was assigned, so it has no position.
        """
        self._intake.resume(partitions)
        self._room.set()
        self._interrupt()

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`."""
        self._intake.seek(topic_partition, offset)
        self._room.set()

    def adjust_prefetch(self, partitions: int, max_bytes: int) -> None:
        """See `Transport.adjust_prefetch`: half is for our buffers, the rest for the client's single queue."""
        self._intake.share = share_of_buffer(partitions, max_bytes)

    # The group ------------------------------------------------------------------------

    def membership(self) -> Membership:
        """See `Transport.membership`: that of the latest assignment passed to the engine."""
        return self._membership

    async def commit(self, offsets: Mapping[TopicPartition, Committed], membership: Membership) -> None:
        """See `Transport.commit`. Has no deadline; a cancelled commit that was already sent still completes."""
        if not offsets:
            return
        asking = self._running()
        if self._settings.assign is not None:
            refuse_what_is_not_ours(self._group_id, offsets.keys(), self._intake, membership, self._membership)
            await asking.commit_by_hand(offsets)
            return
        self._room.set()
        answer: asyncio.Future[None] | None = None

        async def send() -> None:
            nonlocal answer
            answer = await self._commit_now(offsets, membership)

        await self._calls.call(send)
        if answer is not None:
            await answer

    async def _commit_now(
        self, offsets: Mapping[TopicPartition, Committed], membership: Membership
    ) -> "asyncio.Future[None] | None":
        self._running()
        refuse_what_is_not_ours(self._group_id, offsets.keys(), self._intake, membership, self._membership)
        if self._member is None:
            return None
        if self._handed_back.is_set():
            return await self._commits.send(self._member, offsets)
        await self._commits.send_at_once(self._member, offsets)
        return None

    def _lose_session(self) -> None:
        timeout = self._settings.session_timeout
        self._health.fail(ClientLostError(f"no commit of group {self._group_id!r} was answered for {timeout:g} s"))

    async def _hear_of_commit(self, error: KafkaError | None, places: Sequence[Any]) -> None:
        await self._commits.hear(error, places)
        self._health.note_commit(error, places)

    async def log_ranges(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogRange]:
        """See `Transport.log_ranges`. Has no deadline; retries transient errors."""
        found = await self._running().log_ranges(partitions)
        for name, log in found.items():
            self._intake.note_end(name, log.end)
        return found

    # Rebalances: called by the client, inside `Member.turn` -----------------------------

    async def _take_over(self, partitions: Sequence[Any]) -> None:
        """Pass our whole current assignment to the engine."""
        member, listener = self._member, self._listener
        if member is None or listener is None or self._closed:
            return
        membership = await member.adopt(partitions, incremental=self._incremental)
        if not self._incremental:
            self._intake.clear()
        self._intake.add([TopicPartition(each.topic, each.partition) for each in partitions])
        self._membership = membership
        self._former.joined(membership)
        try:
            listener.assigned(self._intake.partitions, membership)
        except Exception as error:  # noqa: BLE001 - the client would swallow it; the next poll raises it
            self._health.fail(error)

    async def _hand_back(self, partitions: Sequence[Any]) -> None:
        await self._give_up(partitions, lost=False)

    async def _lose(self, partitions: Sequence[Any]) -> None:
        self._membership = NOT_A_MEMBER
        await self._give_up(partitions, lost=True)
        if self._member is not None:
            await self._former.look_at(self._member)

    async def _give_up(self, partitions: Sequence[Any], *, lost: bool) -> None:
        """Tell the engine that partitions are being revoked; the group waits, and partitions we keep continue."""
        member, listener = self._member, self._listener
        if member is None or listener is None or self._closed:
            return
        names = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._handed_back.clear()
        self._intake.pause(names)
        try:
            revoked = asyncio.create_task(listener.revoked(names, lost=lost), name=f"hand over {self._group_id}")
            if lost:
                self._commits.lose()
            else:
                self._calls.first(lambda: self._commits.settle(member))
            await self._calls.serve_until(revoked)
        except Exception as error:  # noqa: BLE001 - the client would swallow it; the next poll raises it
            self._health.fail(error)
        finally:
            self._intake.remove(names)
            if not self._incremental:
                self._membership = NOT_A_MEMBER
            self._handed_back.set()
            self._interrupt()
        await member.let_go(partitions, incremental=self._incremental)
