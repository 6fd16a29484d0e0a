"""The test kit: the real engine on an in-memory broker, with scripted failures and virtual time."""

from aioshard.engine.stack import waiting_place
from aioshard.errors import DeadlockError
from aioshard.kafka.memory.broker import CommitRequest, ConsumerGroup, InMemoryBroker, PartitionLog
from aioshard.kafka.memory.producer import InMemoryProducer
from aioshard.kafka.memory.side_topics import InMemorySideTopics
from aioshard.kafka.memory.transport import InMemoryTransport, Latency, Operation
from aioshard.testing.client import TestClient
from aioshard.testing.idempotence import assert_idempotent
from aioshard.testing.loop import VirtualTimeLoop, run

__all__ = [
    "CommitRequest",
    "ConsumerGroup",
    "DeadlockError",
    "InMemoryBroker",
    "InMemoryProducer",
    "InMemorySideTopics",
    "InMemoryTransport",
    "Latency",
    "Operation",
    "PartitionLog",
    "TestClient",
    "VirtualTimeLoop",
    "assert_idempotent",
    "run",
    "waiting_place",
]
