"""The machine on which the figures were measured."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("aiokafka", "uvloop", "faststream", "faststream-concurrent-aiokafka")
GIB = 1024**3


def machine() -> dict[str, Any]:
    """Return processor, memory, load and versions."""
    return {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def described(facts: dict[str, Any]) -> str:
    """Format the result of `machine` as one line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    return (
        f"{facts['processors']} × {facts['processor']}, {facts['memory_gib']} GiB, {facts['system']}, "
        f"load {facts['load']} at the start; Python {facts['python']}, {versions}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
