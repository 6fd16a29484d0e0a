"""Requests to the coordinators of a transaction and of its group, sent until their answers are final."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from aioshard.kafka.produce import REQUEST_TIMEOUT, TOPIC_TIMEOUT
from aioshard.kafka.transactions.answers import Meaning, meaning
from aioshard.kafka.transactions.call import Call
from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.errors import BrokerError, ConnectionLostError, RequestTimedOutError, WireError
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.pool import Purpose

_PURPOSES: Final = {CoordinatorKind.TRANSACTION: Purpose.TRANSACTION, CoordinatorKind.GROUP: Purpose.COMMIT}
_AGAIN: Final = frozenset({Meaning.BUSY, Meaning.MOVED, Meaning.IN_DOUBT})


class Answer(NamedTuple):
    """The final answer to a request."""

    response: Any
    """None if the coordinator was not asked, because the brokers refuse to name it."""
    error: BrokerError | None
    meaning: Meaning
    is_in_doubt: bool
    """Whether an earlier attempt may have been executed, or may arrive later."""


class Coordinator:
    """The coordinator of a transactional id, or of a group. Send one request at a time."""

    def __init__(self, cluster: Cluster, kind: CoordinatorKind, key: str) -> None:
        """Serve one key; sends nothing yet."""
        self._cluster = cluster
        self._kind = kind
        self._key = key

    async def ask(
        self,
        call: Call,
        request: Request,
        codes: Mapping[int, Meaning],
        error_in: Callable[[Any], WireError | None],
    ) -> Answer:
        """Send a request until its answer is final.

        Args:
            call: How long to try. Topics that the brokers do not know count as missing after 5 s.
            request: The request. It may be sent more than once.
            codes: The meaning of error codes.
            error_in: Returns the error in a response; it may raise that the response is incomplete.

        Raises:
            CommitError: There was no final answer in time.
        """
        call.expect(request.api.name)
        unknown_until = time.monotonic() + TOPIC_TIMEOUT
        is_in_doubt = False
        while True:
            error: WireError | None
            try:
                node = await self._connected(call)
            except BrokerError as refusal:
                call.finish()
                return Answer(None, refusal, meaning(refusal.code, codes), is_in_doubt)
            except (WireError, TimeoutError) as lost:
                await call.pause(lost if isinstance(lost, WireError) else None)
                continue
            response = None
            try:
                response = await self._cluster.ask(
                    node, request, purpose=_PURPOSES[self._kind], timeout=REQUEST_TIMEOUT
                )
                error = error_in(response)
            except WireError as unanswered:
                error = unanswered
            found = _meaning_of(error, codes)
            is_again = found in _AGAIN or (found is Meaning.UNKNOWN_TOPIC and time.monotonic() < unknown_until)
            if not is_again:
                call.finish()
                return Answer(response, error if isinstance(error, BrokerError) else None, found, is_in_doubt)
            if found is Meaning.IN_DOUBT:
                is_in_doubt = True
            if found is Meaning.MOVED or isinstance(error, ConnectionLostError | RequestTimedOutError):
                self._cluster.forget_coordinator(self._kind, self._key, node)
            await call.pause(error)

    async def _connected(self, call: Call) -> int:
        """Return the coordinator, as soon as there is a connection to it: a failure until then proves nothing sent.

        Raises:
            BrokerError: The brokers refuse to name the coordinator.
            WireError: No connection was opened.
            TimeoutError: No broker could name the coordinator in time.
        """
        async with asyncio.timeout(call.left):
            node = await self._cluster.coordinator(self._kind, self._key)
        try:
            await self._cluster.connect_to(node, purpose=_PURPOSES[self._kind])
        except WireError:
            self._cluster.forget_coordinator(self._kind, self._key, node)
            raise
        return node


def _meaning_of(error: WireError | None, codes: Mapping[int, Meaning]) -> Meaning:
    if error is None:
        return Meaning.DONE
    if isinstance(error, BrokerError):
        return meaning(error.code, codes)
    return Meaning.IN_DOUBT
