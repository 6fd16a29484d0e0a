"""How far a run is, from the checkpoint that Spark keeps of it."""

import json
from typing import NamedTuple

from aioshard.errors import PlanError
from aioshard.spark.runs.directory import RunDirectory
from aioshard.spark.runs.files import CHECKPOINT

__all__ = ["Border", "last_border"]


class Border(NamedTuple):
    """The end of the last micro-batch that is complete."""

    batch: int
    vector: dict[str, dict[str, int]]
    """Everything before it is done, by topic and partition."""


def last_border(directory: RunDirectory) -> Border | None:
    """The last border that a run has come to; None before the first.

    Spark notes the offsets of a batch before it runs it, in `offsets`, and that it is complete in `commits`.

    Raises:
        PlanError: The checkpoint cannot be read: it was written by something else, or is damaged.
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
