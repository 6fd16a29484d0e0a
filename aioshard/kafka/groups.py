"""Groups as the brokers describe them."""

from typing import Final, NamedTuple

from aioshard.core.assignment import Member
from aioshard.records import TopicPartition

SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"
GROUP_TIMES: Final = (SESSION_TIMEOUT, HEARTBEAT_INTERVAL)
"""Kafka's names of the times of a group under the consumer protocol (KIP-848), where the brokers keep them."""


class Coordinator(NamedTuple):
    """The broker that coordinates a group."""

    broker: int
    host: str
    port: int


class GroupMember(NamedTuple):
    """A member of a group."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    """None for a dynamic member."""
    partitions: tuple[TopicPartition, ...] = ()
    protocol: str | None = None
    """`classic` or `consumer`: a group that migrates has members of both. None if the broker does not say."""

    def __str__(self) -> str:
        """Describe the member for an error message."""
        static = f"static member {self.instance_id!r}" if self.instance_id else f"member {self.member_id!r}"
        return f"{static} (client {self.client_id!r} at {self.host.lstrip('/')})"


class Group(NamedTuple):
    """A group of either protocol."""

    state: str
    """The brokers' name for it, in lower case: stable, empty, dead, preparingrebalance, assigning, reconciling, …"""
    protocol: str
    """`classic`, or `consumer` (KIP-848)."""
    assignor: str
    """Empty if there is none."""
    members: tuple[GroupMember, ...]

    @property
    def owners(self) -> dict[TopicPartition, GroupMember]:
        """Map each assigned partition to its member."""
        return {partition: member for member in self.members for partition in member.partitions}


class DescribedGroup(NamedTuple):
    """The members of a group of the classic protocol, as its leader sees them."""

    is_stable: bool
    """Whether all members have the partitions of one assignment; otherwise, `members` says nothing of them."""
    members: dict[str, Member]
    instances: dict[str, str]
    """The member id of each static member, by instance id."""


class GroupTime(NamedTuple):
    """A time of a group under the consumer protocol."""

    seconds: float
    is_own: bool
    """Whether it is set for the group; otherwise it is the brokers' default."""


class GroupTimes(NamedTuple):
    """The times in force for a group under the consumer protocol."""

    session_timeout: GroupTime
    heartbeat_interval: GroupTime

    @property
    def by_name(self) -> dict[str, GroupTime]:
        """Map Kafka's names to the times."""
        return {SESSION_TIMEOUT: self.session_timeout, HEARTBEAT_INTERVAL: self.heartbeat_interval}


class TimeLimits(NamedTuple):
    """The bounds within which the brokers accept a time of a group, in seconds."""

    least: float
    most: float


def words_of(time: str) -> str:
    """Return a time in words, by Kafka's name of it.

    Example:
        >>> words_of("consumer.session.timeout.ms")
        'session timeout'
    """
    return time.removeprefix("consumer.").removesuffix(".ms").replace(".", " ")
