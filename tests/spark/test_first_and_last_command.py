"""`aioshard spark plan` and `handover`, which need brokers but not Spark."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioshard import spark
from aioshard.spark.plans import ends_of
from tests.spark.apps import AppModule, write_app
from tests.support.brokers import SharedKafka


@pytest.fixture
async def app(kafka: SharedKafka, topic: str, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppModule:
    """An app of a topic with ten records."""
    await kafka.create_topic(topic)
    await kafka.produce(topic, [(None, b"")] * 10)
    return write_app(tmp_path, monkeypatch, kafka, group, topic)


async def command(app: AppModule, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command, which imports the app from its directory."""
    words = [sys.executable, "-m", "aioshard", "spark", *arguments, f"--app-dir={app.path.parent}"]
    ended = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


def verify(run: str, **found: Any) -> None:
    """Pretends that the run was drained, and found to be whole."""
    run_dir = spark.RunDirectory(run)
    plan = run_dir.plan()
    content = {"plan": plan.digest, "ok": True, "halted": [], "ends": ends_of(plan.ranges)}
    run_dir.write_json("verified.json", content | found)


async def test_the_commands_work_from_plan_to_handover(
    app: AppModule, kafka: SharedKafka, group: str, topic: str
) -> None:
    run = str(app.path.parent / "run")

    code, out, _ = await command(
        app, "plan", app.target, "--out", run, "--end", _file(app, {topic: {"0": 7}}), "--json"
    )
    assert code == 0
    (planned,) = json.loads(out)["ranges"]
    assert (planned["topic"], planned["partition"], planned["start"], planned["end"]) == (topic, 0, 0, 7)

    code, _, said = await command(app, "handover", run)
    assert (code, "was not verified" in said) == (3, True)

    verify(run)
    code, out, _ = await command(app, "handover", run, "--json")
    assert (code, json.loads(out)["offsets"]) == (0, {topic: {"0": 7}})
    assert await kafka.committed(group, topic) == {0: 7}

    async with app.app:
        await app.until_seen(3)
    assert app.seen == [(0, 7), (0, 8), (0, 9)]


def _file(app: AppModule, offsets: Any) -> str:
    path = app.path.parent / "offsets.json"
    path.write_text(json.dumps(offsets))
    return str(path)


@pytest.mark.chaos
async def test_a_busy_or_moved_group_exits_4(app: AppModule, kafka: SharedKafka, group: str, topic: str) -> None:
    run = str(app.path.parent / "run")
    code, _, _ = await command(app, "plan", app.target, "--out", run, "--end", _file(app, {topic: {"0": 7}}))
    assert code == 0
    verify(run)

    async with app.app:
        await kafka.wait_for_lag(group, topic)
        code, _, said = await command(app, "handover", run, "--wait", "0", "--force")
        assert (code, "has members" in said) == (4, True), said
    code, _, said = await command(app, "handover", run)

    assert (code, f"{topic}/0: then no commit, now 10" in said) == (4, True), said
    assert await kafka.committed(group, topic) == {0: 10}


@pytest.mark.chaos
async def test_lost_records_exit_5_and_bad_arguments_exit_2(app: AppModule, kafka: SharedKafka, topic: str) -> None:
    run = str(app.path.parent / "run")
    await kafka.delete_records(topic, before={0: 4})

    start = _file(app, {topic: {"0": 2}})
    code, _, said = await command(app, "plan", app.target, "--out", run, "--start", start)
    assert (code, f"{topic}/0: offsets 2 to 3" in said) == (5, True), said

    for wrong in (["--start", "yesterday"], ["--start", _file(app, {})], ["--on-failure", "forget"], ["--tasks", "0"]):
        code, _, said = await command(app, "plan", app.target, "--out", run, *wrong)
        assert code == 2, said
    code, _, said = await command(app, "handover", run)
    assert (code, "no plan.json" in said) == (2, True), said
