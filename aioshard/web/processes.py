"""What the page and the terminal show of an app: one document, of one process or of several as one.

`GET processes.json` answers with it. In `processes` is one entry for each process: `worker` (None where there is only
one), `statistics`, `diagnosis`, `workload`, and `error`: None, or why nothing is known of it now. `actions` says
whether there are actions, for who has the token; `at` when it was made, in seconds since the epoch.

`statistics` and `diagnosis` are `App.statistics()` and `App.diagnose()`; of the partitions in `diagnosis` only those
that wait or are stuck, the worst first, at most `MOST_DIAGNOSED`, and `left_out` says how many more there are.
`workload` is `App.workload()`, None while the app does not run.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from aioshard.app import App
from aioshard.observe import PartitionDiagnosis, PartitionStatistics

__all__ = ["MOST_DIAGNOSED", "document", "process", "unknown_process"]

MOST_DIAGNOSED = 100
"""Partitions of one process that are explained."""
_PARTITION = [field.name for field in dataclasses.fields(PartitionStatistics)]


def process(app: App, worker: str | None = None) -> dict[str, Any]:
    """What is shown of one process, ready for JSON; safe from any thread.

    Args:
        app: Of this process.
        worker: Its name among several; None where it is the only one.
    """
    statistics, diagnosis, workload = app.statistics(), app.diagnose(), app.workload()
    # `asdict` copies deeply, which is most of the time where there are many partitions, and these are flat.
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
    """The entry of a process that does not answer.

    Args:
        worker: Its name.
        error: Why not, in a sentence.
    """
    return {"worker": worker, "statistics": None, "diagnosis": None, "workload": None, "error": error}


def document(processes: Iterable[Mapping[str, Any]], *, actions: bool) -> dict[str, Any]:
    """The whole of `processes.json`.

    Args:
        processes: From `process` and `unknown_process`.
        actions: Whether there are actions.
    """
    return {"processes": list(processes), "actions": actions, "at": time.time()}
