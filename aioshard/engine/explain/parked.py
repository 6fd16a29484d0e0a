"""Which keys are parked, and when each runs again. Safe from any thread."""

import math

from aioshard.engine.explain.words import MOST_NAMED
from aioshard.engine.handler import ActiveHandler
from aioshard.observe import ParkedKey
from aioshard.records import counted


def parked_lines(handler: ActiveHandler, *, show_keys: bool) -> list[str]:
    """Return lines about the parked keys of a handler, those that run again first; empty if no key is parked.

    Args:
        handler: The handler.
        show_keys: Whether to show keys as they are, instead of a hash.
    """
    parking = handler.parking
    if parking is None or not parking.key_count:
        return []
    keys = sorted(parking.parked_keys(MOST_NAMED, show_keys=show_keys), key=_soonest_first)[:MOST_NAMED]
    count = parking.key_count
    subject = "1 key is" if count == 1 else f"{count} keys are"
    lines = [f"{subject} parked in {parking.policy.topic} by handler {handler.spec.name}; other keys do not wait."]
    lines += [f"  {_name_of(key)} {_when(key)}{_why(key)}." for key in keys]
    if count > len(keys):
        more = counted(count - len(keys), "more key")
        lines.append(f"  {more}: 'aioshard park list {parking.policy.topic}' lists all of them.")
    return lines


def _soonest_first(key: ParkedKey) -> float:
    if key.in_flight:
        return -1.0
    return math.inf if key.due is None else key.due


def _name_of(key: ParkedKey) -> str:
    first = f"record {key.topic}/{key.partition}/{key.offset}"
    return f"R{first[1:]}, without a key," if key.key is None else f"Key {key.key} (first {first})"


def _when(key: ParkedKey) -> str:
    if key.in_flight:
        return "runs again now"
    if key.due is None:
        return "waits until it is released or dropped"
    return f"runs again in {key.due:.0f} s"


def _why(key: ParkedKey) -> str:
    return "" if key.error is None else f" ({' '.join(key.error.split())})"
