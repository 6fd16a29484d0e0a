"""The document behind the dashboard and the terminal, for one process or several.

`GET processes.json` returns it. `processes` has one entry per process: `worker` (None if there is only one),
`statistics`, `diagnosis`, `workload`, and `error`: None, or why its state is unknown now. `actions` says whether a
client with the token can perform actions; `at` is the time of the snapshot, in seconds since the epoch.

`statistics` and `diagnosis` are `App.statistics()` and `App.diagnose()`. Of the partitions in `diagnosis`, only those
that are waiting or stuck are included, the worst first, at most `MOST_DIAGNOSED`; `left_out` is the number of further
ones. `workload` is `App.workload()`, None while the app is not running.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from aioshard.app import App
from aioshard.observe import PartitionDiagnosis, PartitionStatistics

__all__ = ["MOST_DIAGNOSED", "document", "process", "unknown_process"]

MOST_DIAGNOSED = 100
"""Maximum number of diagnosed partitions per process."""
_PARTITION = [field.name for field in dataclasses.fields(PartitionStatistics)]


def process(app: App, worker: str | None = None) -> dict[str, Any]:
    """Return the entry of one process, ready for JSON; safe from any thread.

    Args:
        app: The app in this process.
        worker: Its name among several processes; None if it is the only one.
    """
    statistics, diagnosis, workload = app.statistics(), app.diagnose(), app.workload()
    # `asdict` copies deeply, which takes most of the time with many partitions, and these are flat.
    partitions = [{name: getattr(one, name) for name in _PARTITION} for one in statistics.partitions]
    others = dataclasses.replace(statistics, partitions=())
    worth = sorted((one for one in diagnosis.partitions if one.verdict in ("stuck", "waiting")), key=_worst_first)
    explained = dataclasses.replace(diagnosis, partitions=tuple(worth[:MOST_DIAGNOSED]))
    return {
        "worker": worker,
        "statistics": {**others.asdict(), "partitions": partitions},
        "diagnosis": {**explained.asdict(), "left_out": max(len(worth) - MOST_DIAGNOSED, 0)},
        "workload": None if workload is None else workload.asdict(),
        "error": None,
    }


def _worst_first(partition: PartitionDiagnosis) -> tuple[bool, float]:
    return partition.verdict != "stuck", -(partition.since or 0.0)


def unknown_process(worker: str, error: str) -> dict[str, Any]:
    """Return the entry of a process that does not respond.

    Args:
        worker: Its name.
        error: The reason, as a sentence.
    """
    return {"worker": worker, "statistics": None, "diagnosis": None, "workload": None, "error": error}


def document(processes: Iterable[Mapping[str, Any]], *, actions: bool) -> dict[str, Any]:
    """Return the complete `processes.json`.

    Args:
        processes: Entries from `process` and `unknown_process`.
        actions: Whether actions are available.
    """
    return {"processes": list(processes), "actions": actions, "at": time.time()}
