"""Commits of one member: sent between two reads, answered in a read; inside of a callback sent and answered at once."""

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
"""Seconds, the last of a session, in which an answer is still looked for."""

Offsets = Mapping[TopicPartition, Committed]


class _Sent:
    """A commit that was sent and not answered."""

    __slots__ = ("answer", "offsets")

    def __init__(self, offsets: Offsets) -> None:
        self.offsets = offsets
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Commits:
    """Sends commits, one at a time, and knows what became of each.

    The client may keep a commit for as long as it looks for the group's coordinator, so nobody waits inside of the
    call: reading goes on. What is unanswered when partitions are taken away is sent once more inside of the callback,
    while they are still ours; its answer comes after that of the first.

    Invariants:
        * Nothing is sent before what was sent before it is answered.
        * When a callback has returned, everything that was sent before it is answered, or has failed for good.
    """

    def __init__(self, group_id: str, session: float, lost: Callable[[], None]) -> None:
        """Send commits of a group.

        Args:
            group_id: The group.
            session: Seconds without an answer after which *lost* is called.
            lost: Called when other members may have our partitions. The client itself notices that only while no
                rebalance is under way, and not at all under KIP-848.
        """
        self._group_id = group_id
        self._session = session
        self._lost = lost
        self._session_over: asyncio.TimerHandle | None = None
        self._unanswered: deque[_Sent] = deque()

    async def send(self, member: Member, offsets: Offsets) -> "asyncio.Future[None]":
        """Hand a commit to the client; the future says what became of it.

        Raises:
            CommitError: The one before is not answered, or the client did not take it.
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
        """Inside of a callback: send a commit and wait for the answer.

        Raises:
            CommitRefusedError: The group has moved on.
            CommitError: It was not acknowledged.
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
        """Give an answer that waits to be read a last chance: the event loop may have been blocked."""
        self._session_over = asyncio.get_running_loop().call_later(_LAST_READ, self._lost)

    async def settle(self, member: Member) -> None:
        """Inside of a callback: find out what became of what is not answered, by sending it once more."""
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
        """Stop waiting for an answer: there was one, or nothing is ours."""
        if self._session_over is not None:
            self._session_over.cancel()
            self._session_over = None

    def _note_answer(self, error: KafkaError | None) -> None:
        if error is None or error.code() > 0:  # the client's own errors are below
            self.end_session()

    def lose(self) -> None:
        """Membership is gone: what is not answered counts for nothing."""
        self.end_session()
        for sent in self._unanswered:
            _resolve(
                sent,
                CommitRefusedError(
                    f"a commit of group {self._group_id!r} was not answered before the membership was lost"
                ),
            )

    async def hear(self, error: KafkaError | None, places: Sequence[Any]) -> None:
        """The client's answer to the oldest commit that was sent; called inside of a read."""
        if not self._unanswered:
            return
        sent = self._unanswered.popleft()
        self._note_answer(error)
        _resolve(sent, self._refusal_in(places, sent.offsets, error))

    def _refusal_in(
        self, places: Sequence[Any], offsets: Offsets, whole: KafkaError | None = None
    ) -> TransportError | None:
        """Look for partitions that were not taken: with an error, not named in the answer, or all with *whole*."""
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
        sent.answer.exception()  # who waits gets it; that nobody does is no error
