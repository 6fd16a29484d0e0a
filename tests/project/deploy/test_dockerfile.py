"""The Dockerfile: its instructions are run without building an image, from the first COPY to the final process."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from aioshard.kafka.embedded import EmbeddedBroker
from tests.project.deploy.dockerfile import CommandFailedError, Image, build, instructions
from tests.support.cluster import POLL_INTERVAL, KafkaCluster
from tests.support.paths import PROJECT
from tests.support.ports import free_port
from tests.support.requirements import skip_or_fail

DOCKERFILE = PROJECT / "deploy" / "Dockerfile"
DEADLINE = 60.0
RECORDS = 200


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        skip_or_fail("hadolint", "dependency group test")

    ran = subprocess.run([program, DOCKERFILE], capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stdout) == (0, "")


def test_no_shell_intercepts_signals() -> None:
    found = dict(instructions(DOCKERFILE))

    assert json.loads(found["CMD"])[:2] == ["aioshard", "run"]
    assert found["STOPSIGNAL"] == "SIGTERM"
    assert int(found["USER"].partition(":")[0]) > 0, "only of a number can Kubernetes see that it is not root"
    for name, argument in instructions(DOCKERFILE):
        if name in {"RUN", "CMD", "ENTRYPOINT"}:
            assert json.loads(re.sub(r"^(?:--\S+ )+", "", argument)), f"{name} is not in exec form"
        if name == "FROM":
            assert re.search(r":\d+\.\d+\.\d+", argument), f"{argument} may be another one tomorrow"


def test_the_build_context_has_only_the_copied_files() -> None:
    ignore = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text()
    copied = {
        source
        for name, argument in instructions(DOCKERFILE)
        if name == "COPY" and "--from" not in argument
        for source in argument.split()[:-1]
    }

    assert copied == set(re.findall(r"^!(.+)$", ignore, re.MULTILINE))
    assert re.search(r"^\*$", ignore, re.MULTILINE)


@pytest.mark.chaos
async def test_the_dockerfile_commands_run_an_app_that_stops_on_sigterm(tmp_path: Path) -> None:
    try:
        image = await asyncio.to_thread(build, DOCKERFILE, PROJECT, tmp_path)
    except CommandFailedError as error:
        if re.search(r"No matching distribution|Connection(?:Error| broken)|Max retries", str(error)):
            skip_or_fail("package index", str(error)[-300:])
        raise
    assert left_out(image.root) == [], "the wheel that pip has built is not whole"
    files = sorted(image.root.rglob("*"))
    port = free_port()
    async with EmbeddedBroker() as broker:
        await broker.create_topic("orders", 4)
        records = [(b"customer-%d" % (number % 7), b"{}") for number in range(RECORDS)]
        await KafkaCluster(broker.bootstrap_servers).produce("orders", records)
        variables = {"AIOSHARD_BOOTSTRAP_SERVERS": broker.bootstrap_servers, "AIOSHARD_SESSION_TIMEOUT": "6"}
        process = await start(image, image.command, port, AIOSHARD_HEARTBEAT_INTERVAL="0.5", **variables)
        try:
            async with asyncio.timeout(DEADLINE):
                while await healthy(image, port, "--live") != 0 or await healthy(image, port) != 0:
                    assert process.returncode is None, (await process.communicate())[1].decode()
                while await processed(port) < RECORDS:  # noqa: ASYNC110  (over HTTP there is no event)
                    await asyncio.sleep(POLL_INTERVAL)
                process.send_signal(signal.SIGTERM)
                _, log = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    lines = [json.loads(line) for line in log.splitlines() if line.startswith(b"{")]
    assert process.returncode == 0, log.decode()
    assert f"processed={RECORDS}," in lines[-1]["message"]
    assert b"SIGTERM: draining" in log
    assert await healthy(image, port) == 3, "nobody is there any more"
    assert sorted(image.root.rglob("*")) == files, "it cannot run on a read-only file system"


def left_out(root: Path) -> list[str]:
    """The files of our packages that are not installed there: the page, schemas and types have no Python in them."""
    (installed,) = root.glob("venv/lib/python*/site-packages")
    files = [file for package in ("aioshard", "pyspark_aioshard") for file in (PROJECT / package).rglob("*.*")]
    ours = [str(file.relative_to(PROJECT)) for file in files if file.suffix != ".pyc" and file.is_file()]
    return sorted(name for name in ours if not (installed / name).is_file())


async def start(image: Image, words: Sequence[str], port: int, **variables: str) -> asyncio.subprocess.Process:
    """A process of the image, on a free port where the file says 8080."""
    environment = image.variables(**variables)
    program, *arguments = [word.replace("8080", str(port)) for word in image.moved(list(words))]
    found = shutil.which(program, path=environment["PATH"])
    assert found is not None
    assert found.startswith(str(image.root)), f"{program} is not the image's own"
    return await asyncio.create_subprocess_exec(
        found,
        *arguments,
        cwd=image.directory,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def healthy(image: Image, port: int, *more: str) -> int | None:
    """The exit code of the health check; without --live it asks whether the app is ready."""
    words = [word for word in image.healthcheck if word != "--live"]
    process = await start(image, [*words, *more], port)
    try:
        await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode


async def processed(port: int) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        statistics = (await client.get(f"http://127.0.0.1:{port}/statistics.json")).json()
    return sum(handler["processed"] for handler in statistics["handlers"])
