"""Plans of topics on a real broker, and topics that cannot be planned."""

import datetime as dt
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from aioshard import spark
from aioshard.core.commit_metadata import CommitMetadata, FirstCommit
from aioshard.core.finished_offsets import Run
from aioshard.errors import AuthorizationError, DataLossError, PlanError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.ports import Committed
from aioshard.records import TopicPartition
from aioshard.settings import Settings
from aioshard.spark.plans import Plan, app_version
from tests.spark.apps import AppModule, produce_at, write_app
from tests.support.access import allow
from tests.support.brokers import SharedKafka
from tests.support.kafka_properties import SCRAM_USER, SUPER_USER
from tests.support.paths import PROJECT

Write = Callable[..., AppModule]
Ranges = dict[tuple[str, int], tuple[int, int]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kafka: SharedKafka, group: str) -> Write:
    """Writes an app of the test's group."""

    def write(topic: str = "", handlers: str = "", **settings: Any) -> AppModule:
        return write_app(tmp_path, monkeypatch, kafka, group, topic, handlers, **settings)

    return write


async def commit(kafka: SharedKafka, group: str, topic: str, offsets: dict[int, tuple[int, str]]) -> None:
    """Commits offsets with their metadata from outside."""
    due = {TopicPartition(topic, number): Committed(*what) for number, what in offsets.items()}
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers:
        await brokers.commit_without_member(group, due)


async def committed(kafka: SharedKafka, group: str, topic: str, partition: int = 0) -> Committed | None:
    """Return the commits of a group, with their metadata."""
    at = TopicPartition(topic, partition)
    async with KafkaAdmin(Settings(bootstrap_servers=kafka.bootstrap)) as brokers:
        return (await brokers.group_commits(group, [at]))[at]


def ranges_of(plan: Plan) -> Ranges:
    return {(planned.topic, planned.partition): (planned.start, planned.end) for planned in plan.ranges}


async def made(app: AppModule, **options: Any) -> Plan:
    return await spark.plan(app.target, directory=None, **options)


# Starts of ranges ---------------------------------------------------------------------


async def test_a_plan_covers_from_the_commit_to_the_end_of_the_log(
    kafka: SharedKafka, topic: str, group: str, write: Write, tmp_path: Path
) -> None:
    await kafka.create_topic(topic, partitions=3)
    for partition in (0, 1):
        await kafka.produce(topic, [(None, b"")] * 10, partition)
    await commit(kafka, group, topic, {0: (4, "aioshard/1 first=3,2")})
    app = write(topic)

    plan = await spark.plan(app.target, directory=tmp_path / "run", tasks=2, max_rows_per_batch=1000)

    assert ranges_of(plan) == {(topic, 0): (4, 10), (topic, 1): (0, 10), (topic, 2): (0, 0)}
    assert plan.records == 16
    assert [planned.before for planned in plan.ranges] == [Committed(4, "aioshard/1 first=3,2"), None, None]
    assert (plan.app, plan.group_id, plan.bootstrap_servers) == (app.target, group, None)
    assert (plan.tasks, plan.max_rows_per_batch, plan.isolation_level) == (2, 1000, "read_committed")
    (handler,) = plan.handlers
    assert (handler.name, handler.topics, handler.layout) == ("handle", (topic,), "partition")
    assert spark.RunDirectory(tmp_path / "run").plan() == plan
    assert await kafka.committed(group, topic) == {0: 4}, "planning changes nothing"


@pytest.mark.parametrize(("policy", "start"), [("earliest", 0), ("latest", 10)])
async def test_a_group_without_commits_starts_where_its_app_would(
    kafka: SharedKafka, topic: str, write: Write, policy: str, start: int
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 10)

    plan = await made(write(topic, auto_offset_reset=policy))

    assert ranges_of(plan) == {(topic, 0): (start, 10)}


async def test_a_group_without_commits_and_policy_is_refused(kafka: SharedKafka, topic: str, write: Write) -> None:
    await kafka.create_topic(topic)

    with pytest.raises(PlanError, match=f"{topic}/0.*auto_offset_reset"):
        await made(write(topic, auto_offset_reset=None))


async def test_a_partition_newer_than_the_group_starts_at_its_beginning(
    kafka: SharedKafka, topic: str, group: str, write: Write
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 10)
    await commit(kafka, group, topic, {0: (10, "")})
    await kafka.add_partitions(topic, 2)
    await kafka.produce(topic, [(None, b"")] * 3, partition=1)

    plan = await made(write(topic, auto_offset_reset="latest"))

    assert ranges_of(plan) == {(topic, 0): (10, 10), (topic, 1): (0, 3)}


async def test_earliest_is_the_start_of_the_remaining_log(
    kafka: SharedKafka, topic: str, group: str, write: Write
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 10)
    await commit(kafka, group, topic, {0: (8, "")})
    await kafka.delete_records(topic, before={0: 3})

    plan = await made(write(topic), start="earliest")

    assert ranges_of(plan) == {(topic, 0): (3, 10)}


async def test_start_and_end_times_use_record_timestamps(kafka: SharedKafka, topic: str, write: Write) -> None:
    await kafka.create_topic(topic, partitions=2, config={"retention.ms": "-1"})
    hours = [1767225600.0 + 3600 * hour for hour in range(10)]
    await produce_at(kafka, topic, hours)
    await produce_at(kafka, topic, hours[:5], partition=1)
    app = write(topic)

    plan = await made(app, start=hours[3], end=dt.datetime.fromtimestamp(hours[7], dt.UTC))
    late = await made(app, start=hours[6] + 1)

    assert ranges_of(plan) == {(topic, 0): (3, 7), (topic, 1): (3, 5)}
    assert ranges_of(late) == {(topic, 0): (7, 10), (topic, 1): (5, 5)}, "no record so young: nothing to read"


async def test_explicit_offsets_are_used_up_to_the_end_of_the_log(kafka: SharedKafka, topic: str, write: Write) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(None, b"")] * 20)

    plan = await made(write(topic), start={topic: {0: 2, 1: 5}}, end={topic: {0: 7, 1: 1_000_000_000}})

    assert ranges_of(plan) == {(topic, 0): (2, 7), (topic, 1): (5, 10)}


async def test_an_end_before_the_start_is_an_empty_range(kafka: SharedKafka, topic: str, write: Write) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 10)

    plan = await made(write(topic), start={topic: {0: 7}}, end={topic: {0: 3}})

    assert ranges_of(plan) == {(topic, 0): (7, 7)}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"start": "latest"}, r"start='latest'.*'committed' or 'earliest'"),
        ({"end": "earliest"}, r"end='earliest'.*'latest'"),
        ({"end": "committed"}, r"end='committed'"),
        ({"start": -1.0}, "start=-1.0"),
        ({"start": True}, "start=True"),
        ({"start": dt.datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001 - that is what is refused
        ({"start": {"TOPIC": {0: 11}}}, "starts at 11, and its log ends at 10"),
        ({"start": {"TOPIC": {0: 0, 1: 0}}}, "no others: check TOPIC/1"),
        ({"start": {}}, "no others: check TOPIC/0"),
        ({"start": {"TOPIC": {0: -1}}}, "expected an offset for each partition"),
        ({"start": {"TOPIC": 5}}, "expected an offset for each"),
        ({"tasks": 0}, "tasks=0"),
        ({"on_failure": "halt"}, "on_failure='halt'"),
        ({"on_failure": "dead-letter:"}, "on_failure='dead-letter:'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
async def test_contradictory_bounds_are_refused(
    kafka: SharedKafka, topic: str, write: Write, options: dict[str, Any], why: str
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 10)
    ((name, value),) = options.items()
    if isinstance(value, dict) and value:
        options = {name: {topic: value["TOPIC"]}}
    elif isinstance(value, str):
        options = {name: value.replace("TOPIC", topic)}

    with pytest.raises(PlanError, match=why.replace("TOPIC", topic)):
        await made(write(topic), **options)


# Missing topics, groups and apps ------------------------------------------------------


async def test_records_that_retention_has_deleted_are_named(
    kafka: SharedKafka, topic: str, group: str, write: Write
) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(None, b"")] * 20)
    await commit(kafka, group, topic, {0: (2, ""), 1: (9, "")})
    await kafka.delete_records(topic, before={0: 6})
    app = write(topic)

    with pytest.raises(DataLossError, match=f"{topic}/0: offsets 2 to 5.*start='earliest'") as refused:
        await made(app)
    with pytest.raises(DataLossError, match="offsets 1 to 5"):
        await made(app, start={topic: {0: 1, 1: 0}})

    assert len(refused.value.lost) == 1
    assert ranges_of(await made(app, start="earliest"))[topic, 0] == (6, 10)


async def test_a_recreated_topic_is_not_the_end_of_the_log(
    kafka: SharedKafka, topic: str, group: str, write: Write
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 3)
    await commit(kafka, group, topic, {0: (50, "")})

    with pytest.raises(DataLossError, match=f"{topic}/0: offset 50 is committed, and the log ends at 3"):
        await made(write(topic))


async def test_an_open_transaction_ends_the_range_at_its_start(kafka: SharedKafka, topic: str, write: Write) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 5)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"open", partition=0)
        await kafka.produce(topic, [(None, b"")] * 4)

        careful = await made(write(topic))
        careless = await made(write(topic, isolation_level="read_uncommitted"))
        beyond = await made(write(topic), end={topic: {0: 9}})

        await producer.abort_transaction()
    assert ranges_of(careful) == ranges_of(beyond) == {(topic, 0): (0, 5)}
    assert ranges_of(careless) == {(topic, 0): (0, 10)}


async def test_an_empty_plan_is_valid_and_reported(
    kafka: SharedKafka, topic: str, group: str, write: Write, tmp_path: Path
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 5)
    await commit(kafka, group, topic, {0: (5, "")})
    messages: list[str] = []

    plan = await spark.plan(write(topic).target, directory=tmp_path / "run", tell=messages.append)

    assert (plan.records, ranges_of(plan)) == (0, {(topic, 0): (5, 5)})
    assert any("nothing to read" in sentence for sentence in messages)
    assert spark.RunDirectory(tmp_path / "run").plan() == plan


async def test_a_range_that_ends_before_the_group_is_reported(
    kafka: SharedKafka, topic: str, group: str, write: Write
) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 10)
    await commit(kafka, group, topic, {0: (8, "")})
    messages: list[str] = []

    await made(write(topic), start="earliest", end={topic: {0: 4}}, tell=messages.append)

    assert any("processes 4 to 7 again" in sentence for sentence in messages), messages


async def test_missing_topics_and_directories_with_a_run_are_refused(
    kafka: SharedKafka, topic: str, write: Write, tmp_path: Path
) -> None:
    app = write(topic)
    with pytest.raises(PlanError, match=f"topic '{topic}' does not exist"):
        await made(app)

    await kafka.create_topic(topic)
    await spark.plan(app.target, directory=tmp_path / "run")
    with pytest.raises(PlanError, match="already contains a run"):
        await spark.plan(app.target, directory=tmp_path / "run")


# Handlers -----------------------------------------------------------------------------


async def test_layouts_follow_the_order_guarantee(kafka: SharedKafka, topic: str, write: Write) -> None:
    for suffix in ("k", "p", "r", "f", "m1", "m2"):
        await kafka.create_topic(f"{topic}.{suffix}")
    head = "@app.consume({topics}, shard_by={by})\nasync def {name}(record: Record) -> None: ...\n"
    handlers = "".join(
        head.format(topics=repr(f"{topic}.{suffix}"), by=by, name=f"on_{suffix}")
        for suffix, by in (("k", "'key'"), ("p", "'partition'"), ("r", "'record'"), ("f", "lambda r: r.value"))
    )
    handlers += f"@app.consume(pattern=r'{topic}\\.m.', on_failure='skip')\nasync def on_m(r: Record) -> None: ...\n"
    app = write(handlers=handlers)

    plan = await made(app, shuffle=True)

    found = {
        handler.name: (handler.shard_by, handler.layout, len(handler.topics), handler.on_failure)
        for handler in plan.handlers
    }
    assert found == {
        "on_k": ("key", "shuffle", 1, "halt"),
        "on_p": ("partition", "partition", 1, "halt"),
        "on_r": ("record", "split", 1, "halt"),
        "on_f": ("function", "shuffle", 1, "halt"),
        "on_m": ("key", "shuffle", 2, "skip"),
    }
    whole = {handler.name: handler.layout for handler in (await made(app)).handlers}
    assert (whole["on_k"], whole["on_m"]) == ("partition", "partition")
    assert len(plan.ranges) == 6


async def test_parking_is_refused_without_another_failure_policy(kafka: SharedKafka, topic: str, write: Write) -> None:
    await kafka.create_topic(topic)
    app = write(
        handlers=f"@app.consume({topic!r}, on_failure=Park('{topic}.parked'))\nasync def on(r: Record) -> None: ...\n"
    )

    with pytest.raises(PlanError, match=r"handler 'on' parks.*on_failure='dead-letter:TOPIC'"):
        await made(app)

    assert (await made(app, on_failure="skip")).on_failure == "skip"
    assert (await made(app, on_failure="dead-letter:x.dlt")).handlers[0].on_failure == f"park:{topic}.parked"


async def test_a_pattern_that_matches_nothing_is_an_empty_plan(kafka: SharedKafka, topic: str, write: Write) -> None:
    app = write(handlers=f"@app.consume(pattern=r'{topic}-none-.*')\nasync def on(r: Record) -> None: ...\n")

    plan = await made(app)

    assert plan.ranges == ()
    assert kafka.bootstrap not in plan.to_json()


async def test_an_unimportable_app_is_refused() -> None:
    with pytest.raises(PlanError, match="no_such_module"):
        await spark.plan("no_such_module:app", directory=None)


# The group ----------------------------------------------------------------------------


async def test_records_stored_as_finished_count_as_done(
    kafka: SharedKafka, topic: str, group: str, write: Write
) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(None, b"")] * 20)
    beyond = CommitMetadata(finished=(Run(4, 6), Run(7, 30)))
    await commit(kafka, group, topic, {0: (2, beyond.text(2)), 1: (3, beyond.text(2))})
    app = write(topic)

    plan = await made(app, end={topic: {0: 9, 1: 10}})
    again = await made(app, start="earliest")

    assert [planned.finished for planned in plan.ranges] == [(4, 5, 7, 8), ()]
    assert [planned.finished for planned in again.ranges] == [(), ()], "who begins at the beginning wants them all"


async def test_a_group_with_members_is_reported_and_not_refused(kafka: SharedKafka, topic: str, write: Write) -> None:
    await kafka.create_topic(topic)
    app = write(topic)
    messages: list[str] = []
    async with app.app:
        plan = await made(app, tell=messages.append)

    assert plan.ranges
    assert any("1 members" in sentence and "handed over" in sentence for sentence in messages)


async def test_a_plan_warns_that_the_metadata_of_another_program_will_be_replaced(
    kafka: SharedKafka, topic: str, group: str, write: Write
) -> None:
    await kafka.create_topic(topic, partitions=2)
    await kafka.produce(topic, [(None, b"")] * 5)
    await commit(kafka, group, topic, {0: (0, "worker-7"), 1: (0, CommitMetadata(first=FirstCommit(2, 2)).text(0))})
    messages: list[str] = []

    plan = await made(write(topic), tell=messages.append)

    foreign = [sentence for sentence in messages if "metadata" in sentence]
    assert len(foreign) == 1
    assert f"{topic}/0" in foreign[0]
    assert plan.ranges[0].commit(plan.ranges[0].end).metadata == ""


async def test_an_unreadable_group_is_named(kafka: SharedKafka, topic: str, group: str, write: Write) -> None:
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 5)
    login: dict[str, Any] = {
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(kafka.certificates.ca_file),
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": SCRAM_USER.username,
        "sasl_password": SCRAM_USER.password,
        "bootstrap_servers": kafka.secure_bootstrap,
    }
    app = write(topic)
    app.app.configure(**login)

    with pytest.raises(PlanError, match=f"'{topic}' does not exist, or this user may not see it"):
        await made(app)
    await allow(kafka, SCRAM_USER, "topic", topic)
    with pytest.raises(AuthorizationError, match=f"group '{group}'.*grant READ"):
        await made(app)
    await allow(kafka, SCRAM_USER, "group", group)
    assert ranges_of(await made(app)) == {(topic, 0): (0, 5)}


# Versions and secrets -----------------------------------------------------------------


async def test_the_version_of_an_app_depends_only_on_its_code(topic: str, write: Write) -> None:
    app = write(
        topic,
        handlers=f"LIMIT = 3\n@app.consume({topic!r}, shard_by=lambda r: r.value)\n"
        "async def on(r: Record) -> None: ...\n",
    )
    script = (
        "import importlib, sys\n"
        "from aioshard.spark.plans import app_version\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "print(app_version(importlib.import_module(sys.argv[2]).app))\n"
    )

    def elsewhere() -> str:
        command = [sys.executable, "-c", script, str(app.path.parent), app.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    here = app_version(app.app)
    assert here == elsewhere()

    app.path.write_text(app.path.read_text().replace("LIMIT = 3", "LIMIT = 4"))
    assert here != elsewhere()


def test_the_version_of_an_app_covers_the_modules_of_dependencies(tmp_path: Path) -> None:
    app = """
from typing import Annotated
from fast_depends import Depends
from aioshard import App, Record
from sessions import get_session

app = App("billing")

@app.consume("orders")
async def on_order(record: Record, session: Annotated[str, Depends(get_session)]) -> None: ...
"""
    (tmp_path / "billing.py").write_text(app)
    (tmp_path / "sessions.py").write_text("def get_session() -> str:\n    return 'one'\n")
    script = "import billing\nfrom aioshard.spark.plans import app_version\nprint(app_version(billing.app))\n"

    def version() -> str:
        path = os.pathsep.join([str(tmp_path), str(PROJECT)])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    before = version()
    (tmp_path / "sessions.py").write_text("def get_session() -> str:\n    return 'another'\n")

    assert version() != before


async def test_a_plan_holds_no_secret(kafka: SharedKafka, topic: str, write: Write) -> None:
    await kafka.create_topic(topic)
    login = {
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(kafka.certificates.ca_file),
        "sasl_mechanism": "PLAIN",
        "sasl_username": SUPER_USER.username,
        "sasl_password": SUPER_USER.password,
    }

    plan = await made(write(topic, **login), bootstrap_servers=kafka.secure_bootstrap)

    assert plan.bootstrap_servers == kafka.secure_bootstrap
    for secret in (SUPER_USER.password, SUPER_USER.username, "sasl", str(kafka.certificates.ca_file)):
        assert secret not in plan.to_json()
