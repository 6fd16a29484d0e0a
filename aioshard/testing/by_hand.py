"""An in-memory client with manual assignment, which is not a member of its group."""

from collections.abc import Collection, Mapping, Sequence

from aioshard.errors import StateError, TransportError
from aioshard.ports import GroupListener, Membership
from aioshard.records import TopicPartition
from aioshard.testing.broker import InMemoryBroker
from aioshard.testing.reading import IsolationLevel
from aioshard.testing.transport import InMemoryTransport, Latency

__all__ = ["InMemoryByHand"]


class InMemoryByHand(InMemoryTransport):
    """A client that takes its partitions at the start and keeps them; implements `aioshard.ports.Transport`.

    It is not a member of the group. Its commits are stored as long as the group has no members, as on a real broker.
    """

    _lives = 0

    def __init__(
        self,
        broker: InMemoryBroker,
        group_id: str,
        assign: Mapping[str, Sequence[int]],
        *,
        isolation_level: IsolationLevel = "read_committed",
        latency: Latency | None = None,
    ) -> None:
        """Create a client that has not started yet.

        Args:
            broker: Broker with its topics and its group.
            group_id: Group for its commits.
            assign: Partition numbers by topic. A missing topic is created with enough partitions.
            isolation_level: Whether records of open and aborted transactions are read.
            latency: Duration of each operation; by default none takes time.
        """
        super().__init__(broker, group_id, isolation_level=isolation_level, latency=latency)
        self._assign = assign

    async def start(
        self,
        topics: Collection[str],  # noqa: ARG002 - the app has checked that they are those of `assign`
        pattern: str | None,  # noqa: ARG002
        listener: GroupListener,
    ) -> None:
        """Take the partitions; see `Transport.start`.

        Raises:
            StateError: The client was started before.
            GroupHasMembersError: The group has members.
            TransportError: A partition does not exist, the broker is not available, or a test scripted the error.
        """
        if self._listener is not None:
            raise StateError("this client was started before: make a new one with the transport factory")
        self._listener = listener
        await self._take("start")
        self._broker.check_start()
        for topic, numbers in self._assign.items():
            count = self._broker.ensure_topic(topic, at_least=max(numbers) + 1)
            missing = [number for number in numbers if number >= count]
            if missing:
                error = TransportError(
                    f"topic {topic!r} has {count} partition(s), 0 to {count - 1}, and assign gives this app "
                    f"{topic}/{missing[0]}: correct assign, or create the topic with more"
                )
                error.retriable = False
                raise error
        self._group.refuse_beside_members()
        InMemoryByHand._lives += 1
        self._unwatch = self._broker.watch(self._changed)
        self._membership = Membership("", InMemoryByHand._lives)
        given = [TopicPartition(topic, number) for topic, numbers in self._assign.items() for number in numbers]
        self._reading.give(given)
        listener.assigned(given, self._membership)
