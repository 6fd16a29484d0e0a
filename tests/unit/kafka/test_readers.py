"""A member reading a faulty response: a refusal never means done."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors as kafka

from aioshard.kafka.aiokafka.internals import Internals


class Client:
    """Answers each request of a kind with the same answer."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    async def send(self, _node: int, request: Any, **_group: object) -> Any:
        return self.answers[type(request).__name__]


async def test_a_refused_leave_request_is_reported() -> None:
    one: Any = object.__new__(Internals)
    one.group_id = "billing"
    one.client = Client(LeaveGroupRequest=SimpleNamespace(error_code=16))
    coordinator = SimpleNamespace(
        coordinator_id=1,
        member_id="me",
        _closing=asyncio.get_running_loop().create_future(),
        _performed_join_prepare=False,
        _coordination_task=None,
        _heartbeat_task=None,
        _group_instance_id=None,
    )
    one.consumer = SimpleNamespace(_coordinator=coordinator)

    with pytest.raises(kafka.NotCoordinatorForGroupError):
        await one.leave()
