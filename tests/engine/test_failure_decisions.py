"""Decisions of the failure handler about a failed record, case by case, and where the record is afterwards."""

import asyncio
from typing import Any

import pytest

from aioshard import CircuitBreaker
from aioshard.core.options import Retry
from aioshard.engine.counts import Counters
from aioshard.engine.epoch import Delivery, Epoch, Gate
from aioshard.engine.failures import FailureHandler
from aioshard.engine.outcomes import AwaitBreaker, Decision, Halt, Recover, RetryRecovery, RunAgain
from aioshard.engine.recoveries import skipping
from aioshard.engine.shards import Shards
from aioshard.errors import DecodeError, HandlerError, MessageRefusedError, SwallowedCancellationError, TransportError
from aioshard.testing import run
from tests.engine.deliveries import make_epoch, start

SKIP = skipping("requested by the test")
TWICE = Retry(attempts=2, initial=3.0, jitter=0.0)
ONCE = Retry(attempts=1)
SENSITIVE = CircuitBreaker(failure_rate=0.1, window=1, minimum=1)
"""Opens at the first failure."""


def make_handler(shards: Shards, retry: Retry = ONCE, **options: Any) -> FailureHandler:
    options = {"recovery": SKIP, "breaker": None} | options
    recovery = options.pop("recovery")
    return FailureHandler(
        retry, recovery, shards=[shards], counters=Counters(), clock=lambda: 7.0, workers=1, handler="h", **options
    )


async def running(shards: Shards) -> tuple[Epoch, Delivery, Delivery]:
    """Two records of a key; the first one has been started."""
    epoch, deliveries = make_epoch(["k", "k"])
    await shards.put(deliveries)
    assert start(shards.take()) is deliveries[0]
    return epoch, deliveries[0], deliveries[1]


@pytest.mark.parametrize(
    ("error", "options", "decision"),
    [
        (ValueError("no"), {"retry": TWICE}, RunAgain("ValueError: no", 3.0)),
        (ValueError("no"), {"retry": TWICE, "breaker": SENSITIVE}, RunAgain("ValueError: no", 3.0)),
        (DecodeError("no"), {"retry": TWICE}, Recover(SKIP)),
        (ValueError("no"), {}, Recover(SKIP)),
        (ValueError("no"), {"recovery": None}, Halt("ValueError: no")),
        (ValueError("no"), {"breaker": SENSITIVE}, AwaitBreaker(None)),
        (ValueError("no"), {"breaker": SENSITIVE, "recovery": None}, Halt("ValueError: no")),
        (
            SwallowedCancellationError("timeout"),
            {"retry": TWICE},
            Halt(f"SwallowedCancellationError: {SwallowedCancellationError('timeout')}"),
        ),
    ],
    ids=[
        "attempts-left",
        "attempts-left-while-others-fail",
        "never-retried",
        "exhausted",
        "exhausted-without-recovery",
        "exhausted-like-most",
        "exhausted-like-most-without-recovery",
        "swallowed",
    ],
)
def test_a_failed_attempt_leads_to(error: Exception, options: dict[str, Any], decision: Decision) -> None:
    failures = make_handler(Shards(), **options)
    epoch, (delivery,) = make_epoch(["k"])

    assert failures.decide(delivery, error) == decision

    assert delivery.failures == 1
    assert delivery.recovery is None, "nothing has been done about it yet"
    assert delivery.block is None
    assert epoch.gate is Gate.OPEN
    assert epoch.counts.retried == (1 if isinstance(decision, RunAgain) else 0)


def test_a_record_without_a_shard_key_has_no_further_attempt() -> None:
    _, (delivery, other) = make_epoch([None, None])

    assert make_handler(Shards(), TWICE).decide(delivery, ValueError(), keyed=False) == Recover(SKIP)

    decision = make_handler(Shards(), TWICE, breaker=SENSITIVE).decide(other, ValueError(), keyed=False)
    assert isinstance(decision, AwaitBreaker)
    assert decision.recovery is not None, "its handler must not see it, not even as a probe"


@pytest.mark.parametrize("attempt", [1, 2, 100])
def test_a_failed_recovery_is_never_given_up(attempt: int) -> None:
    failures = make_handler(Shards(), recovery=None)
    _, (delivery,) = make_epoch(["k"])
    delivery.divert(SKIP)

    *_, decision = [failures.decide(delivery, TransportError("no such topic")) for _ in range(attempt)]

    assert isinstance(decision, RetryRecovery)
    assert decision.why == "it is skipped (requested by the test): no such topic"
    assert 0.0 < decision.delay <= 10.0
    assert delivery.failures == 0, "the handler did not run"
    assert delivery.recovery_failures == attempt
    assert delivery.recovery_error == "no such topic"


def test_a_recovery_whose_message_was_refused_waits_longer() -> None:
    """Each try ends the epoch of its partition."""
    failures = make_handler(Shards())
    _, (delivery,) = make_epoch(["k"])
    delivery.divert(SKIP)

    decision = failures.decide(delivery, MessageRefusedError("too large"))

    assert isinstance(decision, RetryRecovery)
    assert decision.delay > 0.8


def test_a_recovery_that_waits_for_the_circuit_breaker_has_not_failed() -> None:
    failures = make_handler(Shards())
    _, (delivery,) = make_epoch(["k"])
    delivery.divert(SKIP)

    failures.decide(delivery, HandlerError("the circuit breaker is open"))

    assert delivery.recovery_error is None


def test_a_record_that_runs_again_keeps_its_shard() -> None:
    async def test() -> None:
        shards = Shards()
        _, first, _ = await running(shards)

        make_handler(shards, TWICE).handle_failed(first, ValueError("no"), shards)

        assert shards.take() is None
        assert first.block is not None
        assert (first.block.halted, first.block.error, first.block.since) == (False, "ValueError: no", 7.0)
        await asyncio.sleep(3.0)
        assert shards.take() is first

    run(test())


def test_a_halted_record_keeps_its_shard() -> None:
    async def test() -> None:
        shards = Shards()
        _, first, _ = await running(shards)

        make_handler(shards, recovery=None).handle_failed(first, ValueError("no"), shards)

        assert shards.halted == [first]
        await asyncio.sleep(3600.0)
        assert shards.take() is None

    run(test())


def test_a_recovery_comes_before_later_records_of_the_key() -> None:
    async def test() -> None:
        shards = Shards()
        _, first, second = await running(shards)

        make_handler(shards).handle_failed(first, ValueError("no"), shards)

        assert shards.take() is first
        assert first.recovery is SKIP
        assert shards.take() is None
        shards.release(first)
        assert shards.take() is second

    run(test())


def test_a_record_that_waits_for_the_circuit_breaker_leaves_its_shard_to_other_partitions() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, first, _ = await running(shards)
        _, (elsewhere,) = make_epoch(["k"], partition=1)
        await shards.put([elsewhere])

        make_handler(shards, breaker=SENSITIVE).handle_failed(first, ValueError("no"), shards)

        assert epoch.gate is Gate.PAUSED
        assert shards.take() is elsewhere
        shards.release(elsewhere)
        assert shards.take() is None
        await asyncio.sleep(0.5)
        assert shards.take() is first, "it is the probe"

    run(test())


def test_a_partition_is_probed_later_if_its_keys_are_occupied_elsewhere() -> None:
    async def test() -> None:
        shards = Shards()
        _, first, _ = await running(shards)
        _, (elsewhere,) = make_epoch(["k"], partition=1)
        await shards.put([elsewhere])
        make_handler(shards, breaker=SENSITIVE).handle_failed(first, ValueError("no"), shards)
        assert shards.take() is elsewhere

        await asyncio.sleep(0.75)
        assert shards.take() is None
        shards.release(elsewhere)
        await asyncio.sleep(0.5)

        assert shards.take() is first

    run(test())


def test_a_record_without_a_shard_key_is_recovered_when_the_circuit_breaker_has_closed() -> None:
    async def test() -> None:
        shards = Shards()
        epoch, (delivery,) = make_epoch([None])
        failures = make_handler(shards, breaker=SENSITIVE)

        failures.handle_failed(delivery, ValueError("no"), shards, keyed=False)

        assert epoch.gate is Gate.PAUSED
        assert shards.take() is delivery, "a recovery runs also while the partition is paused"
        recovery = delivery.recovery
        assert recovery is not None
        with pytest.raises(HandlerError, match="circuit breaker of handler h is open"):
            await failures.recover(delivery, recovery)

    run(test())
