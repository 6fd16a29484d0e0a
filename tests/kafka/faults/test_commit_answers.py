"""A commit answered with every error of the protocol: no stale commit, no silent stop (I9, I11)."""

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors as kafka_errors

from aioshard.kafka.wire.cluster import Cluster
from aioshard.kafka.wire.notation import Request
from aioshard.kafka.wire.requests import OFFSET_COMMIT
from tests.kafka.faults.intercepting import Interceptor
from tests.kafka.faults.support import Ledger, messages, quick_app, transport_of, until
from tests.support.brokers import SharedKafka
from tests.support.cluster import Message

CODES = tuple(sorted(code for code in kafka_errors.kafka_errors if code != 0))
AFTER = (92, 110, 111, 113, 127)
"""Codes that are newer than the client: it takes them for unknown."""
ALL = (*CODES, *AFTER)
DECISIVE = (3, 7, 12, 14, 15, 16, 22, 25, 27, 28, 29, 30, 92)
"""Codes that a coordinator does answer with, and one that the client does not know."""
SESSION = 2.0
"""Seconds that the group waits for the member that the app was before codes 22 and 25."""
WITHOUT_TEXT = (12, 28)
"""Codes after which the same is sent immediately with less text."""
PARTITIONS = 2
CHUNK = 5


class Answers:
    """Answers the next commits of an app with errors, each once, stored by the broker or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
        self.due: list[tuple[int, bool]] = []
        self._ask = Cluster.ask
        self._group = group
        answers = self

        async def ask(cluster: Cluster, node: int, request: Request, **options: Any) -> Any:
            return await answers.answer(cluster, node, request, **options)

        monkeypatch.setattr(Cluster, "ask", ask)

    async def answer(self, cluster: Cluster, node: int, request: Request, **options: Any) -> Any:
        """Return the response for the client to a request."""
        if request.api is not OFFSET_COMMIT or request.values["group"] != self._group or not self.due:
            return await self._ask(cluster, node, request, **options)
        code, stored = self.due.pop(0)
        if stored:
            await self._ask(cluster, node, request, **options)
        return SimpleNamespace(
            topics=[
                SimpleNamespace(
                    topic=topic["topic"],
                    partitions=[
                        SimpleNamespace(partition=part["partition"], error=code) for part in topic["partitions"]
                    ],
                )
                for topic in request.values["topics"]
            ]
        )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, group: str) -> Answers:
    return Answers(monkeypatch, group)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("codes", "stored", "protocol"),
    [
        pytest.param(DECISIVE, True, "classic", id="decisive-stored"),
        pytest.param(DECISIVE, True, "consumer", id="decisive-stored-consumer", marks=pytest.mark.chaos),
        pytest.param(ALL, True, "classic", id="stored", marks=pytest.mark.chaos),
        pytest.param(ALL, False, "classic", id="not-stored", marks=pytest.mark.chaos),
        pytest.param(ALL, False, "consumer", id="not-stored-consumer", marks=pytest.mark.chaos),
    ],
)
async def test_an_app_survives_every_commit_response(
    kafka: SharedKafka, topic: str, group: str, answers: Answers, *, codes: tuple[int, ...], stored: bool, protocol: str
) -> None:
    await kafka.create_topic(topic, partitions=PARTITIONS)
    app = quick_app(
        kafka, group, commit_interval=0.02, heartbeat_interval=0.1, session_timeout=SESSION, group_protocol=protocol
    )
    ledger = Ledger()
    app.consume(topic)(ledger.handle)
    interceptor = Interceptor(transport_of(app))
    sent: list[Message] = []

    def all_is_committed() -> bool:
        statistics = app.statistics()
        committed = sum(partition.committed or 0 for partition in statistics.partitions)
        return not answers.due and committed == len(sent) and statistics.state == "running"

    async with app.started(interceptor):
        for code in codes:
            answers.due.append((code, stored))
            sent += (more := messages(CHUNK, start=len(sent)))
            await kafka.produce(topic, more)
            await until(all_is_committed, lambda: f"{code}: {app.explain()}")  # noqa: B023 - awaited within the loop
        await ledger.until_finished(sent)
        await until(lambda: app.statistics().trouble is None, app.explain)
        statistics = app.statistics()

    assert statistics.commit_failures >= len(set(codes) - set(WITHOUT_TEXT)), "each was counted"
    _assert_no_stale_commit(interceptor)
    ledger.assert_in_order()


def _assert_no_stale_commit(interceptor: Interceptor) -> None:
    """Every commit that was tried was made under the membership of the newest assignment, and none goes back."""
    current, highest = None, dict.fromkeys(range(PARTITIONS), 0)
    for kind, *what in interceptor.events:
        if kind == "assigned":
            current = what[1]
        elif kind == "commit":
            assert what[1] == current
            for partition, offset in what[0].items():
                assert offset >= highest[partition.partition]
                highest[partition.partition] = offset
