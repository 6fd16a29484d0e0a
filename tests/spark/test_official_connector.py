"""`format("aioshard")` returns the rows of Spark's own `format("kafka")` and accepts them as input."""

import asyncio
import datetime as dt
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aioshard import spark as history
from tests.spark.apps import produce_at, write_app
from tests.support.brokers import SharedKafka
from tests.support.connector_jars import ConnectorUnavailableError, connector_jars
from tests.support.paths import PROJECT
from tests.support.requirements import skip_or_fail

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]  # a separate session starts, and jars may be fetched

TIMEOUT = 1000.0
HANDLER = """
@app.consume({topic!r}, shard_by=lambda record: record.value)
async def handle(record: Record):
    assert not record.headers or dict(record.headers) == {{"kind": b"test", "none": None}}
"""
FIRST = 1_700_000_000


@pytest.fixture(scope="module")
def jars() -> str:
    """The connector's jars, as Spark takes them."""
    if shutil.which("java") is None:
        skip_or_fail("Spark with its Kafka connector", "no `java` on PATH, needed for Spark")
    try:
        return ",".join(map(str, connector_jars()))
    except ConnectorUnavailableError as missing:
        skip_or_fail("Spark with its Kafka connector", missing)


async def test_both_connectors_return_the_same_rows(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jars: str
) -> None:
    await kafka.create_topic(topic, partitions=3, config={"retention.ms": "-1"})
    for partition in (0, 1, 2):
        await produce_at(kafka, topic, [FIRST + n + partition / 8 for n in range(12)], partition)
    await kafka.produce(topic, [(b"k", None), (None, b"\xff")], 0, headers=[("kind", b"test"), ("none", None)])
    await kafka.produce_transaction(topic, [(None, b"aborted")] * 2, 1, abort=True)
    await kafka.produce_transaction(topic, [(b"k", b"committed")], 1)
    app = write_app(tmp_path, monkeypatch, kafka, group, handlers=HANDLER.format(topic=topic))
    start, end = FIRST + 3.5, FIRST + 9
    times = [dt.datetime.fromtimestamp(moment, dt.UTC) for moment in (start, end)]
    await history.plan(app.target, directory=tmp_path / "run", start=times[0], end=times[1])
    arguments = [jars, kafka.bootstrap, topic, app.target, str(tmp_path / "run"), f"{start * 1000:.0f}"]
    path = os.pathsep.join([str(PROJECT), str(tmp_path)])

    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.spark.comparing", *arguments, f"{end * 1000:.0f}"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    alike: dict[str, object] = {"only official": [], "only ours": []}
    assert found["reads"] == {
        "everything": {"rows": 39} | alike,
        "uncommitted": {"rows": 41} | alike,
        "offsets": {"rows": 24} | alike,
        "times": {"rows": 15} | alike,
    }
    assert found["handled"] == {"processed": 39}
