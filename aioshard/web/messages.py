"""The newest messages of the topics to which the handlers of an app divert records, for its dashboard.

Nothing is consumed or committed. Keys are hashed unless `show_keys` is set; payloads are left out unless
`show_payloads` is set.
"""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from aioshard.app import App
from aioshard.core.options import DeadLetter, Park
from aioshard.core.sharding import shown
from aioshard.errors import AioshardError
from aioshard.kafka.aiokafka.admin import KafkaAdmin
from aioshard.kafka.aiokafka.side_topics import TopicReader
from aioshard.records import Record
from aioshard.serde.side_records import (
    Coordinates,
    DeadLetterRecord,
    Failure,
    ParkedRecord,
    Removed,
    read_dead_letter,
    read_parked,
)
from aioshard.settings import Settings
from aioshard.web.server import SAFE

NEWEST = 100
"""Number of offsets to read at the end of each partition, and maximum number of messages in a response."""
LONGEST = 10_000
"""Maximum number of characters of a payload in a response."""
_TIMEOUT = 10.0


def messages_route(app: App) -> Route:
    """Return the route with the newest dead letters and parked records of an app, the newest failure first.

    It reads only the topics that the handlers of the app name.
    """

    async def messages(_: Request) -> Response:
        topics = {
            policy.topic for handler in app.handlers if isinstance(policy := handler.on_failure, DeadLetter | Park)
        }
        newest: list[dict[str, Any]] = []
        errors = {}
        for topic in sorted(topics):
            try:
                async with asyncio.timeout(_TIMEOUT):
                    newest += await _newest(app.settings, topic)
            except (AioshardError, TimeoutError) as error:
                errors[topic] = str(error) or f"the brokers took longer than {_TIMEOUT:g} s"
        return JSONResponse(
            {
                "topics": sorted(topics),
                "messages": sorted(newest, key=lambda message: -message["failed_at"])[:NEWEST],
                "errors": errors,
            },
            headers=SAFE,
        )

    return Route("/messages.json", messages, methods=["GET"])


async def _newest(settings: Settings, topic: str) -> list[dict[str, Any]]:
    stored: dict[object, dict[str, Any]] = {}
    async with KafkaAdmin(settings) as admin, TopicReader(settings, topic, await admin.partitions(topic)) as reader:
        async for records in reader.read({number: log.end - NEWEST for number, log in reader.ranges.items()}):
            for record in records:
                match read_dead_letter(record) or read_parked(record):
                    case DeadLetterRecord(original, failure):
                        stored[Coordinates.of(record)] = _message(settings, topic, original, failure)
                    case ParkedRecord(original, failure) as parked:
                        stored[parked.place] = _message(settings, topic, original, failure)
                    case Removed(place):
                        stored.pop(place, None)
    return list(stored.values())


def _message(settings: Settings, topic: str, original: Record, failure: Failure) -> dict[str, Any]:
    return {
        "topic": topic,
        "record": str(Coordinates.of(original)),
        "key": shown(original.key, show_keys=settings.show_keys),
        "size": None if original.value is None else len(original.value),
        "payload": (original.value or b"").decode("utf-8", "backslashreplace")[:LONGEST]
        if settings.show_payloads
        else None,
        **failure._asdict(),
    }
