"""Track which of the subscribed topics exist."""

import logging
import re
from collections.abc import Collection
from typing import Any

__all__ = ["SubscribedTopics", "one_pattern"]

logger = logging.getLogger("aioshard.kafka.topics")


class SubscribedTopics:
    """The topics subscribed to by name, and those of them that the brokers do not show us."""

    def __init__(self, metadata_max_age: float) -> None:
        """Start without topics.

        Args:
            metadata_max_age: Seconds between two look-ups; for the warning.
        """
        self.names: frozenset[str] = frozenset()
        self.missing: frozenset[str] = frozenset()
        self._metadata_max_age = metadata_max_age

    @property
    def trouble(self) -> str | None:
        """A sentence on missing topics, or None."""
        if not self.missing:
            return None
        return f"no such topic, or none that we may see: {', '.join(map(repr, sorted(self.missing)))}"

    def watch(self, cluster: Any) -> None:
        """Check now, and after every metadata update of the client."""
        cluster.add_listener(self._note)
        self._note(cluster)

    def _note(self, cluster: Any) -> None:
        missing = frozenset(topic for topic in self.names if not cluster.partitions_for_topic(topic))
        for topic in sorted(missing - self.missing):
            logger.warning(
                "topic %r %s: nothing of it is consumed until a look-up, every metadata_max_age=%g s, finds it",
                topic,
                "may not be seen by this user" if topic in cluster.unauthorized_topics else "does not exist",
                self._metadata_max_age,
            )
        for topic in sorted(self.missing - missing):
            logger.info("topic %r exists now", topic)
        self.missing = missing


def one_pattern(topics: Collection[str], pattern: str) -> str:
    """Combine topics and pattern, because aiokafka accepts only one of the two. Anchored at the end for its `match`."""
    choices = [*map(re.escape, sorted(topics)), f"(?:{pattern})"]
    return rf"(?:{'|'.join(choices)})\Z"
