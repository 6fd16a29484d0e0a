"""I13: after each error code and lost answer of each request of a transaction, the outputs are exact.

The app continues, or names the cause. A proxy stands in for a broker that answers so, or loses what it has answered.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from tests.kafka.faults.support import DEADLINE, until
from tests.kafka.faults.transacting import FIRST, NAMES, VERSIONS, Transacting, requests_of, transacting
from tests.support.kafka import KafkaBroker
from tests.support.messages import answer_with, answer_without, body, lose_answer
from tests.support.proxies import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    TXN_OFFSET_COMMIT,
    Rule,
)

logger = logging.getLogger("tests.transaction_errors")

COORDINATOR = (14, 15, 16, 53, 35, 120, -1, 13)
"""Error codes of each request to a coordinator."""
ENDED = (47, 48, 49, 90)
CODES: Mapping[int, tuple[int, ...]] = {
    INIT_PRODUCER_ID: (51, 31, 47, 90, 49, *COORDINATOR),
    ADD_PARTITIONS_TO_TXN: (51, 55, 3, 29, 30, *ENDED, *COORDINATOR),
    ADD_OFFSETS_TO_TXN: (51, 30, *ENDED, *COORDINATOR),
    PRODUCE: (
        *(46, 3, 5, 6, 56, 72, 74, 75, 100, 19, 51, 14, 15, 16, 7, 20, 2, -1, 13, 53, 35, 120),
        *(10, 18, 17, 32, 43, 44, 76, 87, 29, 31, 45, 59, *ENDED),
    ),
    TXN_OFFSET_COMMIT: (22, 25, 27, 113, 12, 28, 3, 7, 51, 29, 30, *ENDED, *COORDINATOR),
    END_TXN: (7, 51, *ENDED, *COORDINATOR),
}
FEW: Mapping[int, tuple[int, ...]] = {
    INIT_PRODUCER_ID: (51, 47, 49),
    ADD_PARTITIONS_TO_TXN: (3, 48),
    ADD_OFFSETS_TO_TXN: (16, 90),
    PRODUCE: (6, 10, 45, 47, 120),
    TXN_OFFSET_COMMIT: (14, 3, 25, 47),
    END_TXN: (51, 48, 90, -1),
}
"""One of each meaning."""
STORED_BEFORE = 46
"""The code of a duplicate."""
DONE_NEVERTHELESS = frozenset({7, 20, STORED_BEFORE, -1, 13})
"""Codes after which a broker may have executed the request."""
SEVERAL = 4
MEMBERSHIPS = 90.0
"""Seconds for the group to miss a member several times, which joins again under another id."""
SHORT: Mapping[str, Any] = {"drain_timeout": 1, "commit_timeout": 1.5, "transaction_timeout": 4}
"""The brokers abort a transaction before a test is out of patience."""
LONG: Mapping[str, Any] = {**SHORT, "transaction_timeout": 60}
"""A broker that restarts still knows the transaction."""

on_both_versions = pytest.mark.parametrize("own_kafka", VERSIONS, indirect=True)
on_second_at_least = pytest.mark.parametrize(
    "own_kafka",
    [pytest.param({"transaction.version": FIRST}, id="v1", marks=pytest.mark.chaos), VERSIONS[-1]],
    indirect=True,
)


@pytest.fixture
async def running(own_kafka: KafkaBroker, group: str) -> AsyncIterator[Transacting]:
    async with transacting(own_kafka, group) as running:
        await running.send(1)
        await running.until_committed()
        yield running


async def answer(running: Transacting, api: int, code: int, times: int) -> None:
    """Let some requests be answered so, executed or not, as far as the code leaves that open."""
    if code in DONE_NEVERTHELESS:
        await process(running, api, running.proxies.answer(answer_with(code), api_key=api, times=times))
    if code != STORED_BEFORE:
        await process(running, api, running.proxies.reply(answer_with(code), api_key=api, times=times))


async def process(running: Transacting, api: int, rule: Rule) -> None:
    """Let the app process records while a rule holds, which must be met."""
    if api == INIT_PRODUCER_ID:
        running.proxies.reply(answer_with(48), api_key=PRODUCE, times=1)  # each failure needs a new epoch
    await running.send(6)
    await until(rule.met.is_set, running.app.explain)
    await until(running.committed, running.app.explain, timeout=MEMBERSHIPS)
    assert running.app.statistics().state == "running"
    if not rule.lifted.is_set():
        rule.lift()


@on_both_versions
async def test_an_error_code_of_each_meaning_changes_no_output(own_kafka: KafkaBroker, running: Transacting) -> None:
    for api in requests_of(own_kafka.features["transaction.version"]):
        for code in FEW[api]:
            await answer(running, api, code, 1)
            await running.verify()  # a later client would repeat lost records


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@on_both_versions
@pytest.mark.parametrize("times", [1, SEVERAL])
@pytest.mark.parametrize("api", [pytest.param(api, id=name) for api, name in NAMES.items()])
async def test_no_error_code_changes_an_output(
    own_kafka: KafkaBroker, running: Transacting, api: int, times: int
) -> None:
    if api not in requests_of(own_kafka.features["transaction.version"]):
        pytest.skip("the second protocol has no such request")
    for code in CODES[api]:
        began = asyncio.get_running_loop().time()
        await answer(running, api, code, times)
        took = asyncio.get_running_loop().time() - began
        logger.info("%s code %d, %d times: %.1f s, %s", NAMES[api], code, times, took, running.ended)
        await running.verify()


@on_both_versions
async def test_lost_answers_change_no_output(own_kafka: KafkaBroker, running: Transacting) -> None:
    for api in requests_of(own_kafka.features["transaction.version"]):
        for times in (1, SEVERAL):
            await process(running, api, running.proxies.answer(lose_answer, api_key=api, times=times))
    await running.verify()


@on_second_at_least
@pytest.mark.parametrize(("api", "partition"), [(PRODUCE, 1), (TXN_OFFSET_COMMIT, 0)], ids=["Produce", "offsets"])
async def test_no_commit_is_requested_without_the_answer_of_each_partition(
    running: Transacting, api: int, partition: int
) -> None:
    before = len(running.ends.requests)
    incomplete = running.proxies.answer(answer_without(partition), api_key=api)
    await running.send(6)
    await until(lambda: len(incomplete.requests) > SEVERAL, running.app.explain)
    assert len(running.ends.requests) == before
    incomplete.lift()
    await running.until_committed()
    await running.verify()


@on_second_at_least
async def test_an_app_ends_if_brokers_refuse_its_time_out_for_transactions(own_kafka: KafkaBroker, group: str) -> None:
    async with transacting(own_kafka, group) as running:
        await running.send(1)
        await running.until_committed()
        running.proxies.reply(answer_with(48), api_key=PRODUCE)
        running.proxies.reply(answer_with(50), api_key=INIT_PRODUCER_ID)
        await running.send(1)
        await until(lambda: running.app.statistics().state == "failed", running.app.explain)
        assert "transaction.max.timeout.ms" in running.app.explain()


# The outcome of a commit without an answer ------------------------------------------------------


@on_second_at_least
@pytest.mark.parametrize("is_executed", [True, False], ids=["executed", "not executed"])
@pytest.mark.parametrize(
    "event",
    [
        "time-out",
        pytest.param("rival", marks=pytest.mark.chaos),
        pytest.param("restart", marks=pytest.mark.chaos),
        pytest.param("silence", marks=pytest.mark.chaos),
    ],
)
async def test_the_outcome_of_a_commit_without_an_answer_is_counted_as_it_is(
    own_kafka: KafkaBroker, group: str, is_executed: bool, event: str
) -> None:
    """A commit that is not executed is either executed when it is repeated, or the transaction was aborted."""
    async with transacting(own_kafka, group, **(LONG if event == "restart" else SHORT)) as running:
        await running.send(1)
        await running.until_committed()
        before = running.ended
        act = running.proxies.answer if is_executed else running.proxies.reply
        lost = act(lose_answer, api_key=END_TXN)
        await running.send(1)
        await until(lambda: len(lost.requests) > 1, running.app.explain)  # the first one has been answered
        match event:
            case "rival":
                await take(own_kafka, body(lost.requests[0]).transactional_id)
            case "restart":
                await own_kafka.restart()
            case "time-out":
                await until_no_transaction_is_open(running)
            case "silence":
                await until(lambda: running.ended != before, running.app.explain)
        lost.lift()
        await running.until_committed()
        found = {name: count - before.get(name, 0) for name, count in running.ended.items()}
        logger.info("%s, executed: %s: %s", event, is_executed, found)
        await running.verify()
    is_repeated = not is_executed and event != "restart"
    is_mute = event == "silence" and own_kafka.features["transaction.version"] == FIRST  # it can ask nothing else
    visible = found.get("committed", 0) + found.get("decided_committed", 0)
    assert visible == (1 if not is_mute or not is_executed else 0)
    assert (found.get("aborted", 0) + found.get("decided_aborted", 0) > 0) == (is_repeated and not is_mute)
    assert ("undecided" in found) == is_mute


async def take(broker: KafkaBroker, transactional_id: str) -> None:
    """Begin with a transactional id as a newer process does."""
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id=transactional_id):
        pass


async def until_no_transaction_is_open(running: Transacting) -> None:
    """Wait until the brokers have ended the transaction, and the app has given up its commit."""
    await until(lambda: running.app.statistics().commit_failures > 0, running.app.explain)
    broker = running.broker
    async with asyncio.timeout(DEADLINE):
        while await broker.end_offsets(running.outputs) != await broker.end_offsets(running.outputs, "read_committed"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# Explanations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("own_kafka", [VERSIONS[-1]], indirect=True)
@pytest.mark.parametrize(
    ("api", "code", "words"),
    [
        (END_TXN, 51, ("ending", "EndTxn", "CONCURRENT_TRANSACTIONS")),
        (PRODUCE, 120, ("TRANSACTION_ABORTABLE",)),
        pytest.param(INIT_PRODUCER_ID, 51, ("InitProducerId", "CONCURRENT_TRANSACTIONS"), marks=pytest.mark.chaos),
        pytest.param(PRODUCE, 19, ("open", "Produce", "NOT_ENOUGH_REPLICAS"), marks=pytest.mark.chaos),
        pytest.param(TXN_OFFSET_COMMIT, 14, ("open", "TxnOffsetCommit", "LOAD_IN_PROGRESS"), marks=pytest.mark.chaos),
        pytest.param(TXN_OFFSET_COMMIT, 48, ("INVALID_TXN_STATE",), marks=pytest.mark.chaos),
    ],
)
async def test_an_app_that_waits_names_the_transaction_and_the_latest_error(
    running: Transacting, api: int, code: int, words: tuple[str, ...]
) -> None:
    refused = running.proxies.reply(answer_with(code), api_key=api)
    if api == INIT_PRODUCER_ID:
        running.proxies.reply(answer_with(48), api_key=PRODUCE, times=1)
    await running.send(1)
    await until(refused.met.is_set)
    named = ("transactional id '", "producer ", "epoch ", *words)
    await until(lambda: all(word in running.app.explain() for word in named), running.app.explain)
    await until(lambda: all(word in (running.app.statistics().trouble or "") for word in named), running.app.explain)
    refused.lift()
    await running.until_committed()
    await running.verify()
