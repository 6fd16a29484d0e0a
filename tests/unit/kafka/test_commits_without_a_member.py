"""A commit of manually assigned partitions: the meaning of its answers. Requests are in `test_offsets`."""

from collections.abc import Mapping
from typing import Any

import pytest

from aioshard.errors import (
    AuthorizationError,
    CommitError,
    GroupHasMembersError,
    MetadataRefusedError,
    TopicsRefusedError,
)
from aioshard.kafka.group.transport import MemberTransport
from aioshard.kafka.offsets import Member
from aioshard.kafka.wire.codes import error_for
from aioshard.kafka.wire.errors import ConnectionLostError, WireError
from aioshard.kafka.wire.responses import CommittedOffset
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings

OFFSETS = {TopicPartition("orders", 0): Committed(5, "text"), TopicPartition("orders", 1): Committed(7, "")}


class Answering:
    """The offsets of a group, whose coordinator answers a commit with an error, if there is one, or not at all."""

    def __init__(self, error: WireError | None = None, *, silent: bool = False) -> None:
        self.error = error
        self.silent = silent
        self.commits: list[Mapping[TopicPartition, CommittedOffset]] = []

    async def commit(
        self, offsets: Mapping[TopicPartition, CommittedOffset], _member: Member
    ) -> dict[TopicPartition, WireError]:
        self.commits.append(offsets)
        if self.silent:
            raise ConnectionLostError("gone")
        return {} if self.error is None else {TopicPartition("orders", 1): self.error}


async def commit(answering: Answering) -> None:
    settings = Settings(bootstrap_servers="127.0.0.1:9", assign={"orders": [0, 1]})
    transport: Any = MemberTransport(settings, "billing")
    transport._offsets = answering
    await transport._commit_without_member(OFFSETS)


async def test_a_commit_has_the_offsets_and_their_metadata() -> None:
    answering = Answering()
    await commit(answering)
    assert answering.commits == [
        {TopicPartition("orders", 0): CommittedOffset(5, -1, "text"), TopicPartition("orders", 1): (7, -1, "")}
    ]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (25, GroupHasMembersError),
        (22, GroupHasMembersError),
        (27, GroupHasMembersError),
        (113, GroupHasMembersError),
        (16, CommitError),
        (15, CommitError),
        (14, CommitError),
        (12, MetadataRefusedError),
        (30, AuthorizationError),
    ],
)
async def test_broker_errors_are_distinguished(code: int, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        await commit(Answering(error_for(code, "orders")))
    assert type(caught.value) is error


@pytest.mark.parametrize(("code", "error"), [(3, CommitError), (29, AuthorizationError)])
async def test_an_error_of_one_topic_is_of_its_partitions_alone(code: int, error: type[Exception]) -> None:
    with pytest.raises(TopicsRefusedError) as caught:
        await commit(Answering(error_for(code, "orders")))
    [(partition, reason)] = caught.value.refused.items()
    assert partition == TopicPartition("orders", 1)
    assert type(reason) is error
    assert "'orders'" in str(caught.value)


async def test_a_commit_that_is_not_answered_is_not_acknowledged() -> None:
    with pytest.raises(CommitError):
        await commit(Answering(silent=True))
