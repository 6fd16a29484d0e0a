"""I13: after each error code and lost answer of each request of a transaction, the outputs are exact.

The app continues, or names the cause. A proxy stands in for a broker that answers so, or loses what it has answered.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from tests.kafka.faults.support import until
from tests.kafka.faults.transacting import FIRST, SECOND, Transacting, transacting
from tests.support.kafka import KafkaBroker
from tests.support.messages import answer_with, answer_without, lose_answer
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
    INIT_PRODUCER_ID: (51, 50, 31, 47, 90, 49, *COORDINATOR),
    ADD_PARTITIONS_TO_TXN: (51, 55, 3, 29, 30, *ENDED, *COORDINATOR),
    ADD_OFFSETS_TO_TXN: (51, 30, *ENDED, *COORDINATOR),
    PRODUCE: (
        *(46, 3, 5, 6, 56, 72, 74, 75, 100, 19, 51, 14, 15, 16, 7, 20, 2, -1, 13, 53, 35, 120),
        *(10, 18, 17, 32, 43, 44, 76, 87, 29, 31, 45, 59, *ENDED),
    ),
    TXN_OFFSET_COMMIT: (22, 25, 27, 82, 113, 12, 28, 3, 7, 51, 29, 30, *ENDED, *COORDINATOR),
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
NAMES = {
    PRODUCE: "Produce",
    TXN_OFFSET_COMMIT: "TxnOffsetCommit",
    END_TXN: "EndTxn",
    INIT_PRODUCER_ID: "InitProducerId",
    ADD_PARTITIONS_TO_TXN: "AddPartitionsToTxn",
    ADD_OFFSETS_TO_TXN: "AddOffsetsToTxn",
}
OF_FIRST_ONLY = frozenset({ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN})
DONE_NEVERTHELESS = frozenset({7, 20, 46, -1, 13})
"""Codes after which a broker may have executed the request."""
SEVERAL = 4
VERSIONS = [pytest.param({"transaction.version": version}, id=f"v{version}") for version in (FIRST, SECOND)]
SHORT: Mapping[str, Any] = {"drain_timeout": 1, "commit_timeout": 1.5, "transaction_timeout": 4}
"""The brokers abort a transaction before a test is out of patience."""

on_both_versions = pytest.mark.parametrize("own_kafka", VERSIONS, indirect=True)


@pytest.fixture
async def running(own_kafka: KafkaBroker, group: str) -> AsyncIterator[Transacting]:
    async with transacting(own_kafka, group) as running:
        await running.send(1)
        await running.until_committed()
        yield running


def requests_of(broker: KafkaBroker) -> list[int]:
    version = broker.features["transaction.version"]
    return [api for api in NAMES if version == FIRST or api not in OF_FIRST_ONLY]


async def answer(running: Transacting, api: int, code: int, times: int) -> None:
    """Let some requests be answered so, which the brokers execute if the code does not exclude that."""
    act = running.proxies.answer if code in DONE_NEVERTHELESS else running.proxies.reply
    rule = act(answer_with(code), api_key=api, times=times)
    await process(running, api, rule)


async def process(running: Transacting, api: int, rule: Rule) -> None:
    """Let the app process records while a rule holds, which must be met."""
    if api == INIT_PRODUCER_ID:
        running.proxies.reply(answer_with(48), api_key=PRODUCE, times=1)  # each failure needs a new epoch
    await running.send(6)
    await until(rule.met.is_set, running.app.explain)
    await running.until_committed()
    assert running.app.statistics().state == "running"
    if not rule.lifted.is_set():
        rule.lift()


@on_both_versions
async def test_an_error_code_of_each_meaning_changes_no_output(own_kafka: KafkaBroker, running: Transacting) -> None:
    for api in requests_of(own_kafka):
        for code in FEW[api]:
            await answer(running, api, code, 1)
    await running.verify()


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@on_both_versions
@pytest.mark.parametrize("times", [1, SEVERAL])
@pytest.mark.parametrize("api", [pytest.param(api, id=name) for api, name in NAMES.items()])
async def test_no_error_code_changes_an_output(
    own_kafka: KafkaBroker, running: Transacting, api: int, times: int
) -> None:
    if api not in requests_of(own_kafka):
        pytest.skip("the second protocol has no such request")
    for code in CODES[api]:
        began = asyncio.get_running_loop().time()
        await answer(running, api, code, times)
        took = asyncio.get_running_loop().time() - began
        logger.info("%s code %d, %d times: %.1f s, %s", NAMES[api], code, times, took, running.ended)
        await running.verify()


@on_both_versions
async def test_lost_answers_change_no_output(own_kafka: KafkaBroker, running: Transacting) -> None:
    for api in requests_of(own_kafka):
        for times in (1, SEVERAL):
            await process(running, api, running.proxies.answer(lose_answer, api_key=api, times=times))
    await running.verify()


@on_both_versions
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
