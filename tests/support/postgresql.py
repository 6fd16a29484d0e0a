"""A real PostgreSQL server in its own process, on a free port of 127.0.0.1."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import LiteralString, Self

import psycopg
from psycopg.sql import SQL, Identifier

from tests.support.kafka import STOP_TIMEOUT, end_group
from tests.support.paths import PROJECT
from tests.support.ports import free_port

DEBIAN_PROGRAMS = Path("/usr/lib/postgresql")
ACCOUNT = "postgres"
"""The account of the server if the tests run as root, because PostgreSQL refuses root; Debian's package creates it."""
START_TIMEOUT = 60.0
READY_INTERVAL = 0.05
PORT_ATTEMPTS = 3
OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",  # the tests kill clients, not the machine
    "max_connections": "200",
}


class PostgresqlUnavailableError(RuntimeError):
    """This machine has no PostgreSQL server; the message says what is missing and how to get it."""


class PostgresqlFailedError(RuntimeError):
    """The server ended, or did not answer in time; the message holds the end of its log."""


class PostgresqlServer:
    """One server with its own data; it ends with this process, however that ends.

    Attributes:
        directory: Its data and its log.

    Example:
        with PostgresqlServer() as server:
            url = server.create_database()
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="aioshard-postgresql-"))
        self._log_file = self.directory / "server.log"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_group(self) -> int:
        """Id of the process group that is the server."""
        if self._process is None:
            raise PostgresqlFailedError("the server was not started: call start() first")
        return self._process.pid

    def start(self) -> None:
        """Starts the server; returns when it answers.

        Raises:
            PostgresqlUnavailableError: Its programs are missing.
            PostgresqlFailedError: It ended, or did not answer in time.
        """
        programs = server_programs()
        self._initialise(programs)
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._port = free_port()
            self._launch(programs)
            try:
                self._wait_until_ready()
            except PostgresqlFailedError as failure:
                if "Address already in use" not in str(failure) or attempt == PORT_ATTEMPTS:
                    raise
            else:
                return

    def close(self) -> None:
        """Ends the server, and removes its data."""
        process = self._process
        if process is not None:
            # SIGINT is its fast shutdown: clients are disconnected. After SIGKILL it leaves shared memory behind.
            ended = end_group(process.pid, signal.SIGINT, STOP_TIMEOUT)
            if not ended:
                end_group(process.pid, signal.SIGKILL, STOP_TIMEOUT)
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def create_database(self) -> str:
        """Makes an empty database and returns its URL."""
        name = f"test_{uuid.uuid4().hex}"
        self._administer("CREATE DATABASE {}", name)
        return self._url(name)

    def drop_database(self, url: str) -> None:
        """Removes a database and ends the connections to it."""
        self._administer("DROP DATABASE {} WITH (FORCE)", url.rpartition("/")[2])

    def _url(self, database: str) -> str:
        return f"postgresql://{ACCOUNT}@127.0.0.1:{self._port}/{database}"

    def _administer(self, statement: LiteralString, database: str) -> None:
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(SQL(statement).format(Identifier(database)))

    def _initialise(self, programs: Path) -> None:
        if os.geteuid() == 0:
            account = pwd.getpwnam(ACCOUNT)
            os.chown(self.directory, account.pw_uid, account.pw_gid)
        command = [str(programs / "initdb"), f"--pgdata={self._data}", f"--username={ACCOUNT}", "--auth=trust"]
        command += ["--encoding=UTF8", "--no-locale", "--no-sync"]
        done = subprocess.run(
            [*_as_account(), *command],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT,
            check=False,
        )
        if done.returncode != 0:
            raise PostgresqlFailedError(f"the server's data could not be made:\n{done.stdout}{done.stderr}")

    def _launch(self, programs: Path) -> None:
        guard = [sys.executable, "-S", str(PROJECT / "tests" / "support" / "guard.py"), str(os.getpid())]
        command = [str(programs / "postgres"), "-D", str(self._data)]
        for name, value in {**OPTIONS, "port": str(self._port)}.items():
            command += ["-c", f"{name}={value}"]
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [*guard, *_as_account(), *command],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        give_up = time.monotonic() + START_TIMEOUT
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                raise PostgresqlFailedError(f"the server ended while it started; its log:\n{self._log()}")
            try:
                psycopg.connect(self._url("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError:
                time.sleep(READY_INTERVAL)
            else:
                return
        raise PostgresqlFailedError(f"the server did not answer within {START_TIMEOUT:g} s; its log:\n{self._log()}")

    def _log(self) -> str:
        return self._log_file.read_text(errors="replace")[-4_000:]

    @property
    def _data(self) -> Path:
        return self.directory / "data"


def server_programs() -> Path:
    """The folder of `initdb` and `postgres`: where PATH has them, or else Debian's newest.

    Raises:
        PostgresqlUnavailableError: They are missing, or may not be run here.
    """
    on_path = shutil.which("initdb")
    candidates = [Path(on_path).resolve().parent] if on_path else []
    candidates += sorted(DEBIAN_PROGRAMS.glob("*/bin"), key=lambda folder: _version(folder.parent.name), reverse=True)
    found = next(
        (
            directory
            for directory in candidates
            if (directory / "initdb").exists() and (directory / "postgres").exists()
        ),
        None,
    )
    if found is None:
        raise PostgresqlUnavailableError(
            f"neither PATH nor {DEBIAN_PROGRAMS} has `initdb` and `postgres`: install the server, on Debian with "
            "`apt-get install postgresql`"
        )
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            raise PostgresqlUnavailableError("PostgreSQL refuses to run as root, and `setpriv` is not there to change")
        try:
            pwd.getpwnam(ACCOUNT)
        except KeyError:
            raise PostgresqlUnavailableError(
                f"PostgreSQL refuses to run as root, and the account {ACCOUNT!r} is missing: run the tests as "
                "somebody else"
            ) from None
    return found


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _as_account() -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={ACCOUNT}", f"--regid={ACCOUNT}", "--init-groups"]
