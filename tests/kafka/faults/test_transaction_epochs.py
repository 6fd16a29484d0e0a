"""I13: outputs are exact when the epochs of a producer are exhausted, and when operators change the protocol.

The second protocol raises the epoch with each transaction, so ten transactions a second use up 32,767 in an hour; the
first one does so with each doubt. The coordinator then names another producer id.
"""

import asyncio
import logging
from typing import Any

import pytest

from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.notation import Api, Request
from aioshard.kafka.wire.requests import END_TXN as END
from aioshard.kafka.wire.requests import INIT_PRODUCER_ID as INIT
from aioshard.kafka.wire.start import new_cluster
from aioshard.settings import Settings
from tests.kafka.faults.support import until
from tests.kafka.faults.transacting import FIRST, SECOND, VERSIONS, Transacting, transacting
from tests.support.kafka import KafkaBroker
from tests.support.messages import answer_with, body, lose_answer
from tests.support.proxies import END_TXN, PRODUCE

logger = logging.getLogger("tests.transaction_epochs")

LAST_EPOCH = 32_766
"""The next one has another producer id."""
BEFORE_LAST = 10
BUSY = frozenset({14, 15, 16, 51})
NEWEST_OF_FIRST = 4
"""Version of EndTxn."""
UPDATE_FEATURES = Api(
    "UpdateFeatures",
    57,
    (1, 1),
    flexible=0,
    request="timeout_ms:i4 updates:[feature:s max_level:i2 kind:i1] validate_only:bool",
    response="throttle_ms:i4 error:i2 message:s results:[feature:s error:i2 message:s]",
)
_UPGRADE, _SAFE_DOWNGRADE = 1, 2
"""Kinds of updates."""
SHORT = {"drain_timeout": 1, "commit_timeout": 1.5, "transaction_timeout": 6}


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("own_kafka", VERSIONS, indirect=True)
@pytest.mark.parametrize("is_in_doubt", [False, True], ids=["answered", "in doubt"])
async def test_transactions_continue_with_another_producer_id(
    own_kafka: KafkaBroker, group: str, is_in_doubt: bool
) -> None:
    instance = "pod-1"
    version = own_kafka.features["transaction.version"]
    used_up = await use_up_epochs(own_kafka, f"{group}:{instance}", version)
    async with transacting(own_kafka, group, group_instance_id=instance) as running:
        for _ in range(2 * BEFORE_LAST):
            if is_in_doubt:
                running.proxies.answer(lose_answer, api_key=END_TXN, times=1)
            elif version == FIRST:
                running.proxies.reply(answer_with(48), api_key=PRODUCE, times=1)
            await running.send(2)
            await running.until_committed()
        await running.verify()
        identities = [(body(end).producer_id, body(end).epoch) for end in running.ends.requests]
    logger.info("version %d: %s then %s", version, used_up, identities)
    (first, _), (last, epoch) = identities[0], identities[-1]
    assert first == used_up
    assert last != first
    assert epoch < 2 * BEFORE_LAST


async def use_up_epochs(broker: KafkaBroker, transactional_id: str, version: int) -> int:
    """Use up nearly all epochs of a transactional id; return the producer id."""
    cluster = new_cluster(Settings(bootstrap_servers=broker.bootstrap))
    cluster.start()
    try:
        producer_id, epoch = await begin(cluster, transactional_id, -1, -1)
        while epoch < LAST_EPOCH - BEFORE_LAST:
            if version == FIRST:
                producer_id, epoch = await begin(cluster, transactional_id, producer_id, epoch)
            else:
                producer_id, epoch = await end(cluster, transactional_id, producer_id, epoch)
    finally:
        await cluster.close()
    return producer_id


async def begin(cluster: Cluster, transactional_id: str, producer_id: int, epoch: int) -> tuple[int, int]:
    request = INIT(transactional_id=transactional_id, timeout_ms=60_000, producer_id=producer_id, epoch=epoch)
    answer = await ask(cluster, transactional_id, request)
    return answer.producer_id, answer.epoch


async def end(cluster: Cluster, transactional_id: str, producer_id: int, epoch: int) -> tuple[int, int]:
    """Abort nothing, which is a transaction too."""
    request = END(transactional_id=transactional_id, producer_id=producer_id, epoch=epoch, commit=False)
    answer = await ask(cluster, transactional_id, request)
    return answer.producer_id, answer.epoch


async def ask(cluster: Cluster, transactional_id: str, request: Request) -> Any:
    node = await cluster.coordinator(CoordinatorKind.TRANSACTION, transactional_id)
    while (answer := await cluster.ask(node, request)).error in BUSY:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not answer.error, answer
    return answer


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_operators_change_the_protocol_under_load(own_kafka: KafkaBroker, group: str) -> None:
    async with transacting(own_kafka, group, **SHORT) as running:
        load = asyncio.create_task(send_until_cancelled(running), name="load")
        await until(lambda: running.ends.requests, running.app.explain)
        for level in (SECOND, FIRST, SECOND):
            if level != SECOND or running.ends.requests[-1].api_version <= NEWEST_OF_FIRST:
                await set_version(own_kafka, level)
            before = len(running.ends.requests)
            began = asyncio.get_running_loop().time()
            await until(
                lambda before=before, level=level: any(  # type: ignore[misc]
                    (end.api_version > NEWEST_OF_FIRST) == (level == SECOND) for end in running.ends.requests[before:]
                ),
                running.app.explain,
                timeout=60,
            )
            took = asyncio.get_running_loop().time() - began
            commits = running.app.statistics().commits
            await until(lambda commits=commits: running.app.statistics().commits > commits + 10, running.app.explain)  # type: ignore[misc]
            logger.info("version %d after %.1f s: %s", level, took, running.ended)
        load.cancel()
        await asyncio.wait([load])
        await running.until_committed()
        logger.info("%d records: %s", running.sent, running.ended)
        await running.verify()


async def send_until_cancelled(running: Transacting) -> None:
    while True:
        sending = asyncio.create_task(running.send(10), name="send")
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await sending  # it counts
            raise


async def set_version(broker: KafkaBroker, level: int) -> None:
    """Change the protocol of transactions on a running cluster, as an operator does."""
    kind = _UPGRADE if level == SECOND else _SAFE_DOWNGRADE
    update = {"feature": "transaction.version", "max_level": level, "kind": kind}
    cluster = new_cluster(Settings(bootstrap_servers=broker.bootstrap))
    cluster.start()
    try:
        answer = await cluster.ask_any(UPDATE_FEATURES(timeout_ms=30_000, updates=[update], validate_only=False))
    finally:
        await cluster.close()
    assert not answer.error, answer
    assert all(not result.error for result in answer.results), answer
