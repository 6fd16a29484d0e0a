"""`aioshard spark run|follow|status|stop|verify` as processes: exit codes, signals, JSON output."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioshard import spark
from aioshard.cli.main import main
from tests.spark.apps import AppModule, write_app
from tests.support.brokers import SharedKafka
from tests.support.paths import PROJECT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)

RECORDS = 90

HANDLER = """
import asyncio
from pathlib import Path
from aioshard import Retry

FLAG = Path({flag!r})

@app.consume({topic!r}, concurrency=2, retry=Retry(attempts=1))
async def handle(record: Record) -> None:
    if record.value == b"80" and not FLAG.exists():
        raise LookupError("no such customer")
    await asyncio.sleep({seconds})
"""


@pytest.fixture
def session(spark: "SparkSession") -> "SparkSession":
    """The fixture `spark`, whose name is that of a module here."""
    return spark


async def make_run(
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    seconds: float = 0.0,
) -> tuple[AppModule, Path]:
    """An app and the directory of a run, planned in batches of a third."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(b"k", b"%d" % n) for n in range(RECORDS)])
    source = HANDLER.format(topic=topic, flag=str(tmp_path / "flag"), seconds=seconds)
    app = write_app(tmp_path, monkeypatch, kafka, group, handlers=source)
    run = tmp_path / "run"
    await spark.plan(app.target, directory=run, start="earliest", max_rows_per_batch=RECORDS // 3)
    return app, run


@contextlib.asynccontextmanager
async def command(app: AppModule, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command while it runs; it is ended, with all that it started."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aioshard", "spark", *words),
        cwd=app.path.parent,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def ended(app: AppModule, *words: str) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error."""
    async with command(app, *words) as process, asyncio.timeout(200):
        output, errors = await process.communicate()
        return process.returncode, output.decode(), errors.decode()


@pytest.mark.chaos
async def test_a_halt_exits_3_and_the_same_command_resumes(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, run = await make_run(kafka, topic, group, tmp_path, monkeypatch)

    code, output, errors = await ended(app, "run", str(run), "--master", "local[2,4]")

    assert (code, output) == (3, "")
    assert errors.splitlines()[-1].startswith("Error: 1 record failed permanently: ")
    assert f"{topic}/0/80 (key k, LookupError: no such customer)" in errors
    code, output, _ = await ended(app, "status", str(run), "--json")
    found: dict[str, Any] = json.loads(output)
    assert (code, found["done"], found["state"], found["statuses"]) == (0, 60, "unfinished", {"processed": 60})

    (tmp_path / "flag").touch()
    code, output, errors = await ended(app, "run", str(run), "--master", "local[2,4]", "--json")

    assert code == 0, errors
    found = json.loads(output)
    assert (found["state"], found["done"], found["batches"]) == ("finished", RECORDS, 3)
    assert "running: 90 of 90 (100 %) records" in errors
    code, output, errors = await ended(app, "verify", str(run), "--master", "local[2,4]", "--json")
    assert (code, json.loads(output)["ok"]) == (0, True), errors
    code, output, errors = await ended(app, "handover", str(run))
    assert code == 0, errors
    assert await kafka.committed(group, topic) == {0: RECORDS}


@pytest.mark.chaos
def test_run_and_verify_work_in_process(
    session: "SparkSession",
    kafka: SharedKafka,
    topic: str,
    group: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same with the session of the other tests: no Java starts."""
    monkeypatch.setattr(session, "stop", lambda: None)

    def said(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["spark", *words, "--master", "local[2,4]", f"--app-dir={tmp_path}", "--json"])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    _, run = asyncio.run(make_run(kafka, topic, group, tmp_path, monkeypatch))
    code, output, errors = said("run", str(run))
    assert (code, output) == (3, ""), errors
    assert f"{topic}/0/80 (key k, LookupError: no such customer)" in errors

    (tmp_path / "flag").touch()
    code, output, errors = said("run", str(run))
    assert (code, json.loads(output)["state"]) == (0, "finished"), errors
    code, output, errors = said("verify", str(run))
    assert (code, json.loads(output)["ok"]) == (0, True), errors


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["signal", "command"])
async def test_a_run_stops_after_the_current_micro_batch(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    app, run = await make_run(kafka, topic, group, tmp_path, monkeypatch, seconds=0.1)
    (tmp_path / "flag").touch()

    async with command(app, "run", str(run), "--master", "local[2,4]", "--json") as process:
        async with asyncio.timeout(200):
            while spark.status(run).done == 0:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            spark.stop(run)
        async with asyncio.timeout(200):
            output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    found = json.loads(output)
    assert found["state"] == "unfinished"
    assert found["done"] in {RECORDS // 3, 2 * RECORDS // 3}
    assert ("Stopping after the current micro-batch" in errors.decode()) == (how == "signal")


@pytest.mark.chaos
async def test_a_following_run_ends_only_when_stopped(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, run = await make_run(kafka, topic, group, tmp_path, monkeypatch)
    (tmp_path / "flag").touch()
    words = ["follow", str(run), "--master", "local[2,4]", "--trigger", "0.5"]
    async with command(app, *words) as process:
        async with asyncio.timeout(200):
            while spark.status(run).statuses.get("processed") != RECORDS:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
            await kafka.produce(topic, [(b"k", b"later")] * 7)  # beyond the planned end
            while spark.status(run).statuses.get("processed") != RECORDS + 7:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        spark.stop(run)
        async with asyncio.timeout(200):
            output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    assert output.decode() == f"To continue: aioshard spark follow {run}\n"


def spark_of(process: int) -> list[int]:
    """The processes of Spark's Java that it has started and that run."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [process]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return [pid for pid in found if is_spark(pid)]


def is_spark(process: int) -> bool:
    """Whether it is Spark's Java, and runs."""
    with contextlib.suppress(OSError):
        return b"org.apache.spark.deploy.SparkSubmit" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


@pytest.mark.chaos
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no files of its processes")
@pytest.mark.parametrize("signals", [1, 2])
async def test_a_signal_while_spark_starts_leaves_no_java_behind(
    kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    app, run = await make_run(kafka, topic, group, tmp_path, monkeypatch)
    async with command(app, "run", str(run), "--master", "local[2,4]") as process, asyncio.timeout(200):
        while not (java := spark_of(process.pid)):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = b""
        while b"a second signal ends it immediately" not in said:
            said = await process.stderr.readline()
            assert said, "it ended without a word"
        if signals == 2:
            process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()  # its end, and that of all that hold what it prints to

    assert (process.returncode, output) == (130, b"")
    assert errors.endswith(b"Interrupted.\n") == (signals == 1)
    assert not any(map(is_spark, java))
    assert spark.status(run).done == 0
