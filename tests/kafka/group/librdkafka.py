"""Members of another client in a group of ours."""

import threading
from typing import Any

from confluent_kafka import Consumer

from aioshard.records import TopicPartition


class Librdkafka:
    """A member of either protocol, in a thread; of the classic one with `cooperative-sticky`."""

    def __init__(self, bootstrap: str, group: str, topic: str, protocol: str = "classic") -> None:
        self.owned: set[TopicPartition] = set()
        self.lost = 0
        self._ends = threading.Event()
        options: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "topic.metadata.refresh.interval.ms": 1_000,
        }
        if protocol == "classic":
            options |= {
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 200,
            }
        self._consumer = Consumer(options)
        self._consumer.subscribe([topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _assigned(self, _consumer: Any, partitions: list[Any]) -> None:
        self.owned |= {TopicPartition(at.topic, at.partition) for at in partitions}

    def _revoked(self, _consumer: Any, partitions: list[Any]) -> None:
        self.owned -= {TopicPartition(at.topic, at.partition) for at in partitions}

    def _lost(self, consumer: Any, partitions: list[Any]) -> None:
        self.lost += 1
        self._revoked(consumer, partitions)

    def _run(self) -> None:
        while not self._ends.is_set():
            self._consumer.poll(0.1)
        self._consumer.close()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
