"""Commits: one at a time, settled before partitions go, and read by both clients."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from aioshard.core.commit_metadata import CommitMetadata
from aioshard.errors import ClientLostError, CommitError, CommitRefusedError, MetadataRefusedError
from aioshard.kafka.confluent.calls import Calls
from aioshard.kafka.confluent.commits import Commits
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.testing import run
from tests.kafka_client.members import Member, settings_for
from tests.support.shared_kafka import SharedKafka

ONE = TopicPartition("orders", 0)
FIRST, SECOND = {ONE: Committed(1, "")}, {ONE: Committed(2, "")}


class Place:
    """What the client answers of one partition."""

    topic, partition = ONE

    def __init__(self, error: int | None = None) -> None:
        self.error = None if error is None else KafkaError(error)


class Client:
    """Notes what is sent."""

    def __init__(self, refuse: int | None = None) -> None:
        self.sent: list[Mapping[TopicPartition, Committed]] = []
        self.at_once: list[Mapping[TopicPartition, Committed]] = []
        self.refuse = refuse
        self.answered: list[Place] | None = [Place()]

    async def send_commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.sent.append(offsets)

    async def commit_once(self, offsets: Mapping[TopicPartition, Committed]) -> list[Place] | None:
        if self.refuse is not None:
            raise KafkaException(KafkaError(self.refuse))
        self.at_once.append(offsets)
        return self.answered


async def test_a_commit_is_answered_in_a_later_read() -> None:
    commits, client = Commits("billing", 45.0, lambda: None), Client()
    as_client: Any = client

    answer = await commits.send(as_client, FIRST)
    assert not answer.done()
    await commits.hear(None, [Place()])

    await answer
    assert client.sent == [FIRST]


async def test_nothing_is_sent_before_the_one_before_is_answered() -> None:
    commits, client = Commits("billing", 45.0, lambda: None), Client()
    as_client: Any = client
    answer = await commits.send(as_client, FIRST)
    answer.cancel()  # as the engine does when commit_timeout is over

    with pytest.raises(CommitError, match="the one before it is not answered"):
        await commits.send(as_client, SECOND)
    await commits.hear(None, [Place()])
    await commits.send(as_client, SECOND)

    assert client.sent == [FIRST, SECOND]


async def test_what_is_not_answered_is_settled_before_partitions_go() -> None:
    commits, client = Commits("billing", 45.0, lambda: None), Client()
    as_client: Any = client
    answer = await commits.send(as_client, FIRST)

    await commits.settle(as_client)

    await answer
    assert client.at_once == [FIRST]
    await commits.hear(None, [Place()])  # the first answer comes after all, and is nobody's any more
    await commits.send(as_client, SECOND)


async def test_what_cannot_be_settled_has_failed() -> None:
    commits = Commits("billing", 45.0, lambda: None)
    client: Any = Client(refuse=KafkaError.UNKNOWN_MEMBER_ID)
    answer = await commits.send(client, FIRST)

    await commits.settle(client)

    with pytest.raises(CommitRefusedError, match="the group has moved on"):
        await answer


async def test_what_is_not_answered_when_the_group_drops_us_is_refused() -> None:
    commits = Commits("billing", 45.0, lambda: None)
    client: Any = Client()
    answer = await commits.send(client, FIRST)

    commits.lose()

    with pytest.raises(CommitRefusedError, match="before the membership was lost"):
        await answer


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (KafkaError.ILLEGAL_GENERATION, CommitRefusedError),
        (KafkaError.STALE_MEMBER_EPOCH, CommitRefusedError),
        (KafkaError.COORDINATOR_NOT_AVAILABLE, CommitError),
        (KafkaError.OFFSET_METADATA_TOO_LARGE, MetadataRefusedError),
        (KafkaError.INVALID_COMMIT_OFFSET_SIZE, MetadataRefusedError),
    ],
)
async def test_an_answer_of_a_single_partition_counts(code: int, error: type[Exception]) -> None:
    commits = Commits("billing", 45.0, lambda: None)
    client: Any = Client()
    answer = await commits.send(client, FIRST)

    await commits.hear(None, [Place(code)])

    with pytest.raises(error):
        await answer


@pytest.mark.parametrize("answered", [[], None])
async def test_a_partition_that_the_client_leaves_out_of_its_answer_is_not_acknowledged(answered: Any) -> None:
    commits = Commits("billing", 45.0, lambda: None)
    client: Any = Client()
    client.answered = answered
    answer = await commits.send(client, FIRST)

    await commits.hear(None, answered)

    with pytest.raises(CommitError, match="orders/0 was not acknowledged"):
        await answer
    with pytest.raises(CommitError, match="orders/0 was not acknowledged"):
        await commits.send_at_once(client, FIRST)


@pytest.mark.parametrize(
    ("code", "lost"),
    [(None, 0), (KafkaError.REBALANCE_IN_PROGRESS, 0), (KafkaError._TIMED_OUT, 1), (KafkaError._WAIT_COORD, 1)],
    ids=["acknowledged", "refused", "timed out", "no coordinator"],
)
def test_a_session_without_an_answer_of_the_coordinator_is_over(code: int | None, lost: int) -> None:
    """Under KIP-848 the client itself keeps what it has meanwhile."""

    async def test() -> None:
        ends: list[float] = []
        now = asyncio.get_running_loop().time
        commits, client = Commits("billing", 45.0, lambda: ends.append(now())), Client()
        as_client: Any = client
        began = now()
        for offsets in (FIRST, SECOND):
            answer = await commits.send(as_client, offsets)
            await asyncio.sleep(10)
            error = None if code is None else KafkaError(code)
            await commits.hear(error, [Place(code)])
            await asyncio.wait([answer])
        await asyncio.sleep(60)
        assert [at - began for at in ends] == [pytest.approx(45.0)] * lost

    run(test())


def test_an_answer_in_a_hand_over_continues_the_session() -> None:
    """That of the commit before it is read later: nothing is read while partitions drain."""

    async def test() -> None:
        ends: list[None] = []
        client: Any = Client()
        commits = Commits("billing", 45.0, lambda: ends.append(None))
        await commits.send(client, FIRST)
        await asyncio.sleep(40)
        await commits.settle(client)
        await asyncio.sleep(60)
        assert ends == []

    run(test())


async def test_an_error_of_the_whole_commit_is_told_where_no_partition_is_named() -> None:
    commits, client = Commits("billing", 45.0, lambda: None), Client()
    as_client: Any = client
    answer = await commits.send(as_client, FIRST)

    await commits.hear(KafkaError(KafkaError.UNKNOWN_MEMBER_ID), [])

    with pytest.raises(CommitRefusedError):
        await answer


async def test_a_call_that_hangs_does_not_keep_a_hand_over_from_ending() -> None:
    calls = Calls()
    begun = asyncio.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    waiting = asyncio.create_task(calls.call(hang), name="hangs")
    handing_over = asyncio.create_task(begun.wait(), name="hand over")

    await asyncio.wait_for(calls.serve_until(handing_over), 10)  # type: ignore[arg-type]

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def begun_and_left(calls: Calls, go_on: asyncio.Event) -> asyncio.Task[None]:
    """Who asked for something that was begun inside of a callback and has not ended with it."""
    begun = asyncio.Event()

    async def commit() -> None:
        begun.set()
        await go_on.wait()

    asking = asyncio.create_task(calls.call(commit), name="commit coordinator")
    handing_over = asyncio.create_task(begun.wait(), name="hand over")
    await calls.serve_until(handing_over)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return asking


async def test_who_waits_for_a_call_when_a_hand_over_ends_is_not_cancelled_and_hears_its_end() -> None:
    """Else a commit coordinator ended for good, without a word, when it had just sent something of what is kept."""
    go_on = asyncio.Event()
    asking = await begun_and_left(Calls(), go_on)
    assert not asking.done()

    go_on.set()
    await asyncio.wait_for(asking, 10)


async def test_who_waits_for_a_call_when_the_client_is_closed_is_told_so() -> None:
    calls = Calls()
    asking = await begun_and_left(calls, asyncio.Event())

    calls.close(ClientLostError("the Kafka client is closed"))

    with pytest.raises(ClientLostError, match="is closed"):
        await asyncio.wait_for(asking, 10)


async def test_a_call_that_nobody_waits_for_any_more_is_not_begun() -> None:
    calls = Calls()
    begun: list[str] = []

    async def note() -> None:
        begun.append("called")

    waiting = asyncio.create_task(calls.call(note), name="gives up")
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await calls.serve()

    assert begun == []


@pytest.mark.parametrize(("writes", "reads"), [("confluent", "aiokafka"), ("aiokafka", "confluent")])
async def test_what_one_client_notes_with_a_commit_the_other_reads(
    kafka: SharedKafka, topic: str, group: str, writes: str, reads: str
) -> None:
    await kafka.create_topic(topic, 1)
    at = TopicPartition(topic, 0)
    noted = CommitMetadata(first_generation=3)
    writer = Member(settings_for(kafka.bootstrap, client=writes), group)
    reader = Member(settings_for(kafka.bootstrap, client=reads), group)
    try:
        (_, membership) = await writer.join(topic)
        committing = asyncio.create_task(writer.transport.commit({at: Committed(5, noted.text(5))}, membership))
        while not committing.done():
            await writer.poll()
        await committing
        await writer.transport.close()

        await reader.join(topic)
        found = (await reader.transport.committed([at]))[at]
        assert found is not None
        assert found.offset == 5
        assert CommitMetadata.read(found.metadata, 5) == noted
    finally:
        await writer.transport.close()
        await reader.transport.close()
