"""The directory of a run: its plan, its checkpoint, its outcomes, and small files that say how far it is."""

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
except ImportError:  # where there are no such locks nobody is kept off
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pyarrow import fs

__all__ = ["RunDirectory"]

_RUNNING = ".running"
"""Locked while a process drains the run; it stays."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_ASIDE = "."
"""What begins with it is being written: no reader looks at it, Spark and Arrow neither."""


class RunDirectory:
    """A directory on this machine, or anywhere that Arrow's file systems reach (`s3://`, `gs://`, `hdfs://`, …).

    Names within the directory are relative, with `/` between their parts.

    Invariants:
        * A file is there whole or not at all: it is written aside and then moved.

    Example:
        >>> directory = RunDirectory("runs/7")
        >>> directory.uri("checkpoint").endswith("/runs/7/checkpoint")
        True
    """

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        """Name a directory; nothing is made or asked yet.

        Raises:
            PlanError: *uri* names no place that is known.
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
        """The same, where it is one already."""
        return directory if isinstance(directory, RunDirectory) else cls(directory)

    def __str__(self) -> str:
        """As it was given."""
        return self._given

    def __repr__(self) -> str:
        return f"RunDirectory({self._given!r})"

    def uri(self, name: str = "") -> str:
        """The directory, or what is in it, as Spark takes it."""
        return f"{self._base}/{name}" if name else self._base

    # Files ----------------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        """Whether there is a file, or a directory, of that name."""
        with self._told(name):
            return self._files.exists(name)

    def read(self, name: str) -> bytes | None:
        """What a file holds; None where there is none.

        Raises:
            PlanError: It cannot be read.
        """
        with self._told(name):
            return self._files.read(name)

    def write(self, name: str, content: bytes | str) -> None:
        """Write a file, in place of one that is there; a reader sees the old one or the new one.

        Raises:
            PlanError: It cannot be written.
        """
        with self._told(name):
            self._files.write(name, content.encode() if isinstance(content, str) else content)

    def remove(self, name: str) -> bool:
        """Remove a file; returns whether it was there."""
        with self._told(name):
            return self._files.remove(name)

    @property
    def moves_at_once(self) -> bool:
        """Whether a directory is moved in one step; object stores copy and delete its files one by one."""
        return self._files.moves_at_once

    def move(self, name: str, to: str) -> None:
        """Move a directory of the run to where nothing is yet."""
        self._files.move(name, to)

    def remove_directory(self, name: str) -> None:
        """Remove a directory of the run with all that is in it, where there is one."""
        self._files.remove_directory(name)

    def list(self, name: str = "") -> list[str]:
        """The names of all that is in a directory of the run, sorted; empty where there is none."""
        with self._told(name):
            return sorted(found for found in self._files.list(name) if not found.startswith(_ASIDE))

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Errors of files as a sentence."""
        try:
            yield
        except OSError as error:
            raise PlanError(
                f"{self.uri(name)} cannot be used ({error.strerror or error}): name a directory in which this user may "
                "read and write"
            ) from error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from draining the run; where file systems know no locks, nobody is kept off.

        Raises:
            PlanError: One drains it.
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
        """What a JSON file holds; None where there is none.

        Raises:
            PlanError: It is no JSON.
        """
        content = self.read(name)
        if content is None:
            return None
        try:
            return json.loads(content)
        except ValueError as error:
            raise PlanError(f"{self.uri(name)} is not JSON ({error}): it was not written by aioshard") from None

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file for people and programs."""
        self.write(name, json.dumps(content, indent=2) + "\n")

    # The plan -------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The plan of the run.

        Raises:
            PlanError: There is none, or it was edited, or is of a newer version.
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
            PlanError: The directory has a plan already: its checkpoint and its outcomes belong to that one.
        """
        self.refuse_used()
        self.write(PLAN, plan.to_json())

    def refuse_used(self) -> None:
        """Refuse a directory that has a plan.

        Raises:
            PlanError: It has.
        """
        if self.exists(PLAN):
            raise PlanError(
                f"{self._given} holds a run already: its outcomes belong to its own plan. Name a new directory, or "
                "remove this one"
            )


class _Files:
    """The files below a directory; *path* where it is on this machine."""

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
        """What holds a lock for this process until it is closed; False when another one has it, None without locks."""
        if self._path is None:
            return None
        if fcntl is None:
            return None
        descriptor = os.open(self._path / name, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            # Of the process: within one, Spark itself refuses a second query of the same run.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return False
        except OSError:  # the file system has none
            os.close(descriptor)
            return None
        return descriptor


def _sync(path: str) -> None:
    """Have a file on the disk before it takes the place of another one; Arrow leaves that to the system."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(name: str) -> str:
    return f"{_ASIDE}{name}.{uuid.uuid4().hex[:8]}"
