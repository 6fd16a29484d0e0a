"""The messages of a run, as they wait for a transaction that covers its records."""

from collections.abc import Sequence

from aioshard.core.publishing import Span
from aioshard.engine.epoch import Delivery, Outputs, Refused
from aioshard.engine.outcomes import FailedAttempt, Outcome, Recovery
from aioshard.errors import MessageRefusedError
from aioshard.ports import Message
from tests.engine.deliveries import make_epoch

REFUSED = MessageRefusedError("no such partition")


async def _take(_: Delivery) -> Outcome:
    return Outcome.PROCESSED


LETTER = Recovery("its dead letter is written", _take)
REMOVAL = Recovery("it is removed from the side topic", _take)


def completed(batch_offsets: Sequence[int] = ()) -> Delivery:
    """A delivery that has completed in its third attempt; the first one of its batch."""
    _, (delivery,) = make_epoch([b"k"])
    delivery.failures = 2
    delivery.failure = FailedAttempt("ValueError", "bad", 2)
    delivery.outgoing = [Message("out", b"value")]
    delivery.batch_offsets = batch_offsets
    return delivery


def run_again(before: Delivery) -> Delivery:
    """The delivery of the same record in the next epoch, after a message of the one before was refused."""
    _, (delivery,) = make_epoch([b"k"])
    Refused(REFUSED, Outputs.of(before)).pass_on(delivery)
    return delivery


def test_the_messages_of_a_batch_wait_for_all_its_records() -> None:
    outputs = Outputs.of(completed([0, 7, 3]))

    assert list(outputs.offsets) == [0, 7, 3]
    assert outputs.span == Span(0, 7)


def test_the_messages_of_a_record_wait_for_it_alone() -> None:
    outputs = Outputs.of(completed())

    assert list(outputs.offsets) == [0]
    assert outputs.span == Span(0, 0)


def test_a_record_with_a_refused_message_keeps_its_failed_attempts() -> None:
    delivery = run_again(completed())

    assert (delivery.failures, delivery.refusal, delivery.recovery) == (2, REFUSED, None)


def test_a_recovery_with_a_refused_message_continues_with_its_backoff() -> None:
    before = completed()
    before.divert(LETTER)
    before.recovery_failures = 4

    delivery = run_again(before)

    assert (delivery.recovery, delivery.recovery_failures) == (LETTER, 4)


def test_a_replay_with_a_refused_message_runs_its_handler_again() -> None:
    """Its removal from the side topic alone would lose the messages of the handler."""
    before = completed()
    before.then = REMOVAL
    before.divert(REMOVAL)

    assert run_again(before).recovery is None


def test_a_batch_with_a_refused_message_has_failed_once_more() -> None:
    delivery = run_again(completed([0, 1]))

    assert (delivery.failures, delivery.refusal, delivery.aside) == (3, None, True)
