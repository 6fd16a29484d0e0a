"""Partitions assigned by hand: how the setting `assign` is written, and what it cannot stand beside."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from aioshard.records import TOPIC_NAME

__all__ = ["by_hand_contradictions", "checked_assign"]

_MOST = 100_000
"""Partitions that one process may be given: more are a slip of the pen."""
_PART = re.compile(r"(?P<topic>[^:,]+):(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")
_EXAMPLE = "assign={'orders': [0, 1, 2]}, or as text 'orders:0-2,payments:1'"

_GROUPS_OWN: Mapping[str, object] = {
    "group_instance_id": None,
    "group_protocol": "classic",
    "assignor": "sticky",
    "reassignment_delay": 0.0,
    "remote_assignor": None,
}
"""What says how a group assigns, and the value that says nothing."""
_MEMBERS_OWN = ("session_timeout", "heartbeat_interval", "rebalance_timeout")


def checked_assign(value: object) -> dict[str, tuple[int, ...]]:
    """Partitions by topic, both in order.

    Args:
        value: A mapping of topics to partition numbers, or text: `orders:0-2,payments:1`.

    Raises:
        ValueError: It is neither, names a partition twice, or none at all.

    Example:
        >>> checked_assign("payments:1,orders:0-2,orders:7")
        {'orders': (0, 1, 2, 7), 'payments': (1,)}
    """
    pairs = _in_text(value) if isinstance(value, str) else _in_mapping(value)
    found: dict[str, set[int]] = {}
    for count, (topic, number) in enumerate(pairs):
        if count >= _MOST:
            raise ValueError(f"expected at most {_MOST} partitions")
        if not TOPIC_NAME.fullmatch(topic):
            raise ValueError(f"{topic!r} is no name of a topic: expected {_EXAMPLE}")
        numbers = found.setdefault(topic, set())
        if number in numbers:
            raise ValueError(f"partition {topic}/{number} is named twice: name each once")
        numbers.add(number)
    if not found:
        raise ValueError(f"it names no partition: expected {_EXAMPLE}; without assign the group assigns")
    return {topic: tuple(sorted(found[topic])) for topic in sorted(found)}


def _in_text(text: str) -> Iterator[tuple[str, int]]:
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is not TOPIC:PARTITION or TOPIC:FIRST-LAST: expected {_EXAMPLE}")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if last < first:
            raise ValueError(f"{part.strip()!r} ends before it begins: expected TOPIC:FIRST-LAST")
        for number in range(first, last + 1):
            yield match["topic"].strip(), number


def _in_mapping(value: object) -> Iterator[tuple[str, int]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {_EXAMPLE}")  # noqa: TRY004 - pydantic makes sentences of these
    for topic, numbers in value.items():
        if not isinstance(topic, str) or isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
            raise ValueError(f"expected topics with lists of numbers: {_EXAMPLE}")  # noqa: TRY004 - as above
        some = False
        for number in numbers:
            if type(number) is not int or number < 0:
                raise ValueError(f"{topic!r} has {number!r} among its partitions: expected whole numbers from 0 on")
            some = True
            yield topic, number
        if not some:
            raise ValueError(f"{topic!r} has no partitions: name at least one, or leave the topic out")


def by_hand_contradictions(values: Mapping[str, Any], given: Collection[str]) -> Iterable[str]:
    """What is set beside `assign` and has no meaning there, because nobody joins the group.

    Args:
        values: All settings.
        given: The names of those that somebody has set.
    """
    if values["assign"] is None:
        return
    for name, says_nothing in _GROUPS_OWN.items():
        if values[name] != says_nothing:
            yield (
                f"{name}={values[name]!r} has no effect with assign, which gives the partitions by hand: nobody joins "
                f"the group, and it assigns nothing; leave {name} out, or leave assign out to join the group"
            )
    for name in _MEMBERS_OWN:
        if name in given:
            yield (
                f"{name}={values[name]:g} s has no effect with assign: it is for members of a group, and with "
                f"partitions given by hand nobody joins; leave {name} out"
            )
