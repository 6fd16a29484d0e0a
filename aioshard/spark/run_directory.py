"""The directory of a run: its plan, checkpoint, outcomes, and small files that record its progress."""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioshard.errors import MissingExtraError, PlanError
from aioshard.spark.plans import Plan, Vector, starts_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

try:
    import fcntl
except ImportError:  # Windows has no such locks, so a second process is not kept out
    fcntl = None  # type: ignore[assignment]

PLAN = "plan.json"
STOP = "stop"
"""Ends a run after the current micro-batch."""
CHECKPOINT = "checkpoint"
"""Spark's own checkpoint: the progress of the run."""
OUTCOMES = "outcomes"
STAGING = "staging"
"""Holds a batch until it is complete; only its writer reads it."""
SUMMARIES = "summaries"
"""Row counts by status for each batch, as JSON."""
HALTED = "halted.json"
"""The records that ended the last run."""
VERIFIED = "verified.json"
"""A `Verification` as JSON."""
DEAD_LETTERS = "dead-letters.json"
"""Written while dead letters are sent: `{"plan": digest, "acknowledged": 0, "batches": []}`."""
HANDED_OVER = "handover.json"

_RUNNING = ".running"
"""Locked while a process runs the plan; the file itself is never removed."""
_TEMPORARY = "."
"""Prefix of files that are still being written; readers ignore them, including Spark and Arrow."""
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class RunDirectory:
    """A directory on this machine, or on any file system that Arrow supports (`s3://`, `gs://`, `hdfs://`, …).

    Names within the directory are relative, with `/` between their parts.

    Invariants:
        * A file is either complete or absent: it is written under a temporary name and then moved.

    Example:
        >>> directory = RunDirectory("runs/7")
        >>> directory.uri("checkpoint").endswith("/runs/7/checkpoint")
        True
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        """Name a directory; nothing is created or accessed yet.

        Raises:
            PlanError: *uri* is empty, or not a location that Arrow can reach.
            MissingExtraError: pyarrow is not installed.
        """
        self._name = os.fspath(uri)
        if not self._name:
            raise PlanError("expected the directory of a run, found an empty name")
        try:
            from pyarrow import ArrowException, fs  # noqa: PLC0415 - large, and comes with an extra
        except ImportError:
            raise MissingExtraError(f"a run in {uri}", "spark") from None
        self._is_local = self._name.startswith("file://") or not SCHEME.match(self._name)
        path = Path(self._name.removeprefix("file://")).absolute().as_posix()
        location = path if self._is_local else self._name.rstrip("/")
        self._uri = f"file://{path}" if self._is_local else location
        try:
            self._system, self._base = fs.FileSystem.from_uri(location)
        except (ArrowException, OSError, ValueError) as error:
            raise PlanError(
                f"{uri} cannot be reached ({error}): expected a local path or a URI that Arrow supports"
            ) from None

    @classmethod
    def of(cls, directory: "str | os.PathLike[str] | RunDirectory") -> "RunDirectory":
        """Return *directory* as a `RunDirectory`."""
        return directory if isinstance(directory, RunDirectory) else cls(directory)

    def __str__(self) -> str:
        """Return the name as you gave it."""
        return self._name

    def uri(self, name: str = "") -> str:
        """Return the URI of the directory, or of a file in it, in the form that Spark accepts."""
        return f"{self._uri}/{name}" if name else self._uri

    def rows(self, spark: "SparkSession", name: str) -> "DataFrame":
        """Return the outcome rows in a directory of the run."""
        from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - pyspark is imported on use

        from aioshard.spark.rows import OUTCOMES as COLUMNS  # noqa: PLC0415

        return spark.read.schema(from_arrow_schema(COLUMNS)).parquet(self.uri(name))

    # Files ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _path(self, name: str) -> Iterator[str]:
        """Provide the path of a file to the file system; translate its errors into a `PlanError`."""
        try:
            yield f"{self._base}/{name}".rstrip("/")
        except OSError as error:
            raise PlanError(
                f"{self.uri(name)} cannot be used ({error.strerror or error}): name a directory that this user may "
                "read and write"
            ) from error

    def exists(self, name: str) -> bool:
        """Return whether a file or directory of that name exists."""
        with self._path(name) as path:
            return bool(self._system.get_file_info(path).type.name != "NotFound")

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist.

        Raises:
            PlanError: The file cannot be read.
        """
        with (
            self._path(name) as path,
            contextlib.suppress(FileNotFoundError),
            self._system.open_input_stream(path) as stream,
        ):
            return bytes(stream.read())
        return None

    def write(self, name: str, content: str) -> None:
        """Write or replace a file; a reader sees either the old content or the new.

        Raises:
            PlanError: The file cannot be written.
        """
        with self._path(name) as path:
            parent, _, last = path.rpartition("/")
            temporary = f"{parent}/{_TEMPORARY}{last}.{uuid.uuid4().hex[:8]}"
            self._system.create_dir(parent, recursive=True)
            with self._system.open_output_stream(temporary) as stream:
                stream.write(content.encode())
            if self._is_local:  # Arrow leaves the time of the write to the operating system
                with Path(temporary).open("rb+") as file:
                    os.fsync(file)
            self._system.move(temporary, path)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self._path(name) as path, contextlib.suppress(FileNotFoundError):
            self._system.delete_file(path)

    def list(self, name: str = "") -> list[str]:
        """Return the sorted names in a directory of the run; empty if it does not exist."""
        from pyarrow import fs  # noqa: PLC0415

        with self._path(name) as path:
            entries = self._system.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(entry.base_name for entry in entries if not entry.base_name.startswith(_TEMPORARY))

    @property
    def moves_atomically(self) -> bool:
        """True if a directory moves in a single step; object stores copy and delete its files individually."""
        return self._system.type_name in {"local", "hdfs"}

    def move(self, name: str, to: str) -> None:
        """Move a directory of the run to a name that does not exist yet."""
        target = f"{self._base}/{to}"
        self._system.create_dir(target.rpartition("/")[0], recursive=True)
        self._system.move(f"{self._base}/{name}", target)

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file, or None if it does not exist.

        Raises:
            PlanError: The file is not valid JSON.
        """
        content = self.read(name)
        try:
            return None if content is None else json.loads(content)
        except ValueError as error:
            raise PlanError(f"{self.uri(name)} is not JSON ({error}): aioshard did not write it") from None

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, indented for people."""
        self.write(name, json.dumps(content, indent=2) + "\n")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from running the plan; has no effect on file systems without locks.

        Raises:
            PlanError: Another process runs it.
        """
        if not self._is_local or fcntl is None:
            yield
            return
        with self._path(_RUNNING) as path:
            lock_file = Path(path).open("a")  # noqa: SIM115 - an error of the run is not an error of the file
        with lock_file:
            try:
                # The lock is per process. Within one process, Spark itself refuses a second query of the same run.
                fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise PlanError(
                    f"another process is running {self._name}, and its handlers would run twice: wait for its end, or "
                    f"stop it with  aioshard spark stop {self._name}"
                ) from None
            except OSError:  # the file system has no locks
                pass
            yield

    # Plan and progress ------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the plan of the run.

        Raises:
            PlanError: The directory has no plan, or it was edited or has another format.
        """
        content = self.read(PLAN)
        if content is None:
            raise PlanError(f"{self._name} contains no {PLAN}: make one with  aioshard spark plan")
        return Plan.from_json(content, self.uri(PLAN))

    def begin(self, plan: Plan) -> None:
        """Write the plan of a new run.

        Raises:
            PlanError: The directory already has a plan, which its checkpoint and outcomes belong to.
        """
        if self.exists(PLAN):
            raise PlanError(
                f"{self._name} already contains a run, and its outcomes belong to that plan: name a new directory, "
                "or remove this one"
            )
        self.write(PLAN, plan.to_json())

    def reached(self, plan: Plan) -> Vector:
        """Return the end of the last complete micro-batch; every record before it is done.

        Spark writes the offsets of a batch to `offsets` before it runs the batch, and marks it complete in `commits`.
        It calls the source's own `commit` one batch late, and never for the last batch.

        Raises:
            PlanError: The checkpoint is damaged, or another program wrote it.
        """
        complete = [int(name) for name in self.list(f"{CHECKPOINT}/commits") if name.isdigit()]
        if not complete:
            return starts_of(plan.ranges)
        content = self.read(f"{CHECKPOINT}/offsets/{max(complete)}") or b""
        try:
            vector: Vector = json.loads(content.decode().splitlines()[-1])
            return {topic: {number: int(vector[topic][number]) for number in vector[topic]} for topic in vector}
        except (ValueError, IndexError, TypeError) as error:
            raise PlanError(
                f"the checkpoint of the run in {self._name} is damaged (offsets of batch {max(complete)}: {error}): "
                "make a new plan in another directory"
            ) from None
