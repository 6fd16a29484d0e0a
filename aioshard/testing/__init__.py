"""The test kit: the real engine on an in-memory broker, with scripted failures and virtual time."""

from aioshard.engine.stack import waiting_place
from aioshard.testing.broker import CommitRequest, ConsumerGroup, InMemoryBroker, PartitionLog
from aioshard.testing.client import TestClient
from aioshard.testing.loop import DeadlockError, VirtualTimeLoop, run
from aioshard.testing.producer import InMemoryProducer
from aioshard.testing.replaying import replay_prefixes
from aioshard.testing.side_topics import InMemorySideTopics
from aioshard.testing.transport import InMemoryTransport, Latency, Operation

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
    "replay_prefixes",
    "run",
    "waiting_place",
]
