"""The requests of a transaction: those that must not be sent, and what follows one that was sent twice."""

import asyncio
from collections.abc import Iterator

import pytest

from aioshard.errors import CommitError, MessagesRefusedError
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.notation import Api
from aioshard.kafka.wire.requests import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    OFFSET_FETCH,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import Message
from tests.support.model_broker import Received
from tests.support.model_transactions import HELD, LOST_ANSWER, LOST_REQUEST, NO_FAULT, Fault, failed, refused
from tests.unit.kafka.transactions.one_client import ID, INPUT, MEMBER, OneClient, scenario
from tests.unit.kafka.transactions.transaction_world import OUTPUTS, TIMEOUT

BOTH = pytest.mark.parametrize("level", [1, 2])
LARGE = bytes(40_000)
"""Two of these do not fit into one batch."""


def on(client: OneClient, api: Api, *faults: Fault) -> None:
    """Let the next requests of a kind fail so."""
    due: Iterator[Fault] = iter(faults)

    def choose(request: Received) -> Fault:
        return next(due, NO_FAULT) if request.api is api else NO_FAULT

    client.model.choose_fault = choose


def commits(client: OneClient) -> int:
    return sum(request.values.commit for request in client.received(END_TXN))


# Before the commit ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("code", [45, 47, 48, 59, 90, 120])
def test_no_epoch_is_requested_within_a_transaction(level: int, code: int) -> None:
    """It would abort the first batch, and the rest would be committed alone."""

    async def test(client: OneClient) -> None:
        on(client, PRODUCE, NO_FAULT, refused(code))
        with pytest.raises(CommitError):
            await client.commit(1, LARGE + b"1", LARGE + b"2", LARGE + b"3")
        assert len(client.received(PRODUCE)) == 2
        await client.transactions.settle()
        assert commits(client) == 0
        assert client.model.visible(OUTPUTS) == {0: []}

        await client.commit(1, LARGE + b"1", LARGE + b"2", LARGE + b"3")
        await client.until_calm()
        assert client.model.visible(OUTPUTS) == {0: [LARGE + b"1", LARGE + b"2", LARGE + b"3"]}

    scenario(test, level=level)


@BOTH
@pytest.mark.parametrize("code", [10, 29, 32, 87])
def test_nothing_is_committed_if_a_message_is_refused(level: int, code: int) -> None:
    async def test(client: OneClient) -> None:
        on(client, PRODUCE, NO_FAULT, refused(code))
        with pytest.raises(MessagesRefusedError) as error:
            await client.commit(1, LARGE + b"1", LARGE + b"2")
        assert set(error.value.refused) == {1}
        await client.transactions.settle()
        assert commits(client) == 0
        assert client.model.visible(OUTPUTS) == {0: []}

    scenario(test, level=level)


@BOTH
def test_nothing_is_committed_without_the_answer_of_each_partition(level: int) -> None:
    async def test(client: OneClient) -> None:
        on(client, TXN_OFFSET_COMMIT, *[Fault(part=1, is_omitted=True)] * 1000)
        with pytest.raises((CommitError, WireError)):
            await client.commit(1, b"first", inputs=2)
        assert commits(client) == 0

    scenario(test, level=level)


def test_a_request_is_bounded() -> None:
    """Brokers close the connection on a request that is too large, and the same one would be sent again."""

    async def test(client: OneClient) -> None:
        client.model.cluster.extend(OUTPUTS)
        values = [bytes([65 + number]) * 5_000_000 for number in range(2)]
        messages = [Message(OUTPUTS, value, partition=number) for number, value in enumerate(values)]
        await client.transactions.commit(messages, {INPUT: CommittedOffset(1, -1, "")}, MEMBER)
        await client.until_calm()
        assert len(client.received(PRODUCE)) == 2
        assert client.model.visible(OUTPUTS) == {number: [value] for number, value in enumerate(values)}

    scenario(test)


def test_a_transaction_that_is_given_up_while_the_broker_throttles_sends_no_more_messages() -> None:
    async def test(client: OneClient) -> None:
        client.model.throttle = [5_000]
        committing = asyncio.create_task(client.commit(1, LARGE, LARGE), name="commit")
        await asyncio.sleep(1)
        committing.cancel()
        await asyncio.sleep(10)
        assert len(client.received(PRODUCE)) == 1
        await client.commit(1, LARGE, LARGE)
        await client.until_calm()
        assert client.model.visible(OUTPUTS) == {0: [LARGE, LARGE]}

    scenario(test)


@BOTH
def test_each_attempt_at_the_offsets_of_a_transaction_has_the_same_values(level: int) -> None:
    """The brokers keep those that arrive last, which may be an earlier attempt."""

    async def test(client: OneClient) -> None:
        await client.commit(1, b"first")
        held: list[Received] = []

        def choose(request: Received) -> Fault:
            if request.api is TXN_OFFSET_COMMIT and not held:
                held.append(request)
                return HELD
            if request.api is END_TXN and client.model.held:
                client.model.release(client.model.held[0])
            return NO_FAULT

        client.model.choose_fault = choose
        await client.commit(3, b"second")
        await client.until_calm()
        assert not client.model.held
        assert client.model.committed[INPUT].offset == 3
        sent = [request.values for request in client.received(TXN_OFFSET_COMMIT)]
        assert len(sent) == 3
        assert sent[1] == sent[2]

    scenario(test, level=level)


@BOTH
def test_a_transaction_whose_only_topic_was_deleted_is_no_failure(level: int) -> None:
    """The brokers would refuse the commit of a transaction that nothing belongs to, time and again."""

    async def test(client: OneClient) -> None:
        client.model.cluster.create(INPUT.topic)
        await client.commit(1)
        client.model.cluster.delete(INPUT.topic)
        on(client, TXN_OFFSET_COMMIT, *[refused(3)] * 1000)
        await client.commit(2)
        client.model.choose_fault = lambda _: NO_FAULT
        client.model.cluster.create(INPUT.topic)
        await client.commit(3, b"first")
        await client.until_calm()
        assert client.model.visible(OUTPUTS) == {0: [b"first"]}
        assert client.model.committed[INPUT].offset == 3

    scenario(test, level=level)


# A commit in doubt ------------------------------------------------------------------------------


def rival_after(client: OneClient, fault: Fault) -> None:
    """Let the first commit fail so, and a rival take the transactional id before it is repeated."""
    faults = iter([fault])

    def choose(request: Received) -> Fault:
        if request.api is not END_TXN or (found := next(faults, None)) is None:
            return NO_FAULT
        loop = asyncio.get_running_loop()
        loop.call_later(0.015, client.model.coordinator.init, ID, 8.0, None)  # after the markers, before the retry
        return found

    client.model.choose_fault = choose


@BOTH
def test_a_commit_that_was_executed_counts_although_a_newer_epoch_exists_when_it_is_repeated(level: int) -> None:
    async def test(client: OneClient) -> None:
        client.transactions.learn({INPUT: None})
        rival_after(client, LOST_ANSWER)
        await client.commit(1, b"first")
        assert client.transactions.counts.decided_committed == 1
        assert client.model.visible(OUTPUTS) == {0: [b"first"]}

    scenario(test, level=level)


@BOTH
def test_a_commit_that_was_not_executed_counts_as_an_abort_if_a_newer_epoch_exists(level: int) -> None:
    async def test(client: OneClient) -> None:
        client.transactions.learn({INPUT: None})
        rival_after(client, LOST_REQUEST)
        with pytest.raises(CommitError):
            await client.commit(1, b"first")
        counts = client.transactions.counts
        assert counts.decided_aborted + counts.aborted == 1
        assert client.model.visible(OUTPUTS) == {0: []}

    scenario(test, level=level)


def test_a_new_epoch_ends_a_transaction_whose_commit_nobody_answers() -> None:
    """Its outcome is known then, and not only when the brokers have ended the transaction for its age."""

    async def test(client: OneClient) -> None:
        client.transactions.learn({INPUT: None})
        on(client, END_TXN, *[LOST_REQUEST] * 1000)
        began = asyncio.get_running_loop().time()
        with pytest.raises(CommitError):
            await client.commit(1, b"first")
        assert client.transactions.counts.decided_aborted == 1
        assert asyncio.get_running_loop().time() < began + TIMEOUT + 1

    scenario(test)


@BOTH
def test_a_commit_is_undecided_while_nobody_tells_its_offsets(level: int) -> None:
    async def test(client: OneClient) -> None:
        client.transactions.learn({INPUT: None})
        faults = {END_TXN: LOST_ANSWER, OFFSET_FETCH: refused(14)}
        client.model.choose_fault = lambda request: faults.get(request.api, NO_FAULT)
        with pytest.raises(CommitError):
            await client.commit(1, b"first")
        counts = client.transactions.counts
        assert (counts.undecided, counts.aborted, counts.decided_aborted) == (1, 0, 0)

    scenario(test, level=level)


@BOTH
@pytest.mark.parametrize("code", [-1, 7, 99])
def test_an_answer_without_an_outcome_is_neither_a_commit_nor_an_abort(level: int, code: int) -> None:
    async def test(client: OneClient) -> None:
        on(client, END_TXN, failed(code))
        await client.commit(1, b"first")
        on(client, END_TXN, refused(code))
        await client.commit(2, b"second")
        counts = client.transactions.counts
        assert (counts.committed, counts.aborted, counts.undecided) == (2, 0, 0)
        await client.until_calm()
        assert client.model.visible(OUTPUTS) == {0: [b"first", b"second"]}

    scenario(test, level=level)


@BOTH
def test_no_abort_is_requested_for_a_commit_in_doubt(level: int) -> None:
    """Its answer would not tell whether the commit was executed before."""

    async def test(client: OneClient) -> None:
        client.transactions.learn({INPUT: None})
        on(client, END_TXN, *[LOST_ANSWER] * 1000)
        waiting = asyncio.create_task(client.commit(1, b"first"), name="commit")
        await asyncio.sleep(TIMEOUT + 1)  # the call has given up, and nothing answers yet
        client.model.choose_fault = lambda _: NO_FAULT
        await waiting
        assert commits(client) == len(client.received(END_TXN))
        assert client.model.visible(OUTPUTS) == {0: [b"first"]}

    scenario(test, level=level)


@BOTH
def test_closing_waits_a_moment_for_the_answer_to_a_commit(level: int) -> None:
    async def test(client: OneClient) -> None:
        on(client, END_TXN, Fault(delay=1.0))
        committing = asyncio.create_task(client.commit(1, b"first"), name="commit")
        while not client.received(END_TXN):  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.01)
        await client.transactions.close()
        await committing
        assert client.transactions.counts.committed == 1

    scenario(test, level=level)


# After a request that was sent twice ------------------------------------------------------------


@pytest.mark.parametrize("fault", [HELD, LOST_ANSWER], ids=["held", "answer lost"])
@pytest.mark.parametrize("api", [ADD_PARTITIONS_TO_TXN, PRODUCE, ADD_OFFSETS_TO_TXN, TXN_OFFSET_COMMIT, END_TXN])
def test_a_request_that_was_sent_twice_is_followed_by_a_new_epoch(api: Api, fault: Fault) -> None:
    """All transactions of an epoch are the same for the first protocol, so a late copy would change the next one."""

    async def test(client: OneClient) -> None:
        on(client, api, fault)
        await client.commit(1, b"first")
        before = client.transactional.identity
        await client.commit(2, b"second")
        assert client.transactional.identity.epoch > before.epoch
        assert len(client.received(INIT_PRODUCER_ID)) > 1
        await client.until_calm()
        for late in [*client.model.held]:
            assert _codes(client.model.release(late)) <= {47, 90}
        assert client.model.visible(OUTPUTS) == {0: [b"first", b"second"]}
        assert client.model.committed[INPUT].offset == 2

    scenario(test, level=1)


def test_an_epoch_without_a_doubt_is_used_again() -> None:
    async def test(client: OneClient) -> None:
        for number in range(1, 4):
            await client.commit(number, b"%d" % number)
        assert len(client.received(INIT_PRODUCER_ID)) == 1

    scenario(test, level=1)


def _codes(answer: object) -> set[int]:
    """Return all error codes of an answer."""
    if isinstance(answer, dict):
        codes = {answer["error"]} if "error" in answer else set()
        return codes.union(*(_codes(part) for part in answer.values()))
    return set().union(*(_codes(part) for part in answer)) if isinstance(answer, list) else set()
