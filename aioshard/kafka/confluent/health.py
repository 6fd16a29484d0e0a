"""Errors that the client reports in addition to records: refusals, and its own failure."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from aioshard.errors import ClientLostError, TransportError
from aioshard.kafka.confluent.translate import error_of, group_error, reason, topic_denied

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Health"]

logger = logging.getLogger("aioshard.kafka.confluent.client")

_FINAL = frozenset(
    {KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._FATAL}  # noqa: SLF001
)
_NOT_A_MEMBER = frozenset({KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_MEMBER_EPOCH})
_TOLD_ELSEWHERE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._PARTITION_EOF})  # noqa: SLF001 - its names


class Health:
    """The state of the client.

    Attributes:
        failure: The error that ends this life of the client, for the next poll to raise.
    """

    def __init__(self, settings: "Settings", group_id: str, failed: Callable[[], None]) -> None:
        """Call *failed* as soon as there is a failure."""
        self.failure: TransportError | None = None
        self._settings = settings
        self._group_id = group_id
        self._failed = failed

    def fail(self, error: Exception) -> None:
        """Record an error after which nothing can be read; only the first one counts."""
        known = error_of(error)
        if self.failure is not None:
            return
        if isinstance(error, TransportError):
            self.failure = error
        elif known is not None:
            self.failure = self._of_group(known)
        else:
            self.failure = ClientLostError(f"the Kafka client failed ({reason(error)})")
            self.failure.__cause__ = error
        self._failed()

    def note(self, message: Any) -> None:
        """Handle an error message that does not belong to an assigned partition."""
        error: KafkaError = message.error()
        topic: str | None = message.topic()
        if topic and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            self.fail(topic_denied(topic))
            return
        if error.fatal() or error.code() in _FINAL:
            self.fail(self._of_group(error))
        elif error.code() not in _TOLD_ELSEWHERE:
            logger.warning("the Kafka client reports: %s", reason(error))

    async def hear(self, error: KafkaError) -> None:
        """Handle an error of the client as a whole; the client waits for this."""
        if error.fatal() or error.code() in _FINAL:
            self.fail(self._of_group(error))

    def note_commit(self, error: KafkaError | None, places: Sequence[Any]) -> None:
        """Check whether the group no longer knows us: under KIP-848, the client may never notice otherwise.

        If librdkafka 2.16 cannot reach the coordinator for about 20 s, it stops sending heartbeats but keeps reading.
        """
        if self._settings.group_protocol == "consumer":
            for each in (error, *(place.error for place in places or ())):
                if each is not None and each.code() in _NOT_A_MEMBER:
                    self.fail(self._of_group(each))

    def _of_group(self, error: KafkaError) -> TransportError:
        settings = self._settings
        return group_error(error, self._group_id, settings.group_instance_id, settings.session_timeout)
