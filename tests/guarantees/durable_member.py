"""A member with records that never finish: `python -m tests.guarantees.durable_member`, see `Member`.

Each run of the handler that ended well is 8 bytes in a file, its offset, written before the record is complete.
"""

import dataclasses
import json
import os
import random
import sys
from collections.abc import Collection, Mapping
from typing import Any

from aioshard import App, Record, Retry

FOREVER = 100_000.0
"""Seconds until the next attempt of what cannot be finished."""
PATTERNS = ("one", "scattered", "alternating")
PROTOCOLS = ("classic", "consumer")
_OF_THE_BROKER = {"session_timeout", "heartbeat_interval"}
"""Settings that belong to the broker under the protocol `consumer`."""


@dataclasses.dataclass(frozen=True)
class Member:
    """The behavior of a member; its only argument, as JSON.

    Attributes:
        bootstrap: The broker's address.
        group: Its group.
        topic: One with a single partition.
        records: How many that has.
        pattern: Which of them cannot be finished; see `stuck_offsets`. Empty: all can.
        file: Where it tells what it has done.
        until_caught_up: Whether it ends at the end of the topic.
        settings: Of the app.
    """

    bootstrap: str
    group: str
    topic: str
    records: int
    pattern: str
    file: str
    until_caught_up: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def settings_for_protocol(protocol: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an app that is a member with one of `PROTOCOLS`."""
    left_out = _OF_THE_BROKER if protocol == "consumer" else set()
    return {name: value for name, value in settings.items() if name not in left_out} | {"group_protocol": protocol}


def stuck_offsets(pattern: str, records: int) -> Collection[int]:
    """The offsets of what cannot be finished."""
    match pattern:
        case "one":
            return {0}
        case "scattered":
            return {0, *random.Random(1).sample(range(records), 300)}
        case "alternating":
            return range(0, records, 2)
    return ()


def main(member: Member) -> None:
    """Run until killed, or to the end."""
    stuck = stuck_offsets(member.pattern, member.records)
    file = os.open(member.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    app = App(member.group, bootstrap_servers=member.bootstrap, **member.settings)

    @app.consume(member.topic, shard_by="record", retry=Retry(attempts=2, initial=FOREVER, maximum=FOREVER))
    async def handle(record: Record) -> None:
        if record.offset in stuck:
            raise ConnectionError("its back end is down")
        os.write(file, record.offset.to_bytes(8, "big"))

    app.run(until_caught_up=member.until_caught_up)


if __name__ == "__main__":
    main(Member(**json.loads(sys.argv[1])))
