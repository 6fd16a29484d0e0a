"""Shared checks that records of a key were processed one after the other."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaProducer

from tests.support.cluster import DEADLINE, KafkaCluster

BY_ACCOUNT = """
import asyncio, random

@app.consume({topic!r}, shard_by={shard_by}, concurrency=32)
async def handle(record: Record):
    await asyncio.sleep(random.random() / 200)
    return record.value.decode()
"""
"""A handler whose attempts take from nothing to 5 ms; what it returns is `account number`."""

_FIRST = 1_700_000_000_000


async def produce_accounts(cluster: KafkaCluster, topic: str, partitions: int, accounts: int, each: int) -> None:
    """Appends records of accounts, each spread over all partitions: its numbers ascend with time, a millisecond apart.

    Keys are those of the partitions; the value is `account number`.
    """
    producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap)
    async with asyncio.timeout(DEADLINE), producer:
        sent = [
            await producer.send(
                topic,
                b"%d %d" % (account, number),
                key=b"%d" % account,
                partition=(account + number) % partitions,
                timestamp_ms=_FIRST + number,
            )
            for number in range(each)
            for account in range(accounts)
        ]
        await asyncio.gather(*sent)


def disorders(rows: Iterable[Mapping[str, Any]]) -> int:
    """How many records began before the one before them, of the same account, had ended.

    Args:
        rows: Outcome rows of `BY_ACCOUNT`.
    """
    runs = defaultdict(list)
    for row in rows:
        account, number = bytes(row["result"]).decode().strip('"').split()
        began = row["started"].timestamp()
        runs[account].append((int(number), began, began + row["duration"]))
    found = 0
    for of_one in runs.values():
        of_one.sort()
        # `started` is in whole microseconds.
        found += sum(begin < end - 2e-6 for (_, _, end), (_, begin, _) in itertools.pairwise(of_one))
    return found
