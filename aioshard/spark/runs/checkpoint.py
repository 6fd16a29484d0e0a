"""Progress of a run, read from Spark's checkpoint."""

import json
from typing import NamedTuple

from aioshard.errors import PlanError
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import CHECKPOINT

__all__ = ["Border", "last_border"]


class Border(NamedTuple):
    """The end of the last complete micro-batch."""

    batch: int
    vector: dict[str, dict[str, int]]
    """Exclusive end offsets by topic and partition; every record before them is done."""


def last_border(directory: RunDirectory) -> Border | None:
    """Return the last border that a run has reached, or None before the first.

    Spark writes the offsets of a batch to `offsets` before it runs the batch, and marks it complete in `commits`.

    Raises:
        PlanError: The checkpoint is unreadable: it is damaged or was written by another program.
    """
    done = [int(name) for name in directory.list(f"{CHECKPOINT}/commits") if name.isdigit()]
    if not done:
        return None
    last = max(done)
    content = directory.read(f"{CHECKPOINT}/offsets/{last}")
    try:
        vector = json.loads((content or b"").decode().splitlines()[-1])
        found = {topic: {str(int(p)): int(offset) for p, offset in given.items()} for topic, given in vector.items()}
    except (ValueError, IndexError, AttributeError) as error:
        raise PlanError(
            f"the checkpoint of the run in {directory} cannot be read (offsets of batch {last}: {error}): it is of "
            "something else, or damaged; plan the run anew in another directory"
        ) from None
    return Border(last, found)
