"""`aioshard dlt` without all permissions: the missing one is named, and nothing is half done."""

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation

from aioshard.dead_letters.progress import progress_group, sending_group
from aioshard.records import Record
from aioshard.serde.side_records import Failure, dead_letter
from tests.support.access import allow, create_scram_user
from tests.support.brokers import SharedKafka
from tests.support.kafka_properties import Credentials

Aioshard = Callable[..., Awaitable[Any]]
Publish = Callable[..., Awaitable[list[tuple[int, int]]]]
Grant = Callable[..., Awaitable[None]]

READ = (AclOperation.READ, AclOperation.DESCRIBE)
WRITE = (AclOperation.WRITE, AclOperation.DESCRIBE)


@pytest.fixture
async def grant(
    kafka: SharedKafka,
    topic: str,
    publish: Publish,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Grant:
    """Gives the user of the command a right; there is a dead letter that the user may read."""
    user = Credentials(f"user-{uuid.uuid4().hex[:8]}", "secret")
    await create_scram_user(kafka, user)
    await kafka.create_topic(topic, 1, {"retention.ms": "-1"})
    await kafka.create_topic(f"{topic}.dlt", 1, {"retention.ms": "-1"})
    record = Record(topic, 0, 1, b"k", b"v", (), 1.6e9)
    await publish(dead_letter(f"{topic}.dlt", record, Failure("g", "h", 1, "ValueError", "no", 1.7e9)))
    request.getfixturevalue("aioshard")  # it clears the environment, so it comes before what is set here
    for name, value in {
        "BOOTSTRAP_SERVERS": kafka.secure_bootstrap,
        "SECURITY_PROTOCOL": "SASL_SSL",
        "SSL_CAFILE": str(kafka.certificates.ca_file),
        "SASL_MECHANISM": "SCRAM-SHA-512",
        "SASL_USERNAME": user.username,
        "SASL_PASSWORD": user.password,
    }.items():
        monkeypatch.setenv(f"AIOSHARD_{name}", value)

    async def give(resource: Any, name: str, *operations: AclOperation) -> None:
        await allow(kafka, user, resource, name, *operations)

    await give("topic", f"{topic}.dlt", *READ)
    return give


@pytest.mark.usefixtures("grant")
async def test_dead_letters_can_be_shown_without_replay_progress(aioshard: Aioshard, topic: str) -> None:
    ended = await aioshard("dlt", "show", f"{topic}.dlt")

    assert ended.code == 0
    assert ended.output.splitlines()[0] == f"1 dead letter in {topic}.dlt"
    assert f"the brokers do not allow this user to read with group '{progress_group(topic)}.dlt'" in ended.errors

    due = await aioshard("dlt", "show", f"{topic}.dlt", "--due")

    assert (due.code, due.output) == (1, "")
    assert f"the brokers do not allow this user to read with group '{progress_group(topic)}.dlt'" in due.errors


@pytest.mark.usefixtures("grant")
async def test_an_unreadable_topic_is_named(aioshard: Aioshard, topic: str) -> None:
    ended = await aioshard("dlt", "show", topic)

    assert ended.code == 1
    assert f"the brokers do not allow this user to read topic '{topic}'" in ended.errors


async def test_nothing_is_republished_without_storing_progress(
    aioshard: Aioshard, grant: Grant, topic: str, kafka: SharedKafka
) -> None:
    await grant("topic", topic, *WRITE)

    ended = await aioshard("dlt", "replay", f"{topic}.dlt", "--yes")

    assert ended.code == 1
    assert f"the brokers do not allow this user to read with group '{progress_group(topic)}.dlt'" in ended.errors
    assert await kafka.read(topic) == []


async def test_an_unwritable_topic_is_named_and_the_dead_letter_stays_due(
    aioshard: Aioshard, grant: Grant, topic: str, kafka: SharedKafka
) -> None:
    for group in (progress_group(f"{topic}.dlt"), sending_group(f"{topic}.dlt")):
        await grant("group", group, AclOperation.READ)
    await grant("transactional_id", f"{sending_group(f'{topic}.dlt')}:all", *WRITE)
    await grant("topic", topic, AclOperation.DESCRIBE)

    ended = await aioshard("dlt", "replay", f"{topic}.dlt", "--yes")

    assert ended.code == 1
    assert f"the brokers do not allow this user to write to topic '{topic}'" in ended.errors
    assert "0 dead letters were sent back" in ended.errors

    await grant("topic", topic, *WRITE)
    again = await aioshard("dlt", "replay", f"{topic}.dlt", "--yes")

    assert again.output == f"1 dead letter was sent back: {topic} 1\n"
    assert [record.value for record in await kafka.read(topic)] == [b"v"]
