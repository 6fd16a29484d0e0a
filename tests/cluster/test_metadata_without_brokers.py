"""Metadata with an empty broker list, as right after a freeze or restart of all brokers."""

import struct

import pytest

from aioshard import Record
from tests.kafka.faults.support import quick_app, until
from tests.support.proxies import METADATA, Request
from tests.support.three_brokers import ThreeBrokers

SOON = 100.0
"""Seconds until records are processed and committed again."""
FLEXIBLE = 9
"""The first version of the answer whose lengths are variable."""


def without_brokers(request: Request, answer: bytes) -> bytes:
    """Empty the list of brokers in an answer to a Metadata request."""
    flexible = request.api_version >= FLEXIBLE
    begin = 4 + flexible + 4 * (request.api_version >= 3)  # correlation id, tags, throttle time
    end = begin + (1 if flexible else 4)
    count = answer[begin] - 1 if flexible else struct.unpack_from(">i", answer, begin)[0]

    def passed_text(at: int) -> int:
        if flexible:
            return at + 1 + max(answer[at] - 1, 0)
        (length,) = struct.unpack_from(">h", answer, at)
        return at + 2 + max(int(length), 0)

    for _ in range(count):
        end = passed_text(end + 4) + 4  # node id, host, port
        if request.api_version >= 1:
            end = passed_text(end)  # rack
        end += flexible
    return answer[:begin] + (b"\x01" if flexible else bytes(4)) + answer[end:]


@pytest.mark.timeout(300)
async def test_a_member_resumes_after_metadata_without_brokers(brokers: ThreeBrokers, topic: str, group: str) -> None:
    await brokers.create_topic(topic)
    seen: set[bytes | None] = set()
    app = quick_app(brokers.proxied_bootstrap, group, client_id="member", metadata_max_age=1)

    @app.consume(topic)
    async def handle(record: Record) -> None:
        seen.add(record.value)

    async with app:
        await brokers.produce(topic, [(b"k", b"before")])
        await until(lambda: b"before" in seen)

        rule = brokers.proxies.answer(without_brokers, api_key=METADATA, client_id="member")
        await until(lambda: rule.requests)
        rule.lift()

        await brokers.produce(topic, [(b"k", b"after")])
        await until(lambda: b"after" in seen, app.explain, timeout=SOON)
        await until(lambda: [one.committed for one in app.statistics().partitions] == [2], app.explain, timeout=SOON)
