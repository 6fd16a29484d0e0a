"""`aioshard topics`: what an app needs, what exists, and what `--create` creates."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.support.brokers import SharedKafka
from tests.support.commands import Run

MODULE = """
from aioshard import App, DeadLetter, Park, Record

app = App("billing", bootstrap_servers={bootstrap!r}, auto_offset_reset="earliest")

@app.consume({topic!r}, publish_to={topic!r} + ".shipped", on_failure=DeadLetter({topic!r} + ".dlt"))
async def on_order(record: Record) -> bytes: ...

@app.consume(pattern={topic!r} + "[.]refunds.*", on_failure=Park({topic!r} + ".parked"))
async def on_refund(record: Record) -> None: ...
"""

Topics = Callable[..., Awaitable[tuple[int, dict[str, Any]]]]


@pytest.fixture
def topics(aioshard: Run, kafka: SharedKafka, topic: str, tmp_path: Path) -> Topics:
    """Runs the command for an app; returns its exit code, and its topics by the end of the name."""
    module = f"app_{topic.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODULE.format(bootstrap=kafka.bootstrap, topic=topic))

    async def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        ended = await aioshard("topics", f"{module}:app", "--app-dir", str(tmp_path), "--json", *arguments)
        content = json.loads(ended.output)
        assert content["ok"] == (ended.code == 0)
        return ended.code, {row["topic"].removeprefix(topic): row for row in content["topics"]}

    return call


async def settings_of(kafka: SharedKafka, topic: str) -> dict[str, str]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    finally:
        await admin.close()
    ((*_, entries),) = answer.resources
    return {name: value for name, value, *_ in entries}


async def test_missing_topics_are_listed_and_created(kafka: SharedKafka, topic: str, topics: Topics) -> None:
    await kafka.create_topic(topic, 3)
    await kafka.create_topic(f"{topic}.refunds.eu", 2)

    code, found = await topics()
    assert code == 3
    assert {name: (row["role"], row["exists"]) for name, row in found.items()} == {
        "": ("input", True),
        ".shipped": ("output", False),
        ".dlt": ("dead letters", False),
        ".refunds.eu": ("input", True),
        ".parked": ("parked records", False),
    }
    assert found[""]["partitions"] == {"found": 3, "wanted": None}
    assert found[".dlt"]["partitions"] == {"found": None, "wanted": 3}
    assert found[".dlt"]["handlers"] == ["on_order"]

    code, found = await topics("--create")
    assert code == 0
    assert {name for name, row in found.items() if row["created"]} == {".shipped", ".dlt", ".parked"}
    assert [len(await kafka.partitions(topic + name)) for name in (".shipped", ".dlt", ".parked")] == [3, 3, 2]
    dead_letters = await settings_of(kafka, f"{topic}.dlt")
    assert dead_letters["cleanup.policy"] == "delete"
    assert dead_letters["message.timestamp.type"] == "LogAppendTime"
    assert int(dead_letters["max.message.bytes"]) > int((await settings_of(kafka, topic))["max.message.bytes"])
    assert (await settings_of(kafka, f"{topic}.parked"))["cleanup.policy"] == "compact"

    code, found = await topics("--create")
    assert code == 0
    assert not [row for row in found.values() if row["created"] or row["problems"] or row["warnings"]]


@pytest.mark.parametrize(("arguments", "partitions"), [(["--partitions", "2"], 2), ([], 1)], ids=["set", "default"])
async def test_input_topics_are_created_too(
    kafka: SharedKafka, topic: str, topics: Topics, arguments: list[str], partitions: int
) -> None:
    code, found = await topics("--create", *arguments)
    assert (code, found[""]["created"]) == (0, True)
    assert [len(await kafka.partitions(topic + name)) for name in ("", ".dlt")] == [partitions, partitions]


async def test_topics_that_do_not_fit_are_named(kafka: SharedKafka, topic: str, topics: Topics) -> None:
    await kafka.create_topic(topic, 1)
    await kafka.create_topic(f"{topic}.shipped", 1)
    await kafka.create_topic(f"{topic}.refunds.eu", 2)
    await kafka.create_topic(f"{topic}.dlt", 1, {"cleanup.policy": "compact"})
    await kafka.create_topic(f"{topic}.parked", 1, {"cleanup.policy": "delete"})

    code, found = await topics("--create")
    assert code == 3
    assert {name for name, row in found.items() if row["problems"]} == {".parked"}
    assert len(found[".parked"]["problems"]) == 2, "its partitions and its policy"
    assert {name for name, row in found.items() if row["warnings"]} == {".dlt"}


@pytest.mark.usefixtures("topics")
async def test_the_table_names_each_topic(aioshard: Run, kafka: SharedKafka, topic: str, tmp_path: Path) -> None:
    await kafka.create_topic(topic, 1)
    ended = await aioshard("topics", f"app_{topic.replace('-', '_')}:app", "--app-dir", str(tmp_path))
    assert ended.code == 3
    lines = ended.output.splitlines()
    assert any(line.startswith(f"{topic}.dlt ") and "no" in line.split() for line in lines)
