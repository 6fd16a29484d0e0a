"""Contestants that run in a JVM: their command line and their compiled classes."""

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.spec import Spec
from tests.support.parallel_consumer_jars import ParallelConsumerUnavailableError, parallel_consumer_jars
from tests.support.paths import PROJECT

__all__ = ["HEAP", "PEERS", "TRANSACTIONAL", "ParallelConsumerUnavailableError", "command", "find_peers"]

HEAP = "512m"
"""Maximum heap of the JVM; its collector and everything else have their defaults."""

PEERS = ("Parallel Consumer", "Parallel Consumer, cooperative")
"""Names in the tables. The second one uses the cooperative assignor, which revokes only the partitions that move."""
TRANSACTIONAL = "Parallel Consumer, transactions"
"""The contestant that publishes to `Spec.output` in the transactions of its commits."""

_SOURCES = Path(__file__).parent
_CLASSES = PROJECT / "build" / "peers"
_COMPILE_TIMEOUT = 120.0


def find_peers() -> Path:
    """Return the directory of the classes; fetch the jars and compile unless that was done for these sources.

    Raises:
        ParallelConsumerUnavailableError: Java, its compiler or the jars are missing.
    """
    jars = parallel_consumer_jars()
    compiler = shutil.which("javac")
    if compiler is None:
        raise ParallelConsumerUnavailableError("no `javac` on PATH: install a JDK of version 17 or newer")
    sources = sorted(_SOURCES.glob("*.java"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    compiled_for = _CLASSES / "compiled-for"
    _CLASSES.mkdir(parents=True, exist_ok=True)
    with (_CLASSES / "compile.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may compile concurrently
        if not compiled_for.exists() or compiled_for.read_text() != digest:
            _compile(compiler, jars, sources)
            compiled_for.write_text(digest)
    return _CLASSES


def _compile(compiler: str, jars: Path, sources: list[Path]) -> None:
    options = ["-Xlint:all,-processing", "-proc:none", "--release", "17", "-cp", f"{jars}/*", "-d", str(_CLASSES)]
    done = subprocess.run(
        [compiler, *options, *map(str, sources)],
        capture_output=True,
        text=True,
        timeout=_COMPILE_TIMEOUT,
        check=False,
    )
    if done.returncode != 0:
        raise ParallelConsumerUnavailableError(f"javac did not compile {_SOURCES}:\n{done.stdout}{done.stderr}")


def command(spec: Spec) -> list[str]:
    """Return the command that runs the contestant of *spec*; it prints the same result as a contestant in Python.

    Raises:
        ParallelConsumerUnavailableError: Java, its compiler or the jars are missing.
    """
    classes = find_peers()
    values: Mapping[str, object] = asdict(spec)
    arguments = [f"{name}={_as_argument(value)}" for name, value in values.items()]
    return ["java", f"-Xmx{HEAP}", "-cp", f"{classes}:{parallel_consumer_jars()}/*", "Contestant", *arguments]


def _as_argument(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
