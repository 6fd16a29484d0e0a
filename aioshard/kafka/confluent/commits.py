"""Commits of one member: sent between reads, answered in a later read; in a callback, sent and answered in one call."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from aioshard.errors import CommitError, CommitRefusedError, TransportError
from aioshard.kafka.confluent.member import Member
from aioshard.kafka.confluent.translate import commit_error, error_of
from aioshard.ports import Committed
from aioshard.records import TopicPartition

__all__ = ["Commits"]

_LAST_READ = 0.5
"""Seconds at the end of a session in which we still look for an answer."""

Offsets = Mapping[TopicPartition, Committed]


class _Sent:
    """A commit that was sent but not answered yet."""

    __slots__ = ("answer", "offsets")

    def __init__(self, offsets: Offsets) -> None:
        self.offsets = offsets
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Commits:
    """Sends commits, one at a time, and tracks their results.

    The client may hold a commit for as long as it looks for the group's coordinator, so nobody waits inside the call
    and reading continues. A commit still unanswered when partitions are revoked is sent once more inside the callback,
    while they are still ours; the answer to it comes after the answer to the first.

    Invariants:
        * No commit is sent before the previous one is answered.
        * When a callback has returned, every commit sent before it is answered, or has failed for good.
    """

    def __init__(self, group_id: str, session: float, lost: Callable[[], None]) -> None:
        """Start without commits.

        Args:
            group_id: The group.
            session: Seconds without an answer after which *lost* is called.
            lost: Called when other members may have our partitions. The client itself notices that only while no
                rebalance is in progress, and not at all under KIP-848.
        """
        self._group_id = group_id
        self._session = session
        self._lost = lost
        self._session_over: asyncio.TimerHandle | None = None
        self._unanswered: deque[_Sent] = deque()

    async def send(self, member: Member, offsets: Offsets) -> "asyncio.Future[None]":
        """Pass a commit to the client; the future resolves with its result.

        Raises:
            CommitError: The previous commit is unanswered, or the client rejected this one.
        """
        if self._unanswered:
            raise CommitError(
                f"a commit of group {self._group_id!r} was not sent and stays due: the one before it is not answered"
            )
        sent = _Sent(offsets)
        self._unanswered.append(sent)
        if self._session_over is None:
            wait = max(self._session - _LAST_READ, 0.0)
            self._session_over = asyncio.get_running_loop().call_later(wait, self._read_once_more)
        try:
            await member.send_commit(offsets)
        except KafkaException as error:
            self._unanswered.remove(sent)
            raise commit_error(error_of(error), offsets.keys(), self._group_id) from error
        return sent.answer

    async def send_at_once(self, member: Member, offsets: Offsets) -> None:
        """Send a commit and wait for the answer; only inside a callback.

        Raises:
            CommitRefusedError: The group has moved on.
            CommitError: The commit was not acknowledged.
        """
        try:
            answered = await member.commit_once(offsets)
        except KafkaException as error:
            self._note_answer(error_of(error))
            raise commit_error(error_of(error), offsets.keys(), self._group_id) from error
        self.end_session()
        refusal = self._refusal_in(answered, offsets)
        if refusal is not None:
            raise refusal

    def _read_once_more(self) -> None:
        """Give an unread answer a last chance: the event loop may have been blocked."""
        self._session_over = asyncio.get_running_loop().call_later(_LAST_READ, self._lost)

    async def settle(self, member: Member) -> None:
        """Resolve unanswered commits by sending them once more; only inside a callback."""
        for sent in list(self._unanswered):
            if sent.answer.done() and not sent.answer.cancelled():
                continue
            try:
                await self.send_at_once(member, sent.offsets)
            except TransportError as error:
                _resolve(sent, error)
            else:
                _resolve(sent, None)

    def end_session(self) -> None:
        """Stop the session timer: an answer arrived, or we have no partitions."""
        if self._session_over is not None:
            self._session_over.cancel()
            self._session_over = None

    def _note_answer(self, error: KafkaError | None) -> None:
        if error is None or error.code() > 0:  # negative codes are the client's own errors
            self.end_session()

    def lose(self) -> None:
        """Fail unanswered commits: the membership is gone."""
        self.end_session()
        for sent in self._unanswered:
            _resolve(
                sent,
                CommitRefusedError(
                    f"a commit of group {self._group_id!r} was not answered before the membership was lost"
                ),
            )

    async def hear(self, error: KafkaError | None, places: Sequence[Any]) -> None:
        """Handle the client's answer to the oldest unanswered commit; called inside a read."""
        if not self._unanswered:
            return
        sent = self._unanswered.popleft()
        self._note_answer(error)
        _resolve(sent, self._refusal_in(places, sent.offsets, error))

    def _refusal_in(
        self, places: Sequence[Any], offsets: Offsets, whole: KafkaError | None = None
    ) -> TransportError | None:
        """Return the error of a commit, if any: of a partition, for a missing partition, or *whole* for all."""
        errors = {TopicPartition(place.topic, place.partition): place.error for place in places or ()}
        refused = [name for name in offsets if name not in errors or errors[name] is not None]
        error = next((error for error in errors.values() if error is not None), whole)
        if not refused and error is None:
            return None
        return commit_error(error, refused or offsets.keys(), self._group_id)


def _resolve(sent: _Sent, error: Exception | None) -> None:
    if sent.answer.done():
        return
    if error is None:
        sent.answer.set_result(None)
    else:
        sent.answer.set_exception(error)
        sent.answer.exception()  # retrieve it, so that asyncio does not log it if nobody waits
