"""The commit coordinator: the one task that commits offsets, in order, one request at a time."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import anyio

from aioshard.core.histogram import Histogram
from aioshard.engine.epoch import Epoch
from aioshard.engine.notes import Due, Notes
from aioshard.errors import AuthorizationError, CommitError, MetadataRefusedError, TransportError
from aioshard.ports import GroupHasMembersError, Membership, Transport

__all__ = ["Committer"]

logger = logging.getLogger("aioshard.engine.committer")

_RETRY_DELAY = 0.1
_LOOK_INTERVAL = 0.1
"""Least seconds between checks for completions beyond the oldest record: a tiny commit interval must not spin."""
_MOST_BYTES = 768 * 1024
"""Limit of one request: brokers refuse a whole commit if it makes a batch above 1 MiB in their own topic."""
_BYTES_AROUND = 100
"""Bytes of a partition in a request, besides its topic and its metadata."""
_WITHOUT_PAUSE = 0.01
"""Seconds of building metadata before other tasks may run: a text of full length takes as long or longer."""


class _Request(NamedTuple):
    """A caller that waits until these epochs are committed."""

    epochs: tuple[Epoch, ...]
    done: asyncio.Future[bool]


class Committer:
    """Waits for the oldest incomplete records to complete and commits the changed offsets.

    Decides which epochs may be committed (`own`, `disown`). Only it sends commits, one at a time, each with a
    deadline. Anything that was not acknowledged stays due. Every attempt computes its commit again, under the current
    membership and from the epochs owned at that moment: no request is ever sent again unchanged (I9).

    Invariants:
        * An epoch's `acknowledged` changes only when the broker acknowledged a commit, or when the epoch starts.
        * A commit of an epoch carries its committable offset together with the records finished beyond it, both from
          the same moment (I1).
    """

    def __init__(self, interval: float, timeout: float, clock: Callable[[], float]) -> None:
        """Make a committer; `run` is its task, once per life of a client.

        Args:
            interval: Seconds between commits.
            timeout: Seconds after which a request counts as not acknowledged.
            clock: Loop time.
        """
        self.commits = 0
        self.failures = 0
        self.durations = Histogram()
        """Seconds until requests were acknowledged."""
        self.failure_durations = Histogram()
        """Seconds until requests failed or timed out."""
        self.trouble: str | None = None
        """Why the last commit was not acknowledged; None when it was, or when nothing is due."""
        self.trouble_since = 0.0
        self.turns = 0
        """How often it has checked for due commits or ended a request; keeps rising while it owns any epoch."""
        self.notes = Notes()
        """Makes the metadata of the commits."""
        self.refused: Callable[[TransportError], object] | None = None
        """Called when a commit is not authorized, or the group has members and we are not one; the commit stays due."""
        self._interval = interval
        self._timeout = timeout
        self._clock = clock
        self._owned: dict[Epoch, None] = {}
        self._requests: list[_Request] = []
        self._waiter: asyncio.Future[None] | None = None
        self._last = -interval
        self._running = False

    @property
    def owns(self) -> bool:
        """Whether it owns any epoch."""
        return bool(self._owned)

    def own(self, epoch: Epoch) -> None:
        """Start committing the epoch."""
        self._owned[epoch] = None
        self._wake()

    def disown(self, epoch: Epoch) -> None:
        """Stop committing the epoch, and count its records that finished but are not committed."""
        if epoch in self._owned:
            del self._owned[epoch]
            due = self.notes.is_due(epoch)
            epoch.uncommitted = epoch.tracker.completed - epoch.noted if due else 0

    async def flush(self, epochs: Collection[Epoch], timeout: float) -> bool:
        """Commit the due offsets of *epochs* now, and retry until they are acknowledged.

        Args:
            epochs: The epochs to commit; those that are not owned are ignored.
            timeout: Seconds after which to give up.

        Returns:
            Whether nothing is due for them any longer.
        """
        if not self._running or not self._due(epochs):
            return not self._due(epochs)
        request = _Request(tuple(epochs), asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._wake()
        with anyio.move_on_after(timeout):
            return await request.done
        if request in self._requests:
            self._requests.remove(request)
        return not self._due(request.epochs)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _due(self, epochs: Collection[Epoch]) -> list[Epoch]:
        """Owned epochs among *epochs* that have something to commit."""
        return [epoch for epoch in epochs if epoch in self._owned and self.notes.is_due(epoch)]

    async def run(self, transport: Transport) -> None:
        """Commit until cancelled; callers that still wait in `flush` then learn that the commit did not happen."""
        self._running = True
        try:
            while True:
                await self._until_due(transport)
                await self._commit_due(transport)
        finally:
            self._running = False
            self._give_up()

    def _give_up(self) -> None:
        """Let all waiting callers continue without a commit."""
        for request in self._requests:
            if not request.done.done():
                request.done.set_result(False)
        self._requests.clear()

    async def _until_due(self, transport: Transport) -> None:
        """Wait for a request, or until a commit is due and the interval since the last one has passed."""
        while not self._requests:
            self.turns += 1
            self._waiter = asyncio.get_running_loop().create_future()
            awaited: list[asyncio.Future[None]] = [self._waiter]
            timeout = None
            if self._due(self._owned):
                timeout = self._last + self._interval - self._clock()
                if timeout <= 0:
                    if _is_member(transport.membership()):
                        return
                    timeout = _RETRY_DELAY
            else:
                self.trouble = None
                awaited += [epoch.frontier() for epoch in self._owned]
                if self._owned:
                    # No future signals completions beyond the oldest record.
                    timeout = max(self._interval, _LOOK_INTERVAL)
            await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    async def _commit_due(self, transport: Transport) -> None:
        due = self._due(self._owned)
        membership = transport.membership()
        if due and _is_member(membership):
            await self._send_all(transport, due, membership)
        self._last = self._clock()
        waiting = self._requests
        self._requests = [request for request in waiting if self._due(request.epochs)]
        for request in waiting:
            if request not in self._requests and not request.done.done():
                request.done.set_result(True)
        if self._requests:
            await asyncio.sleep(_RETRY_DELAY)

    async def _send_all(self, transport: Transport, due: Sequence[Epoch], membership: Membership) -> None:
        """Send the due commits, in requests small enough for the brokers; stop at the first one not acknowledged."""
        request: dict[Epoch, Due] = {}
        size = 0
        since = self._clock()
        for epoch in due:
            if self._clock() - since > _WITHOUT_PAUSE:
                await asyncio.sleep(0)
                since = self._clock()
            if epoch not in self._owned:
                continue
            note = self.notes.due(epoch)
            more = len(epoch.topic_partition.topic) + len(note.committed.metadata.encode()) + _BYTES_AROUND
            if request and size + more > _MOST_BYTES:
                if not await self._send(transport, request, membership):
                    return
                request, size = {}, 0
            request[epoch] = note
            size += more
        if request:
            await self._send(transport, request, membership)

    async def _send(self, transport: Transport, request: dict[Epoch, Due], membership: Membership) -> bool:
        """Send one request; if the broker refuses the metadata, retry with shorter texts, in the end without any."""
        while True:
            self.turns += 1
            began = self._clock()
            ours = {epoch: due for epoch, due in request.items() if epoch in self._owned}
            try:
                with anyio.fail_after(self._timeout):
                    offsets = {epoch.topic_partition: due.committed for epoch, due in ours.items()}
                    await transport.commit(offsets, membership)
            except MetadataRefusedError as error:
                longest = max((len(due.committed.metadata) for due in ours.values()), default=0)
                if not longest:
                    self._failed(error, began)
                    return False
                self.notes.refused(longest)
                request = {epoch: self.notes.due(epoch) for epoch in ours}
            except asyncio.CancelledError:
                if _is_told_to_end():
                    raise
                self._failed(CommitError("the Kafka client has cancelled it"), began)
                return False
            except (TransportError, TimeoutError) as error:
                self._failed(error, began)
                return False
            else:
                break
        self.commits += 1
        self.durations.add(self._clock() - began)
        if self.trouble is not None:
            lasted = self._clock() - self.trouble_since
            logger.info("commits are acknowledged again, after %.1f s", lasted, extra={"event": "commit_recovered"})
        self.trouble = None
        for epoch, due in ours.items():
            self.notes.acknowledged(epoch, due)
        return True

    def _failed(self, error: Exception, began: float) -> None:
        self.failures += 1
        self.failure_durations.add(self._clock() - began)
        reason = str(error) or f"no answer within commit_timeout={self._timeout:g} s"
        if self.trouble is None:
            self.trouble_since = self._clock()
        if reason != self.trouble:
            fields = {"event": "commit_failed", "failures": self.failures}
            logger.warning("a commit was not acknowledged and stays due: %s", reason, extra=fields)
        self.trouble = reason
        if isinstance(error, AuthorizationError | GroupHasMembersError):
            self._give_up()
            if self.refused is not None:
                self.refused(error)


def _is_told_to_end() -> bool:
    """Whether this task itself was cancelled; the cancellation of a future that it awaits must not end it."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _is_member(membership: Membership) -> bool:
    return membership.generation >= 0
