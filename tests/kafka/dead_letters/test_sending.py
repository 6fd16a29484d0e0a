"""Records and progress are written together: no record twice, whoever sends, and whatever is stored late."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiokafka
import aiokafka.structs
import pytest
from confluent_kafka.admin import AdminClient

from aioshard import Settings
from aioshard.dead_letters.filters import EVERYTHING, Filters
from aioshard.dead_letters.ledger import Ledger
from aioshard.dead_letters.plan import make_plan
from aioshard.dead_letters.progress import ReplayProgress, progress_group, sending_group
from aioshard.dead_letters.reading import DeadLetterTopic
from aioshard.dead_letters.replaying import Replay
from aioshard.dead_letters.results import Result
from aioshard.dead_letters.sending import SendBack
from aioshard.errors import TakenOverError, TransportError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Message
from aioshard.records import Record, TopicPartition
from aioshard.serde.side_records import Coordinates, dead_letter
from tests.support.brokers import SharedKafka
from tests.support.dead_letters import DEADLINE, failure, record, write

FOREVER = {"retention.ms": "-1"}


class Outage:
    """A dead-letter topic with letters of one topic, and runs over it."""

    def __init__(self, kafka: SharedKafka, source: str) -> None:
        self.kafka = kafka
        self.source = source
        self.topic = f"{source}.dlt"
        self.settings = Settings(bootstrap_servers=kafka.bootstrap)

    async def write(self, *records: Record, partition: int = 0) -> None:
        letters = [
            dead_letter(self.topic, original, failure(original.offset))._replace(partition=partition)
            for original in records
        ]
        await write(self.kafka.bootstrap, letters)

    def record(self, number: int, **fields: object) -> Record:
        return record(number, topic=self.source, **fields)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[DeadLetterTopic]:
        async with DeadLetterTopic.opened(self.settings, self.topic) as topic:
            await topic.fetch_progress()
            yield topic

    async def planned(self, topic: DeadLetterTopic, filters: Filters = EVERYTHING) -> Replay:
        plan = await make_plan(topic, filters)
        return Replay(topic, plan, SendBack(), who="user test", stop=asyncio.Event())

    async def send(self, filters: Filters = EVERYTHING) -> Result:
        async with self.opened() as topic:
            replay = await self.planned(topic, filters)
            await replay.run(self.settings)
            return replay.result

    async def due(self) -> list[int]:
        """The offsets of the records that are due."""
        async with self.opened() as topic:
            return [letter.original.offset async for letter in topic.dead_letters() if not letter.done]

    async def forget(self, group: str) -> None:
        """Let the brokers forget the offsets of a group."""
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap})
        await asyncio.to_thread(admin.delete_consumer_groups([group])[group].result, DEADLINE)

    async def arrived(self) -> list[int]:
        """The records that readers of committed records see."""
        return [int(found.value or b"") for found in await self.kafka.read(self.source)]


@pytest.fixture
async def outage(kafka: SharedKafka, topic: str) -> Outage:
    made = Outage(kafka, topic)
    await kafka.create_topic(made.source, 1, FOREVER)
    await kafka.create_topic(made.topic, 2, FOREVER)
    await made.write(*(made.record(number) for number in range(10)))
    return made


# Two runs


async def test_a_second_run_ends_the_first_and_nothing_is_sent_twice(outage: Outage) -> None:
    """The first has read its plan, and has sent a part of it."""
    async with outage.opened() as first:
        plan = await make_plan(first, EVERYTHING)
        async with Ledger.opened(outage.settings, first) as ledger:
            plan.adopt(first)
            await ledger.store([(0, 0), (0, 1)], [Message(outage.source, b"0"), Message(outage.source, b"1")])

            second = await outage.send()

            with pytest.raises(TakenOverError):
                await ledger.store([(0, 2)], [Message(outage.source, b"2")])
    assert second.done == {outage.source: 8}
    assert await outage.arrived() == list(range(10))
    assert await outage.due() == []


async def test_a_run_takes_over_before_it_reads_the_progress(outage: Outage) -> None:
    """Otherwise the other one could send something in between."""
    async with (
        outage.opened() as first,
        outage.opened() as second,
        Ledger.opened(outage.settings, first) as ledger,
        Ledger.opened(outage.settings, second),
    ):
        with pytest.raises(TakenOverError):
            await ledger.store([(0, 0)], [Message(outage.source, b"0")])

    assert await outage.arrived() == []


async def test_a_run_whose_plan_is_older_than_another_run_sends_nothing_again(outage: Outage) -> None:
    """An operator answers the question after another one has sent everything."""
    async with outage.opened() as topic:
        replay = await outage.planned(topic, Filters(until=failure(6).failed_at))
        await outage.send(Filters(since=failure(4).failed_at))
        await replay.run(outage.settings)

    assert replay.result.done == {outage.source: 4}
    assert sorted(await outage.arrived()) == list(range(10))


async def test_a_plan_is_not_carried_out_on_another_topic_of_that_name(outage: Outage) -> None:
    """The topic is deleted and created again while an operator thinks about the question."""
    async with outage.opened() as topic:
        replay = await outage.planned(topic)
        await outage.kafka.delete_topic(outage.topic)
        await outage.kafka.create_topic(outage.topic, 2, FOREVER)
        await outage.write(*(outage.record(number) for number in range(20, 30)))
        with pytest.raises(TransportError, match="created again"):
            await replay.run(outage.settings)

    assert replay.result.total() == 0
    assert await outage.arrived() == []
    assert await outage.due() == list(range(20, 30))


async def test_a_run_that_was_killed_in_a_transaction_keeps_nobody_from_looking_or_continuing(outage: Outage) -> None:
    """Its transaction stays open until its timeout, or until another run takes over."""
    group = sending_group(outage.topic)
    killed = aiokafka.AIOKafkaProducer(bootstrap_servers=outage.kafka.bootstrap, transactional_id=f"{group}:all")
    await killed.start()
    try:
        await killed.begin_transaction()
        pending = {aiokafka.TopicPartition(outage.topic, 0): aiokafka.structs.OffsetAndMetadata(4, "")}
        await killed.send_offsets_to_transaction(pending, group)

        async with outage.opened() as topic:
            due = await make_plan(topic, EVERYTHING)
        result = await outage.send()
    finally:
        await killed.stop()

    assert len(due) == 10
    assert result.done.total() == 10


async def test_runs_at_the_same_time_send_each_record_once(outage: Outage) -> None:
    """All but the last end with an error that says so, or find nothing to do."""
    results = await asyncio.gather(*(outage.send() for _ in range(4)), return_exceptions=True)

    others = [result for result in results if not isinstance(result, Result | TakenOverError)]
    assert others == []
    assert await outage.arrived() == list(range(10))
    assert await outage.due() == []


async def test_a_second_dead_letter_of_a_record_that_was_sent_is_done_without_sending_it(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in another partition, so a run with a filter has not seen it."""
    await outage.send()
    await outage.write(outage.record(4), partition=1)
    assert await outage.due() == [4]

    assert (await outage.send(Filters(partitions=(1,)))).done == {}

    assert f'finish topic="{outage.topic}" records="1/0" by user test' in caplog.messages[-1]
    assert await outage.due() == []
    assert await outage.arrived() == list(range(10))


# The stored progress


async def test_a_copy_that_arrives_late_undoes_nothing(outage: Outage) -> None:
    """From a run that was suspended between its transaction and the copy, while another one sent the rest."""
    await outage.send(Filters(records=(Coordinates(outage.source, 0, 3),)))
    async with KafkaAdmin(outage.settings) as admin:
        at = TopicPartition(outage.topic, 0)
        late = (await admin.group_commits(progress_group(outage.topic), [at]))[at]
        assert late is not None
        await outage.send()

        await admin.commit_without_member(progress_group(outage.topic), {at: late})

    assert await outage.due() == []
    assert (await outage.send()).done == {}
    assert await outage.arrived() == [3, 0, 1, 2, 4, 5, 6, 7, 8, 9]


async def test_progress_outlives_the_offsets_of_the_transactions(outage: Outage) -> None:
    """Brokers delete those a week after the last one."""
    await outage.send(Filters(until=failure(5).failed_at))
    async with KafkaAdmin(outage.settings) as admin:
        assert await admin.all_commits(sending_group(outage.topic)) != {}
    await outage.forget(sending_group(outage.topic))

    assert (await outage.send()).done == {outage.source: 5}
    assert sorted(await outage.arrived()) == list(range(10))


async def test_a_run_copies_what_a_killed_one_has_left(outage: Outage) -> None:
    """That one had committed its last transaction, and not the copy yet. The next run may find nothing to send."""
    await outage.send()
    await outage.forget(progress_group(outage.topic))
    async with outage.opened() as topic, Ledger.opened(outage.settings, topic):
        pass
    await outage.forget(sending_group(outage.topic))

    assert await outage.due() == []


async def test_a_copy_that_fails_is_not_taken_for_a_failed_transaction(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, and counts what it has sent; the next one continues."""

    async def fail(*_: object, **__: object) -> None:
        raise TransportError("the coordinator does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(SendBack, "most_records", 4)
        broken.setattr(KafkaAdmin, "commit_without_member", fail)
        async with outage.opened() as topic:
            replay = await outage.planned(topic)
            with pytest.raises(TransportError):
                await replay.run(outage.settings)
    assert replay.result.done == {outage.source: 4}
    assert (await outage.send()).done == {outage.source: 6}
    assert await outage.arrived() == list(range(10))


async def test_nothing_is_sent_if_its_progress_does_not_fit(outage: Outage) -> None:
    async with outage.opened() as topic:
        progress = topic.progress[0]
        for offset in range(120_000):
            progress.add(offset)
        async with Ledger.opened(outage.settings, topic) as ledger:
            topic.progress[0] = progress
            scattered = [
                (0, offset) for offset in range(1, 120_000) if offset * offset % 7 in {1, 4} or offset % 11 == 3
            ]
            with pytest.raises(TransportError, match="too scattered"):
                await ledger.store(scattered, [Message(outage.source, b"1")])
            assert topic.progress[0].is_done(scattered[0][1]) is False
            with pytest.raises(TransportError, match="too scattered"):
                await ledger.store(scattered)  # by handlers that have run

    assert await outage.arrived() == []
    async with KafkaAdmin(outage.settings) as admin:
        at = TopicPartition(outage.topic, 0)
        stored = (await admin.group_commits(sending_group(outage.topic), [at]))[at]
    assert stored is not None
    assert ReplayProgress(stored).is_done(scattered[1000][1])


# Stopping


async def test_a_stopped_run_says_how_far_it_came(outage: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SendBack, "most_records", 3)
    stop = asyncio.Event()

    async def stop_after(*arguments: Any) -> None:
        await send(*arguments)
        stop.set()

    send = SendBack.apply
    monkeypatch.setattr(SendBack, "apply", stop_after)
    async with outage.opened() as topic:
        replay = Replay(topic, await make_plan(topic, EVERYTHING), SendBack(), who="user test", stop=stop)
        await replay.run(outage.settings)

    assert (replay.result.stopped, replay.result.done) == (True, {outage.source: 3})
    assert await outage.arrived() == [0, 1, 2]
    assert await outage.due() == list(range(3, 10))


# The audit log


async def test_every_transaction_is_in_the_audit_log(
    outage: Outage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SendBack, "most_records", 4)
    await outage.write(outage.record(2), partition=1)  # a second dead letter of one record
    with caplog.at_level(logging.WARNING, "aioshard.web.audit"):
        await outage.send()

    lines = [found.getMessage() for found in caplog.records if found.name == "aioshard.web.audit"]
    assert [line.partition(" by ")[0] for line in lines] == [
        f'send topic="{outage.topic}" records="0/0-3,1/0"',
        f'send topic="{outage.topic}" records="0/4-7"',
        f'send topic="{outage.topic}" records="0/8-9"',
    ]
    assert all(" by user test: " in line for line in lines)
