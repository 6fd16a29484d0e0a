"""The directory of a run and its plan: written atomically and never replaced."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aioshard.errors import PlanError
from aioshard.spark.plans import starts_of
from aioshard.spark.run_directory import RunDirectory
from tests.spark.plans import PLAN


def test_a_plan_is_read_back_as_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")

    directory.begin(PLAN)

    assert directory.plan() == PLAN
    assert directory.plan().digest == PLAN.digest
    assert json.loads(directory.read("plan.json") or b"")["digest"] == PLAN.digest


def test_files_are_written_removed_and_listed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.list() == []
    assert directory.read("stop") is None
    assert not directory.exists("stop")

    directory.write("stop", "now")
    directory.write("stop", "later")
    directory.write_json("states/0.json", {"done": 7})

    assert directory.list() == ["states", "stop"]
    assert directory.list("states") == ["0.json"]
    assert directory.read("stop") == b"later"
    assert directory.read_json("states/0.json") == {"done": 7}
    assert directory.exists("states")
    directory.remove("stop")
    directory.remove("stop")
    assert directory.list() == ["states"]


def test_unfinished_files_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".plan.json.0123").write_text("half of it")

    assert RunDirectory(tmp_path).list() == []


def test_a_directory_holds_one_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.begin(PLAN)

    with pytest.raises(PlanError, match="already contains a run"):
        directory.begin(PLAN)


@pytest.mark.parametrize(
    ("edited", "why"),
    [
        (lambda content: content["ranges"][0].update(end=10), "digest does not match"),
        (lambda content: content.update(max_rows_per_batch=1), "digest does not match"),
        (lambda content: content.update(more=1), "digest does not match"),
        (lambda content: content.pop("digest"), "not a plan"),
        (lambda content: content.clear(), "not a plan"),
    ],
    ids=["end", "batch", "more", "no-digest", "empty"],
)
def test_an_edited_plan_is_refused(tmp_path: Path, edited: Callable[[dict[str, object]], object], why: str) -> None:
    content = json.loads(PLAN.to_json())
    edited(content)
    (tmp_path / "plan.json").write_text(json.dumps(content))

    with pytest.raises(PlanError, match=f"plan.json: .*{why}"):
        RunDirectory(tmp_path).plan()


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_a_file_that_is_not_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)

    with pytest.raises(PlanError, match=r"plan\.json: .*not a plan"):
        RunDirectory(tmp_path).plan()


def test_a_directory_without_a_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"{tmp_path} contains no plan.json"):
        RunDirectory(tmp_path).plan()


def test_a_missing_extra_is_named_for_remote_directories(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['pyarrow'] = sys.modules['pyspark'] = None\n"
        "from aioshard.errors import MissingExtraError\n"
        "from aioshard.spark import Plan, RunDirectory\n"
        "for uri in (sys.argv[1], 's3://bucket/run'):\n"
        "    try:\n"
        "        RunDirectory(uri)\n"
        "    except MissingExtraError as error:\n"
        "        print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)

    assert ran.stdout.count("aioshard[spark]") == 2


def test_an_unknown_scheme_is_refused() -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(PlanError, match="nowhere://x"):
        RunDirectory("nowhere://x")
    with pytest.raises(PlanError, match="empty name"):
        RunDirectory("")


@pytest.mark.parametrize("given", ["runs/7", "file:///srv/runs/7"])
def test_spark_gets_an_absolute_uri(given: str) -> None:
    """A path without a scheme would be looked for in the cluster's own file system."""
    uri = RunDirectory(given).uri("checkpoint")

    assert uri.startswith("file:///")
    assert uri.endswith("/runs/7/checkpoint")


def test_an_object_store_does_not_rename_a_directory_atomically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert RunDirectory("runs/7").moves_atomically
    assert not RunDirectory("s3://bucket/runs/7?region=eu-central-1").moves_atomically


def test_a_path_that_is_not_a_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "odd" / "plan.json").mkdir(parents=True)
    directory = RunDirectory(tmp_path / "file")

    for action in (directory.plan, directory.list, lambda: directory.begin(PLAN), lambda: directory.remove("stop")):
        with pytest.raises(PlanError, match=r"file.* cannot be used .*: name a directory that this user may read"):
            action()
    with pytest.raises(PlanError, match=r"odd/plan\.json cannot be used"):
        RunDirectory(tmp_path / "odd").plan()


def test_a_run_is_drained_by_one_process(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from aioshard.spark.run_directory import RunDirectory\n"
        "with RunDirectory(sys.argv[1]).alone():\n"
        "    print('drains', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    directory = RunDirectory(tmp_path)
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "drains\n"
        with pytest.raises(PlanError, match="another process is running"), directory.alone():
            pass
        other.kill()
    with directory.alone():  # however the other one ended
        assert directory.list() == []


def test_progress_is_the_end_of_the_last_complete_batch(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.reached(PLAN) == starts_of(PLAN.ranges)
    for batch in range(12):
        directory.write(f"checkpoint/offsets/{batch}", f'v1\n{{}}\n{{"orders": {{"0": {10 * batch}}}}}')
        assert batch == 0 or directory.reached(PLAN) == {"orders": {"0": 10 * batch - 10}}
        directory.write(f"checkpoint/commits/{batch}", "v1\n{}")
        (tmp_path / "checkpoint" / "commits" / f".{batch}.crc").touch()
    for batch in range(5):  # Spark keeps the last hundred
        directory.remove(f"checkpoint/commits/{batch}")

    assert directory.reached(PLAN) == {"orders": {"0": 110}}

    directory.write("checkpoint/offsets/11", "v1\n{}\n7")
    with pytest.raises(PlanError, match=r"checkpoint of the run in .* is damaged"):
        directory.reached(PLAN)
