"""Transactions while the coordinator of the group is away: `python -m tests.kafka.confluent.coordinator_away`.

The brokers are librdkafka's mock cluster, in a subprocess, because a failed assertion of its C code kills it.
The process prints, as JSON, the numbers of the transactions that were committed: 1 before, 2 while the coordinator is
away, 3 after it has come back.
"""

import asyncio
import contextlib
import ctypes
import json
import os
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer

from aioshard.errors import TransportError
from aioshard.kafka.confluent.transactions import Transactions
from aioshard.ports import Committed, Message
from aioshard.records import TopicPartition

TRANSACTION_COORDINATOR, GROUP_COORDINATOR = 1, 2
TRANSACTION_TIMEOUT = 1.0
_PRODUCER = 0
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "conf_new": (ctypes.c_void_p, []),
    "new": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]),
    "mock_cluster_new": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]),
    "mock_cluster_bootstraps": (ctypes.c_char_p, [ctypes.c_void_p]),
    "mock_topic_create": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
    "mock_partition_set_leader": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32],
    ),
    "mock_coordinator_set": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32],
    ),
    "mock_broker_set_down": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int32]),
    "mock_broker_set_up": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int32]),
}


class MockCluster:
    """Three brokers, of which two coordinate the transactions and the group."""

    def __init__(self) -> None:
        maps = Path("/proc/self/maps").read_text()
        self._library = ctypes.CDLL(next(line.split()[-1] for line in maps.splitlines() if "librdkafka" in line))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, f"rd_kafka_{name}")
            function.restype, function.argtypes = result, arguments
        client = self._call("new", _PRODUCER, self._call("conf_new"), ctypes.create_string_buffer(512), 512)
        self._cluster = self._call("mock_cluster_new", client, 3)
        self.bootstrap: str = self._call("mock_cluster_bootstraps", self._cluster).decode()
        for topic in (b"orders", b"out"):
            self._call("mock_topic_create", self._cluster, topic, 1, 3)
            self._call("mock_partition_set_leader", self._cluster, topic, 0, TRANSACTION_COORDINATOR)
        self._call("mock_coordinator_set", self._cluster, b"transaction", b"billing-1", TRANSACTION_COORDINATOR)
        self._call("mock_coordinator_set", self._cluster, b"group", b"billing", GROUP_COORDINATOR)

    def _call(self, name: str, *arguments: object) -> Any:
        return getattr(self._library, f"rd_kafka_{name}")(*arguments)

    def stop(self, broker: int) -> None:
        self._call("mock_broker_set_down", self._cluster, broker)

    def start(self, broker: int) -> None:
        self._call("mock_broker_set_up", self._cluster, broker)


async def main() -> None:
    """Commit one transaction before, one while, and one after the coordinator is away."""
    cluster = MockCluster()
    options = {"bootstrap.servers": cluster.bootstrap, "log_level": 0}
    transactions = Transactions(options, "billing-1", "billing", TRANSACTION_TIMEOUT)
    member = Consumer({**options, "group.id": "billing"}).consumer_group_metadata()
    committed: list[int] = []

    async def commit(number: int) -> None:
        offsets = {TopicPartition("orders", 0): Committed(number, "")}
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(20):
                await transactions.commit([Message("out", b"%d" % number)], offsets, member)
                committed.append(number)

    await commit(1)
    cluster.stop(GROUP_COORDINATOR)
    await commit(2)
    cluster.start(GROUP_COORDINATOR)
    await commit(3)
    print(json.dumps(committed), flush=True)
    os._exit(0)  # a client that hangs cannot be closed


if __name__ == "__main__":
    asyncio.run(main())
