"""What `on_failure` does with a record whose attempts are used up."""

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
"""Publishes, and waits until the brokers have acknowledged."""


async def _skip(delivery: Delivery) -> Outcome:  # noqa: ARG001 - one of several detours of one shape
    return Outcome.SKIPPED


def skipping(why: str) -> Detour:
    """A record is complete without having been processed."""
    return Detour(f"it is skipped ({why})", _skip)


class Halting:
    """`on_failure="halt"`: the record keeps its shard until somebody releases it."""

    def decide(self, delivery: Delivery) -> Verdict:  # noqa: ARG002 - one of several of one shape
        """See `Recourse.decide`."""
        return Halt()


class Skipping:
    """`on_failure="skip"`."""

    def decide(self, delivery: Delivery) -> Verdict:  # noqa: ARG002 - one of several of one shape
        """See `Recourse.decide`."""
        return skipping("on_failure='skip'")


class DeadLettering:
    """`on_failure=DeadLetter(...)`: the record is complete when its dead letter is acknowledged (I2)."""

    def __init__(self, policy: DeadLetter, publish: Publish, *, group: str, handler: str, counters: Counters) -> None:
        """Make the recourse of one handler.

        Args:
            policy: Topic and budget.
            publish: Publishes dead letters.
            group: Named in their headers, as is the handler.
            handler: The handler's name.
            counters: Whose successes pay for diversions.
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
        """Whether a diversion could be paid for now."""
        return self._account is None or self._account.left(self._counters.processed) > 0

    def decide(self, delivery: Delivery) -> Verdict:  # noqa: ARG002 - one of several of one shape
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
    """What the headers of a side record say about a delivery that has failed."""
    note = delivery.failure
    assert note is not None  # noqa: S101 - nothing is diverted that has not failed
    return Failure(group, handler, note.attempts, note.error, note.message, time.time())
