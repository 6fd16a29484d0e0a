"""A member of a consumer group on our own client: records, positions, offsets and queries."""

from abc import abstractmethod
from collections.abc import Collection

import anyio

from aioshard.core.text import message_of
from aioshard.errors import ClientLostError
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.groupless import manual_membership
from aioshard.kafka.offsets import READ_COMMITTED
from aioshard.kafka.transport import KafkaTransport
from aioshard.kafka.wire.cluster import CoordinatorKind
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import NOT_A_MEMBER, GroupListener
from aioshard.records import TopicPartition
from aioshard.settings import Settings


class ConsumerTransport(KafkaTransport):
    """The common part of all members on our own client, and the whole client of a manual assignment.

    Invariants:
        * `poll` returns nothing of a partition before the engine has seeked and resumed it, nor while the engine
          releases it.
        * The client never chooses or resets a position, never commits on its own, and never leaves
          the group because nobody polls.
    """

    def __init__(self, settings: Settings, group_id: str) -> None:
        """Check the options; connects to nothing yet.

        Raises:
            SettingsError: TLS and SASL settings cannot work.
        """
        super().__init__(settings, group_id)
        self._buffer = self._fetcher = Fetcher(
            self._cluster,
            read_committed=self._isolation == READ_COMMITTED,
            max_bytes=settings.max_buffered_bytes // 2,
            max_wait=settings.fetch_max_wait,
            min_bytes=settings.client_options.get("fetch_min_bytes", 1),
            may_wait_longer="fetch_max_wait" not in settings.model_fields_set,
            rack=settings.client_options.get("client_rack") or "",
        )
        self._listener_failure: Exception | None = None
        """The error that the engine has raised during a rebalance."""

    @property
    def trouble(self) -> str | None:
        """See `Transport.trouble`. The group's coordinator counts only after `start`."""
        trouble = super().trouble
        if trouble is not None or self._listener is None or not self._is_started or self._closed:
            return trouble
        if not self._has_coordinator:
            return f"group {self._group_id!r} has no coordinator now: nothing can be committed"
        return None

    @property
    def _has_coordinator(self) -> bool:
        """Whether it is known who coordinates the group."""
        return self._cluster.known_coordinator(CoordinatorKind.GROUP, self._group_id) is not None

    # Lifecycle ------------------------------------------------------------------------

    async def _join(self, pattern: str | None, listener: GroupListener) -> None:
        self._fetcher.start()
        if self._settings.assign is None:
            await self._join_group(pattern)
            return
        assigned = await self._manual_assignment()
        self._fetcher.add(assigned)
        self._membership = manual_membership()
        listener.assigned(assigned, self._membership)

    @abstractmethod
    async def _join_group(self, pattern: str | None) -> None:
        """Begin to join the group."""

    async def _tear_down(self) -> None:
        await self._fetcher.close()
        await super()._tear_down()

    # Records --------------------------------------------------------------------------

    def seek(self, topic_partition: TopicPartition, offset: int) -> None:
        """See `Transport.seek`. The leader epoch of the record before it travels with the offset, if it is known."""
        committed = self._epochs.get(topic_partition)
        if committed is not None and committed.offset == offset:
            epoch = committed.epoch
        else:
            epoch = self._fetcher.epoch_at(topic_partition, offset)
        self._fetcher.seek(topic_partition, offset, epoch)
        self._check_again()

    def _newest_epoch(self, topic_partition: TopicPartition) -> int:
        return self._fetcher.newest_epoch(topic_partition)

    async def _wait_for_records(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._fetcher.readable.wait()

    def _check_again(self, _ended: object = None) -> None:
        """Make a waiting poll look again; also usable as a task's callback."""
        self._fetcher.readable.set()

    def _raise_loss(self) -> None:
        self._check_running()
        if self._closed:
            raise ClientLostError("the Kafka client is closed")
        self._raise_group_loss()
        if self._listener_failure is not None:
            raise ClientLostError(
                f"the engine failed during a rebalance: {_reason(self._listener_failure)}"
            ) from self._listener_failure
        failure = self._fetcher.failure or self._cluster.failure
        if failure is not None:
            why = f"the Kafka client failed ({_reason(failure)}); a new client is needed"
            raise ClientLostError(why) from failure

    @abstractmethod
    def _raise_group_loss(self) -> None:
        """Raise if the group refuses us, or the membership cannot continue."""

    # Partitions -----------------------------------------------------------------------

    async def _drain(self, listener: GroupListener, partitions: Collection[TopicPartition]) -> None:
        """Let the engine release partitions."""
        self._released.clear()
        self._fetcher.pause(partitions)
        try:
            await listener.revoked(partitions)
        except Exception as error:  # noqa: BLE001 - the next poll raises it
            self._listener_failure = error
        finally:
            self._released.set()

    def _remove(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading partitions; one that comes back continues at its position, which may be beyond the commit."""
        for partition in partitions:
            position = self._fetcher.position(partition)
            if position is not None:
                epoch = self._fetcher.epoch_at(partition, position)
                self._epochs[partition] = CommittedOffset(position, epoch, "")
        self._fetcher.remove(partitions)

    def _end_assignment(self) -> None:
        self._remove(self._fetcher.partitions)
        self._membership = NOT_A_MEMBER


def _reason(error: BaseException) -> str:
    return message_of(error) or type(error).__name__
