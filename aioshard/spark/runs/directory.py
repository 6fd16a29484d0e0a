"""The directory of a run: its plan, checkpoint, outcomes, and small files that record its progress."""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aioshard.errors import MissingExtraError, PlanError
from aioshard.spark.runs.files import PLAN
from aioshard.spark.runs.plan import Plan

try:
    import fcntl
except ImportError:  # this platform has no such locks, so a second process is not kept out
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pyarrow import fs

__all__ = ["RunDirectory"]

_RUNNING = ".running"
"""Locked while a process drains the run; the file itself is never removed."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_ASIDE = "."
"""Prefix of files that are still being written; readers ignore them, including Spark and Arrow."""


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
        text = os.fspath(uri)
        if not text:
            raise PlanError("an empty name was found, the directory of a run was expected")
        self._given = text
        if text.startswith("file://") or not _SCHEME.match(text):
            path = Path(text.removeprefix("file://")).absolute()
            self._base = f"file://{path.as_posix()}"
            self._files = _Files(self._base, path)
        else:
            self._base = text.rstrip("/")
            self._files = _Files(self._base, None)

    @classmethod
    def of(cls, directory: "str | os.PathLike[str] | RunDirectory") -> "RunDirectory":
        """Return *directory* as a `RunDirectory`."""
        return directory if isinstance(directory, RunDirectory) else cls(directory)

    def __str__(self) -> str:
        """Return the name as you gave it."""
        return self._given

    def __repr__(self) -> str:
        return f"RunDirectory({self._given!r})"

    def uri(self, name: str = "") -> str:
        """Return the URI of the directory, or of a file in it, in the form that Spark accepts."""
        return f"{self._base}/{name}" if name else self._base

    # Files ----------------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        """Return whether a file or directory of that name exists."""
        with self._told(name):
            return self._files.exists(name)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist.

        Raises:
            PlanError: The file cannot be read.
        """
        with self._told(name):
            return self._files.read(name)

    def write(self, name: str, content: bytes | str) -> None:
        """Write or replace a file; a reader sees either the old content or the new.

        Raises:
            PlanError: The file cannot be written.
        """
        with self._told(name):
            self._files.write(name, content.encode() if isinstance(content, str) else content)

    def remove(self, name: str) -> bool:
        """Remove a file; return whether it existed."""
        with self._told(name):
            return self._files.remove(name)

    @property
    def moves_at_once(self) -> bool:
        """True if a directory moves in a single step; object stores copy and delete its files individually."""
        return self._files.moves_at_once

    def move(self, name: str, to: str) -> None:
        """Move a directory of the run to a name that does not exist yet."""
        self._files.move(name, to)

    def remove_directory(self, name: str) -> None:
        """Remove a directory of the run with all its content, if it exists."""
        self._files.remove_directory(name)

    def list(self, name: str = "") -> list[str]:
        """Return the sorted names in a directory of the run; empty if it does not exist."""
        with self._told(name):
            return sorted(found for found in self._files.list(name) if not found.startswith(_ASIDE))

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Translate file errors into a `PlanError`."""
        try:
            yield
        except OSError as error:
            raise PlanError(
                f"{self.uri(name)} cannot be used ({error.strerror or error}): name a directory in which this user may "
                "read and write"
            ) from error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from draining the run; has no effect on file systems without locks.

        Raises:
            PlanError: Another process is draining it.
        """
        with self._told(_RUNNING):
            lock = self._files.lock(_RUNNING)
        if lock is False:
            raise PlanError(
                f"the run in {self._given} is being drained by another process, and its handlers would run twice: wait "
                f"for its end, or ask for it with  aioshard spark stop {self._given}"
            )
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file, or None if it does not exist.

        Raises:
            PlanError: The file is not valid JSON.
        """
        content = self.read(name)
        if content is None:
            return None
        try:
            return json.loads(content)
        except ValueError as error:
            raise PlanError(f"{self.uri(name)} is not JSON ({error}): it was not written by aioshard") from None

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, indented for people."""
        self.write(name, json.dumps(content, indent=2) + "\n")

    # The plan -------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the plan of the run.

        Raises:
            PlanError: The directory has no plan, or it was edited or written by a newer version.
        """
        content = self.read(PLAN)
        if content is None:
            raise PlanError(f"there is no {PLAN} in {self._given}: make one with  aioshard spark plan")
        try:
            return Plan.from_json(content)
        except PlanError as error:
            raise PlanError(f"{self.uri(PLAN)}: {error}") from None

    def begin(self, plan: Plan) -> None:
        """Write the plan of a new run.

        Raises:
            PlanError: The directory already has a plan, which its checkpoint and outcomes belong to.
        """
        self.refuse_used()
        self.write(PLAN, plan.to_json())

    def refuse_used(self) -> None:
        """Refuse a directory that already has a plan.

        Raises:
            PlanError: The directory has a plan.
        """
        if self.exists(PLAN):
            raise PlanError(
                f"{self._given} holds a run already: its outcomes belong to its own plan. Name a new directory, or "
                "remove this one"
            )


class _Files:
    """The files below a directory; *path* is set if the directory is on this machine."""

    def __init__(self, uri: str, path: Path | None) -> None:
        try:
            from pyarrow import ArrowException, fs  # noqa: PLC0415 - large, and comes with an extra
        except ImportError:
            raise MissingExtraError(f"a run in {uri}", "spark") from None
        self._path = path
        if path is not None:
            self._system, self._base = fs.LocalFileSystem(), path.as_posix()
            return
        try:
            self._system, self._base = fs.FileSystem.from_uri(uri)
        except (ArrowException, OSError, ValueError) as error:
            raise PlanError(
                f"{uri} is no place that can be reached: {error}. A local path or a URI of Arrow's was expected"
            ) from None

    @property
    def moves_at_once(self) -> bool:
        return self._system.type_name in {"local", "hdfs"}

    def _found(self, name: str) -> "fs.FileInfo":
        return self._system.get_file_info(f"{self._base}/{name}")

    def exists(self, name: str) -> bool:
        return bool(self._found(name).type.name != "NotFound")

    def read(self, name: str) -> bytes | None:
        try:
            with self._system.open_input_stream(f"{self._base}/{name}") as stream:
                content: bytes = stream.read()
                return content
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        parent, _, last = f"{self._base}/{name}".rpartition("/")
        self._system.create_dir(parent, recursive=True)
        aside = f"{parent}/{_aside(last)}"
        with self._system.open_output_stream(aside) as stream:
            stream.write(content)
        if self._path is not None:
            _sync(aside)
        self._system.move(aside, f"{parent}/{last}")

    def remove(self, name: str) -> bool:
        if self._path is None and self._found(name).type.name != "File":
            return False
        try:
            self._system.delete_file(f"{self._base}/{name}")
        except FileNotFoundError:
            return False
        return True

    def move(self, name: str, to: str) -> None:
        target = f"{self._base}/{to}"
        self._system.create_dir(target.rpartition("/")[0], recursive=True)
        self._system.move(f"{self._base}/{name}", target)

    def remove_directory(self, name: str) -> None:
        if self._found(name).type.name == "Directory":
            self._system.delete_dir(f"{self._base}/{name}")

    def list(self, name: str) -> list[str]:
        from pyarrow import fs  # noqa: PLC0415

        selector = fs.FileSelector(f"{self._base}/{name}".rstrip("/"), allow_not_found=True)
        return [found.base_name for found in self._system.get_file_info(selector)]

    def lock(self, name: str) -> int | Literal[False] | None:
        """Return a descriptor that holds the lock until closed, False if another process has it, None without locks."""
        if self._path is None:
            return None
        if fcntl is None:
            return None
        descriptor = os.open(self._path / name, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            # The lock is per process. Within one process, Spark itself refuses a second query of the same run.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return False
        except OSError:  # the file system has no locks
            os.close(descriptor)
            return None
        return descriptor


def _sync(path: str) -> None:
    """Flush a file to disk before it replaces another one; Arrow leaves that to the operating system."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(name: str) -> str:
    return f"{_ASIDE}{name}.{uuid.uuid4().hex[:8]}"
