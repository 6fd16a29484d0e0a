"""Failure policies: implementations of `on_failure` for records whose attempts are used up."""

import time
from collections.abc import Awaitable, Callable

from aioshard.core.recourse import BudgetAccount, DeadLetter
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery
from aioshard.engine.failing.settling import Halt, Pause, Verdict
from aioshard.engine.outcomes import Detour, Outcome
from aioshard.ports import Message
from aioshard.serde.side_records import Failure, dead_letter

__all__ = ["DeadLettering", "Halting", "Publish", "Skipping", "failure_of", "skipping"]

Publish = Callable[[Message], Awaitable[int]]
"""Publishes a message, waits for the brokers' acknowledgement and returns the offset."""


async def _skip(delivery: Delivery) -> Outcome:  # noqa: ARG001 - signature shared by all detours
    return Outcome.SKIPPED


def skipping(why: str) -> Detour:
    """Return a detour that completes a record without processing it."""
    return Detour(f"it is skipped ({why})", _skip)


class Halting:
    """`on_failure="halt"`: the record keeps its shard until it is released."""

    def decide(self, delivery: Delivery) -> Verdict:  # noqa: ARG002 - signature of the protocol
        """See `Recourse.decide`."""
        return Halt()


class Skipping:
    """`on_failure="skip"`: the record completes without having been processed."""

    def decide(self, delivery: Delivery) -> Verdict:  # noqa: ARG002 - signature of the protocol
        """See `Recourse.decide`."""
        return skipping("on_failure='skip'")


class DeadLettering:
    """`on_failure=DeadLetter(...)`: the record completes when its dead letter is acknowledged (I2)."""

    def __init__(self, policy: DeadLetter, publish: Publish, *, group: str, handler: str, counters: Counters) -> None:
        """Create the failure policy of one handler.

        Args:
            policy: Topic and budget.
            publish: Publishes dead letters.
            group: Consumer group, for their headers.
            handler: Name of the handler, for their headers.
            counters: Counters of the handler; its successes replenish the budget.
        """
        self._topic = policy.topic
        self._account = None if policy.budget is None else BudgetAccount(policy.budget)
        self._publish = publish
        self._group = group
        self._handler = handler
        self._counters = counters
        self._detour = Detour(f"its dead letter is written to {policy.topic}", self._send)

    @property
    def affordable(self) -> bool:
        """Whether the budget allows a diversion now."""
        return self._account is None or self._account.left(self._counters.processed) > 0

    def decide(self, delivery: Delivery) -> Verdict:  # noqa: ARG002 - signature of the protocol
        """See `Recourse.decide`."""
        account = self._account
        if account is not None and not account.spend(self._counters.processed):
            return Pause(
                f"the dead-letter budget of handler {self._handler} is spent ({account.budget.burst} diversions, "
                f"{account.budget.per_success:g} more for each success), so something that it depends on seems to be "
                "down; one record at a time is tried until one succeeds"
            )
        return self._detour

    async def _send(self, delivery: Delivery) -> Outcome:
        failure = failure_of(delivery, self._group, self._handler)
        await self._publish(dead_letter(self._topic, delivery.record, failure))
        return Outcome.DEAD_LETTERED


def failure_of(delivery: Delivery, group: str, handler: str) -> Failure:
    """Describe a failed delivery for the headers of a side record."""
    note = delivery.failure
    assert note is not None  # noqa: S101 - only failed deliveries are diverted
    return Failure(group, handler, note.attempts, note.error, note.message, time.time())
