"""A commit of manually assigned partitions: its request, and the meaning of its answers."""

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.consumer.group_coordinator import GroupCoordinator

from aioshard.errors import AuthorizationError, CommitError, GroupHasMembersError, MetadataRefusedError
from aioshard.kafka.aiokafka.internals import Internals
from aioshard.kafka.aiokafka.transport import commit_without_member
from aioshard.ports import Committed
from aioshard.records import TopicPartition


class Answering(Internals):
    """A client and its coordinator's side that answer a commit with one code."""

    generation, member_id = -1, ""
    _send_req = GroupCoordinator._send_req
    _performed_join_prepare = False

    def __init__(self, code: int) -> None:
        self.group_id = "billing"
        self.client = self._client = self
        self.coordinator_id: int | None = 1
        self.requests: list[Any] = []
        self.dead = 0
        self._code = code

    @property
    def coordinator(self) -> Any:
        return self

    async def ensure_coordinator_known(self) -> None: ...

    def request_rejoin(self) -> None: ...

    def reset_generation(self) -> None: ...

    def coordinator_dead(self) -> None:
        self.dead += 1

    async def send(self, node: int, request: Any, *, group: object) -> Any:
        assert (node, group) == (1, 1)
        self.requests.append(request)
        return SimpleNamespace(topics=[("orders", [(0, self._code), (1, 0)])])


OFFSETS = {TopicPartition("orders", 0): Committed(5, "text"), TopicPartition("orders", 1): Committed(7, "")}


async def test_a_commit_without_a_member_is_retained_for_ten_years() -> None:
    broker: Any = Answering(0)
    await commit_without_member(broker, OFFSETS)
    (request,) = broker.requests
    assert (request._consumer_group, request._consumer_group_generation_id, request._consumer_id) == ("billing", -1, "")
    assert request._retention_time == 10 * 365 * 24 * 3600 * 1000
    assert request._topics == [("orders", [(0, 5, "text"), (1, 7, "")])]


@pytest.mark.parametrize(
    ("code", "error", "dead"),
    [
        (25, GroupHasMembersError, 0),
        (22, GroupHasMembersError, 0),
        (27, GroupHasMembersError, 0),
        (113, GroupHasMembersError, 0),
        (16, CommitError, 1),
        (15, CommitError, 1),
        (14, CommitError, 0),
        (12, MetadataRefusedError, 0),
        (29, AuthorizationError, 0),
        (30, AuthorizationError, 0),
    ],
)
async def test_broker_errors_are_distinguished(code: int, error: type[Exception], dead: int) -> None:
    broker: Any = Answering(code)
    with pytest.raises(error) as caught:
        await commit_without_member(broker, OFFSETS)
    assert type(caught.value) is error
    assert broker.dead == dead
    if code == 29:
        assert "'orders'" in str(caught.value)


async def test_a_closing_client_cannot_commit() -> None:
    broker: Any = Answering(0)
    broker.coordinator_id = None
    with pytest.raises(CommitError):
        await commit_without_member(broker, OFFSETS)
    assert not broker.requests


async def test_a_broken_connection_triggers_a_coordinator_lookup() -> None:
    broker: Any = Answering(0)

    async def broken(*_: object, **__: object) -> None:
        raise kafka_errors.KafkaConnectionError("gone")

    broker.send = broken
    with pytest.raises(CommitError):
        await commit_without_member(broker, OFFSETS)
    assert broker.dead == 1
