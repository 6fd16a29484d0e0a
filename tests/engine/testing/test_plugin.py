"""The pytest plugin: loaded without an import, with or without other async plugins."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCOPE = ["-o", "asyncio_default_fixture_loop_scope=function"]
"""Without it, that plugin warns."""

TESTS = """
import asyncio
import time

import pytest

from aioshard import App, Record, Retry

app = App("billing")
seen = []


@app.consume("orders", retry=Retry(attempts=3, initial=600.0, maximum=600.0, jitter=0.0))
async def on_order(record: Record) -> None:
    seen.append(record.offset)
    if len(seen) == 1:
        raise OSError("away")


@pytest.fixture
def topic() -> str:
    return "orders"


@pytest.mark.aioshard_virtual_time
async def test_the_marker_runs_tests_in_virtual_time(aioshard_client, topic):
    began = asyncio.get_running_loop().time(), time.monotonic()
    async with aioshard_client(app) as client:
        await client.publish(topic, "x")
        await client.settle(timeout=1000.0)
    assert seen == [0, 0]
    assert asyncio.get_running_loop().time() - began[0] > 599
    assert time.monotonic() - began[1] < 60


class TestGroup:
    @pytest.mark.aioshard_virtual_time(seed=7)
    @pytest.mark.parametrize("number", [1, 2])
    async def test_the_marker_works_on_methods_and_parametrized_tests(self, number, tmp_path):
        await asyncio.sleep(3600 * number)
        assert tmp_path.is_dir()


@pytest.mark.xfail(raises=OSError, strict=True)
@pytest.mark.aioshard_virtual_time
async def test_a_failure_in_virtual_time_is_reported():
    await asyncio.sleep(3600)
    raise OSError


def test_tests_without_the_marker_are_unaffected(aioshard_client):
    assert aioshard_client.__name__ == "TestClient"
"""


@pytest.mark.parametrize(
    "options",
    [
        ["-p", "no:asyncio", "-p", "no:anyio"],
        ["-o", "asyncio_mode=auto", *SCOPE],
        pytest.param(["-o", "asyncio_mode=strict", *SCOPE], marks=pytest.mark.chaos),
    ],
)
def test_the_fixture_and_the_marker_need_no_import(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_app.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--strict-markers",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        *options,
    ]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "4 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
