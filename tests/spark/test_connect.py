"""Spark Connect and Declarative Pipelines: the same rows as through a classic session."""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from aioshard import spark as history
from tests.spark.apps import write_app
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT
from tests.support.requirements import in_ci

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]  # a server of Spark Connect starts in each of them

NEEDED = ("grpc", "grpc_status", "google.rpc", "yaml", "zstandard")
"""The packages of the extra `connect`."""
EXAMPLE = PROJECT / "examples" / "sdp"
TIMEOUT = 1000.0
RECORDS = 40

HANDLERS = """
@app.consume({topic!r}, shard_by={shard_by}, on_failure="skip", retry=Retry(attempts=1))
async def handle(record: Record):
    if record.value == b"7":
        raise ValueError("seven")
"""


def found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of its package
        return False


@pytest.fixture(autouse=True)
def ready() -> None:
    """Java and the packages of the extra `connect`."""
    missing = [name for name in NEEDED if not found(name)]
    if shutil.which("java") is None:
        missing.append("Java")
    if missing:
        reason = f"no Spark: {', '.join(missing)} missing for Spark Connect, see the extra `connect`"
        pytest.fail(reason, pytrace=False) if in_ci() else pytest.skip(reason)


def run(command: list[str], modules: Path, **environment: str) -> str:
    """Runs a program to its end and returns what it printed."""
    given = {
        "PYTHONPATH": os.pathsep.join([str(PROJECT), str(modules)]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_TESTING": "1",  # so that the server takes a free port instead of 15002
    }
    done = subprocess.run(
        command,
        env=os.environ | given | environment,
        cwd=modules,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return done.stdout


async def test_spark_connect_can_read_and_drain(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kafka.create_topic(topic, partitions=2)
    record_ids = await kafka.produce(topic, [(b"%d" % n, b"%d" % n) for n in range(RECORDS)])
    apps = {
        name: write_app(
            tmp_path,
            monkeypatch,
            kafka,
            group,
            handlers="from aioshard import Retry\n" + HANDLERS.format(topic=topic, shard_by=shard_by),
        )
        for name, shard_by in (("by key", '"key"'), ("shuffled", "lambda record: record.value[:1]"))
    }
    directories = {name: str(tmp_path / name.replace(" ", "-")) for name in apps}
    for name, app in apps.items():
        await history.plan(app.target, directory=directories[name], start="earliest")
    command = [sys.executable, "-m", "tests.spark.connecting", kafka.bootstrap, topic, apps["by key"].target]

    printed = await asyncio.to_thread(run, [*command, *directories.values()], tmp_path)

    seen = json.loads(printed.splitlines()[-1])
    assert seen["kind"].startswith("pyspark.sql.connect")
    assert seen["raw"] == sorted([*record_id, str(n)] for n, record_id in enumerate(record_ids))
    expected = {"processed": RECORDS - 1, "skipped": 1}
    assert seen["outcomes"] == expected
    assert seen["drained"] == dict.fromkeys(directories.values(), expected)
    for directory in directories.values():
        rows = pq.read_table(f"{directory}/outcomes", columns=["partition", "offset"]).to_pylist()
        assert sorted((row["partition"], row["offset"]) for row in rows) == sorted(record_ids)


async def test_the_example_runs_as_a_declarative_pipeline(kafka: SharedKafka, topic: str, tmp_path: Path) -> None:
    await kafka.create_topic(topic, partitions=2)
    orders = [(f"c{n % 3}", n % 2 + 1) for n in range(30)]
    messages = [
        (customer.encode(), json.dumps({"customer": customer, "price": 2.5, "pieces": pieces}).encode())
        for customer, pieces in orders
    ]
    await kafka.produce(topic, [*messages, (b"c0", b"no order")])
    project = tmp_path / "sdp"
    shutil.copytree(EXAMPLE, project)
    spec = project / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("file:///var/tmp/aioshard-orders", (tmp_path / "storage").as_uri()))
    app = project / "orders_app.py"
    app.write_text(app.read_text().replace('consume("orders"', f"consume({topic!r}"))
    pipelines = Path(sys.executable).with_name("spark-pipelines")

    await asyncio.to_thread(run, [str(pipelines), "run"], project, AIOSHARD_BOOTSTRAP_SERVERS=kafka.bootstrap)

    tables = project / "spark-warehouse"
    outcomes = pq.read_table(tables / "order_outcomes", columns=["status", "offset", "partition"]).to_pylist()
    assert sorted(row["status"] for row in outcomes) == ["dead_lettered", *["processed"] * 30]
    customers = {row["customer"]: row for row in pq.read_table(tables / "customers").to_pylist()}
    assert {name: row["orders"] for name, row in customers.items()} == {"c0": 10, "c1": 10, "c2": 10}
    assert sum(row["total"] for row in customers.values()) == sum(2.5 * pieces for _, pieces in orders)
