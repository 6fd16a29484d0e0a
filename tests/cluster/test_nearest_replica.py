"""Reading from the replica in the rack of the app, whatever happens to it: each record once and in order (KIP-392)."""

import asyncio
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from aioshard import App, Record
from aioshard.kafka.wire.requests import FETCH
from tests.kafka.faults.support import DEADLINE, commit_from_outside, quick_app, until
from tests.support.proxies import FETCH as FETCH_KEY
from tests.support.proxies import Request
from tests.support.three_brokers import ThreeBrokers, rack_of

LEADER, NEAR, FAR = 1, 2, 3
"""The node that leads the partition, the one in the rack of the app, and another replica."""
CLIENT = "near"
ALWAYS = 1_000_000
OUT_OF_RANGE, DIVERGING = 1, "diverging"
PADDING = 200_000
"""Bytes of a large record: six of them are more than a follower copies with one request."""


class Reading:
    """An app in the rack of a follower, the records that it ran, and the brokers that sent them."""

    def __init__(self, brokers: ThreeBrokers, topic: str, group: str) -> None:
        self.brokers = brokers
        self.topic = topic
        self.group = group
        self.expected: list[bytes] = []
        self.ran: list[bytes | None] = []
        self.sent_bytes: dict[int, int] = defaultdict(int)
        """Bytes of records that each node has sent to the app."""
        self.refusals: dict[int, list[object]] = defaultdict(list)
        """The answers of each node instead of records: error codes, or that its log differs."""
        self.wrong_answers = 0
        """How often the leader will name the follower although that is behind."""
        brokers.proxies.answer(self._pass, api_key=FETCH_KEY, client_id=CLIENT)

    def _pass(self, request: Request, answer: bytes) -> bytes:
        response = decode(request, answer)
        parts = [part for topic in response.topics or () for part in topic.partitions or ()]
        if self.wrong_answers and request.node == LEADER and parts and has_rack(request):
            self.wrong_answers -= 1
            return answer[: header_size(request)] + name_follower(request, response)
        for part in parts:
            self.sent_bytes[request.node] += len(part.records or b"")
            if part.error or part.diverging:
                self.refusals[request.node].append(part.error or DIVERGING)
        return answer

    def app(self, rack: str = rack_of(NEAR)) -> App:
        options = {"client_rack": rack} if rack else {}
        app = quick_app(self.brokers.proxied_bootstrap, self.group, client_id=CLIENT, client_options=options)

        @app.consume(self.topic)
        async def handle(record: Record) -> None:
            self.ran.append(value_of(record.value))

        return app

    async def publish(self, name: str, count: int, padding: int = 0) -> None:
        """Publish records with a value of their own each."""
        values = [f"{name}-{number}".encode() for number in range(count)]
        await self.brokers.produce(
            self.topic, [(b"k", value + b"." * padding) for value in values], batch_bytes=2 * PADDING
        )
        self.expected += values

    async def until_all_ran(self, app: App, timeout: float = DEADLINE) -> None:
        """Return when the app has run everything that was published, each once and in order."""
        await until(lambda: len(self.ran) >= len(self.expected), app.explain, timeout)
        assert self.ran == self.expected

    async def until_read_near(self, app: App) -> None:
        """Publish a record at a time until the follower in the rack sends one."""
        before = self.sent_bytes[NEAR]
        async with asyncio.timeout(DEADLINE):
            while self.sent_bytes[NEAR] == before:
                await self.publish(f"probe-{len(self.expected)}", 1)
                await self.until_all_ran(app)

    def log_at(self, node: int) -> Path:
        """The directory in which a node keeps its copy of the partition."""
        return self.brokers.nodes[node].directory / "data" / f"{self.topic}-0"

    def copied(self) -> int:
        """Bytes that the follower has copied."""
        return sum(file.stat().st_size for file in self.log_at(NEAR).glob("*.log"))

    def damage(self, node: int, value: bytes) -> None:
        """Change a record in the copy of a running node, which sends its files as they are."""
        (file,) = self.log_at(node).glob("*.log")
        with file.open("r+b") as segment:
            segment.seek(segment.read().index(value))
            segment.write(value.upper())

    async def throttle_copies(self, rate: int | None) -> None:
        """Limit how many bytes in a second the follower copies while it is behind; None for no limit."""
        await configure(self.brokers, ResourceType.BROKER, str(NEAR), "follower.replication.throttled.rate", rate)
        throttled = None if rate is None else "*"
        await configure(
            self.brokers, ResourceType.TOPIC, self.topic, "follower.replication.throttled.replicas", throttled
        )


def value_of(padded: bytes | None) -> bytes:
    assert padded is not None
    return padded.rstrip(b".")


def header_size(request: Request) -> int:
    """Bytes before the body of a response: its correlation id and, since version 12, the number of its tags."""
    return 4 + FETCH.is_flexible(request.api_version)


def decode(request: Request, answer: bytes) -> Any:
    """Return the decoded body of an answer to a fetch."""
    return FETCH.decode(request.api_version, answer, header_size(request))


def has_rack(request: Request) -> bool:
    """Whether a fetch says where its client is: the leader may name a follower then."""
    return rack_of(NEAR).encode() in request.frame


def name_follower(request: Request, response: Any) -> bytes:
    """Return the body of the answer of a leader that names the follower in the rack instead of sending records."""
    values = as_values(response)
    for topic in values["topics"]:
        for part in topic["partitions"]:
            part |= {"preferred": NEAR, "records": b""}
    return FETCH.encode_response(request.api_version, values)


def as_values(decoded: Any) -> Any:
    """Return decoded structures in the form in which they are encoded."""
    if hasattr(decoded, "_asdict"):
        return {name: as_values(value) for name, value in decoded._asdict().items()}
    return [as_values(value) for value in decoded] if isinstance(decoded, list) else decoded


async def configure(brokers: ThreeBrokers, kind: ResourceType, name: str, setting: str, value: object | None) -> None:
    """Change a setting of a broker or topic, or remove it."""
    operation = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
    entry = ConfigEntry(setting, str(value), incremental_operation=operation)
    resource = ConfigResource(kind, name, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": brokers.reachable})
    (done,) = admin.incremental_alter_configs([resource]).values()
    async with asyncio.timeout(DEADLINE):
        await asyncio.wrap_future(done)


@pytest.fixture
async def reading(brokers: ThreeBrokers, topic: str, group: str) -> Reading:
    return Reading(brokers, topic, group)


@pytest.mark.timeout(240)
async def test_the_follower_in_the_rack_is_read_until_it_dies(reading: Reading) -> None:
    brokers = reading.brokers
    await brokers.create_topic(reading.topic, assignment={0: [LEADER, NEAR, FAR]})
    async with reading.app() as app:
        await reading.until_read_near(app)
        reading.sent_bytes.clear()
        await reading.publish("near", 100)
        await reading.until_all_ran(app)
        assert {node for node, size in reading.sent_bytes.items() if size} == {NEAR}

        await brokers.kill(NEAR)
        await reading.publish("leader", 100)
        await reading.until_all_ran(app)
        assert reading.sent_bytes[LEADER]


@pytest.mark.timeout(240)
async def test_a_follower_that_lags_neither_stops_nor_resets_the_reading(reading: Reading) -> None:
    """It has a part of the log, returns nothing at its end, and an error for offsets that only the leader has."""
    brokers = reading.brokers
    await brokers.create_topic(reading.topic, assignment={0: [LEADER]}, config={"min.insync.replicas": "1"})
    await reading.publish("old", 30, PADDING)
    await reading.throttle_copies(1)
    try:
        await brokers.reassign(reading.topic, 0, [LEADER, NEAR])
        await until(reading.copied)
        reading.wrong_answers = 1
        async with reading.app() as app:
            await reading.until_all_ran(app)
            assert reading.sent_bytes[NEAR], "the first records came from the follower"
            assert reading.sent_bytes[LEADER], "the others came from the leader"
            assert not reading.refusals[NEAR]

            reading.wrong_answers = 1
            await reading.publish("new", 20)
            await reading.until_all_ran(app)
            assert reading.refusals[NEAR] == [DIVERGING]

        # An offset that another tool commits has no leader epoch that the follower could miss.
        await commit_from_outside(brokers, reading.group, reading.topic, {0: len(reading.expected)})
        reading.wrong_answers = ALWAYS
        async with reading.app() as app:
            await reading.publish("last", 20)
            await reading.until_all_ran(app)
            assert OUT_OF_RANGE in reading.refusals[NEAR]

            reading.wrong_answers = 0
            await reading.throttle_copies(None)
            await reading.until_read_near(app)
    finally:
        await reading.throttle_copies(None)


@pytest.mark.chaos
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", [3.0, 12.0], ids=["in sync", "fenced"])
async def test_a_follower_that_hangs_neither_repeats_nor_skips(reading: Reading, seconds: float) -> None:
    brokers = reading.brokers
    await brokers.create_topic(reading.topic, assignment={0: [LEADER, NEAR, FAR]})
    async with reading.app() as app:
        await reading.until_read_near(app)
        await brokers.freeze(NEAR)
        publishing = asyncio.create_task(reading.publish("frozen", 100))
        await asyncio.sleep(seconds)
        await brokers.thaw(NEAR)
        await publishing
        await reading.until_all_ran(app)
        await reading.until_read_near(app)


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_a_follower_that_lost_its_log_neither_repeats_nor_skips(reading: Reading) -> None:
    brokers = reading.brokers
    await brokers.create_topic(reading.topic, assignment={0: [LEADER, NEAR, FAR]})
    await reading.publish("old", 30, PADDING)
    async with reading.app() as app:
        await reading.until_read_near(app)
        await reading.until_all_ran(app)
        await brokers.kill(NEAR)
        shutil.rmtree(reading.log_at(NEAR))
        await reading.publish("without", 20)
        await reading.until_all_ran(app)
        await brokers.start(NEAR)
        await reading.publish("again", 20)
        await reading.until_all_ran(app)
        await reading.until_read_near(app)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rack", ["", rack_of(NEAR)], ids=["at the leader", "at the follower"])
async def test_a_record_that_one_replica_has_damaged_is_read_from_another(reading: Reading, rack: str) -> None:
    await reading.brokers.create_topic(reading.topic, assignment={0: [LEADER, NEAR, FAR]})
    for batch in ("first", "second", "third"):
        await reading.publish(batch, 10)
    reading.damage(NEAR if rack else LEADER, b"second-5")
    async with reading.app(rack) as app:
        await reading.until_all_ran(app)
        await reading.publish("last", 10)
        await reading.until_all_ran(app)
        assert app.statistics().trouble is None
    assert len([node for node, size in reading.sent_bytes.items() if size]) > 1
