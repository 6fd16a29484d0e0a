"""The test kit: the real engine on a broker in memory, with scripted trouble and virtual time."""

from aioshard.testing.broker import CommitRequest, InMemoryBroker
from aioshard.testing.group import ConsumerGroup
from aioshard.testing.log import PartitionLog
from aioshard.testing.transport import InMemoryTransport, Latency, Operation

__all__ = [
    "CommitRequest",
    "ConsumerGroup",
    "InMemoryBroker",
    "InMemoryTransport",
    "Latency",
    "Operation",
    "PartitionLog",
]
