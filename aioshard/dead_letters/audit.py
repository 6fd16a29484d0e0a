"""The audit log of changes to dead letters and parked records: the same as that of the dashboard's other actions."""

import json
import logging
from collections.abc import Iterable
from itertools import groupby

from aioshard.dead_letters.dead_letter import Position

logger = logging.getLogger("aioshard.web.audit")


def audit(action: str, topic: str, subjects: str, who: str, sentence: str) -> None:
    """Write one line about a change.

    Args:
        action: Such as `send`, `edit`, `drop` or `release`.
        topic: The side topic.
        subjects: The records that it concerns; see `positions_as_text`.
        who: The user of the operating system, or the sender of a web request.
        sentence: The change, in words.
    """
    logger.warning("%s topic=%s records=%s by %s: %s", action, json.dumps(topic), json.dumps(subjects), who, sentence)


def positions_as_text(positions: Iterable[Position]) -> str:
    """Return positions in a side topic on one line.

    Example:
        >>> positions_as_text([(0, 3), (1, 9), (0, 4), (0, 5), (0, 8)])
        '0/3-5,0/8,1/9'
    """
    # Adjacent offsets differ from their index by the same number.
    numbered = enumerate(sorted(set(positions)))
    runs = []
    for (partition, _), group in groupby(numbered, key=lambda item: (item[1][0], item[1][1] - item[0])):
        offsets = [offset for _, (_, offset) in group]
        last = f"-{offsets[-1]}" if len(offsets) > 1 else ""
        runs.append(f"{partition}/{offsets[0]}{last}")
    return ",".join(runs)
