"""The PostgreSQL server of the tests: it ends with its owner, and its absence is reported."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.support import postgresql as harness
from tests.support.paths import PROJECT
from tests.support.postgresql import PostgresqlServer, PostgresqlUnavailableError
from tests.tools import provision


def test_databases_are_isolated_and_removed(postgresql: PostgresqlServer) -> None:
    one, other = postgresql.create_database(), postgresql.create_database()

    with psycopg.connect(one) as connection:
        connection.execute("CREATE TABLE here (number integer)")
    with psycopg.connect(other) as connection, pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT * FROM here")
    with psycopg.connect(one):
        postgresql.drop_database(one)
    postgresql.drop_database(other)

    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(one)


@pytest.mark.chaos
async def test_a_server_ends_with_the_process_it_belongs_to(postgresql: PostgresqlServer) -> None:
    """A test process that is killed leaves no server behind."""
    assert postgresql.process_group
    script = (
        "import sys\n"
        "from tests.support.postgresql import PostgresqlServer\n"
        "server = PostgresqlServer()\n"
        "server.start()\n"
        "print(server.process_group, server.directory, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        cwd=PROJECT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    process_group, directory = (await owner.stdout.readline()).split()
    guard = psutil.Process(int(process_group))
    processes = [guard, *guard.children(recursive=True)]
    assert {process.name() for process in processes[1:]} == {"postgres"}

    owner.kill()
    await owner.wait()

    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    shutil.rmtree(directory.decode())


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("environment", "code", "said"),
    [
        pytest.param({"CI": ""}, 0, "NO POSTGRESQL", id="skipped", marks=pytest.mark.chaos),
        pytest.param(
            {"CI": "true"}, 1, "no PostgreSQL, which CI must have: neither PATH nor /nowhere has", id="failed in CI"
        ),
    ],
)
def test_without_a_server_tests_are_skipped_and_fail_in_ci(
    tmp_path: Path, environment: Mapping[str, str], code: int, said: str
) -> None:
    plugin = (
        "import pathlib\n"
        "def pytest_sessionstart():\n"
        "    from tests.support import postgresql\n"
        "    postgresql.DEBIAN_PROGRAMS = pathlib.Path('/nowhere')\n"
    )
    (tmp_path / "without_postgresql.py").write_text(plugin)
    command = [sys.executable, "-m", "pytest", "-p", "without_postgresql", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, f"{__file__}::test_databases_are_isolated_and_removed"],
        cwd=PROJECT,
        env={**environment, "PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == code, ran.stdout + ran.stderr
    assert said in ran.stdout


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_a_failed_installation_is_reported_and_fails_only_in_ci(
    ci: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Path:
        raise PostgresqlUnavailableError("the server is missing")

    monkeypatch.setattr(harness, "server_programs", missing)
    monkeypatch.setattr(provision, "INSTALL", ["false"])
    monkeypatch.setattr(provision, "UPDATE", ["false"])
    monkeypatch.setenv("CI", ci)

    assert provision.main(["postgresql"]) == code
    assert "NO POSTGRESQL, tests that need it will" in capsys.readouterr().err
