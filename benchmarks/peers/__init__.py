"""Contestants that run in a JVM: what they are started with, and where their classes are."""

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.spec import Spec
from tests.support.kafka_libs import PROJECT
from tests.support.parallel_consumer_jars import ParallelConsumerUnavailableError, parallel_consumer_jars

__all__ = ["HEAP", "PEERS", "TRANSACTIONAL", "ParallelConsumerUnavailableError", "command", "find_peers"]

HEAP = "512m"
"""What the JVM may use for objects; its collector and everything else are left as they come."""

PEERS = ("Parallel Consumer", "Parallel Consumer, cooperative")
"""By the name in the tables. The second one is told the assignor that only takes away what moves."""
TRANSACTIONAL = "Parallel Consumer, transactions"
"""The one that publishes to `Spec.output` in the transactions of its commits."""

_SOURCES = Path(__file__).parent
_CLASSES = PROJECT / "build" / "peers"
_COMPILE_TIMEOUT = 120.0


def find_peers() -> Path:
    """Where the classes are; fetches the jars and compiles when that was not done for these sources.

    Raises:
        ParallelConsumerUnavailableError: Java, its compiler or the jars are missing.
    """
    jars = parallel_consumer_jars()
    compiler = shutil.which("javac")
    if compiler is None:
        raise ParallelConsumerUnavailableError("no `javac` on PATH: install a JDK of version 17 or newer")
    sources = sorted(_SOURCES.glob("*.java"))
    wanted = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    compiled_for = _CLASSES / "compiled-for"
    _CLASSES.mkdir(parents=True, exist_ok=True)
    with (_CLASSES / "compile.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here at once
        if not compiled_for.exists() or compiled_for.read_text() != wanted:
            _compile(compiler, jars, sources)
            compiled_for.write_text(wanted)
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
    """What starts the contestant of *spec*; it answers as one in Python does.

    Raises:
        ParallelConsumerUnavailableError: Java, its compiler or the jars are missing.
    """
    classes = find_peers()
    values: Mapping[str, object] = asdict(spec)
    told = [f"{name}={_told(value)}" for name, value in values.items()]
    return ["java", f"-Xmx{HEAP}", "-cp", f"{classes}:{parallel_consumer_jars()}/*", "Contestant", *told]


def _told(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
