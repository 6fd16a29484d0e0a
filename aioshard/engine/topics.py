"""The topics that the handlers of an app need, and those of them that nothing can be written to."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from aioshard.core.options import DeadLetter, Park
from aioshard.engine.handler import Handler
from aioshard.errors import AuthorizationError
from aioshard.ports import Transport

TopicRole = Literal["input", "output", "dead letters", "parked records"]
"""Why a handler needs a topic: it consumes it, its results, its dead letters or its parked records go there."""

_NAMES: dict[TopicRole, str] = {
    "input": "input topic",
    "output": "output topic",
    "dead letters": "dead-letter topic",
    "parked records": "side topic",
}


class NeededTopic(NamedTuple):
    """A topic that handlers need for one purpose."""

    name: str
    role: TopicRole
    handlers: Sequence[Handler]

    def __str__(self) -> str:
        """Describe the topic for a message."""
        names = " and ".join(handler.name for handler in self.handlers)
        return f"{_NAMES[self.role]} {self.name!r} of handler {names}"


def needed_topics(handlers: Iterable[Handler], existing: Iterable[str] = ()) -> list[NeededTopic]:
    """Return the topics that handlers need; a topic may have several roles.

    Args:
        handlers: The handlers.
        existing: The topics of which those that match a pattern are needed.
    """
    needed: dict[tuple[str, TopicRole], list[Handler]] = {}
    names = sorted(existing)
    for handler in handlers:
        matching = (name for name in names if handler.takes(name))
        for topic in dict.fromkeys((*handler.topics, *matching)):
            needed.setdefault((topic, "input"), []).append(handler)
        if handler.publish_to is not None:
            needed.setdefault((handler.publish_to, "output"), []).append(handler)
        match handler.on_failure:
            case DeadLetter(topic):
                needed.setdefault((topic, "dead letters"), []).append(handler)
            case Park(topic):
                needed.setdefault((topic, "parked records"), []).append(handler)
    return [NeededTopic(name, role, users) for (name, role), users in needed.items()]


def written_topics(handlers: Iterable[Handler]) -> list[NeededTopic]:
    """Return the topics that messages are published to, without side topics, which the app creates."""
    return [topic for topic in needed_topics(handlers) if topic.role in ("output", "dead letters")]


class MissingTopic(NamedTuple):
    """A topic that nothing can be written to, as far as the brokers say."""

    sentence: str
    what_to_do: str


_CREATE = "create it, for example with `aioshard topics MODULE:APP --create`"


async def missing_outputs(client: Transport, topics: Collection[NeededTopic]) -> list[MissingTopic]:
    """Return those of the topics that nothing can be written to; one that the brokers create on demand is not missing.

    Raises:
        TransportError: The brokers do not answer.
    """
    missing: list[MissingTopic] = []
    absent: list[NeededTopic] = []
    for topic in topics:
        try:
            exists = bool(await client.partitions(topic.name))
        except AuthorizationError:
            missing.append(MissingTopic(f"this user may not see {topic}", "grant WRITE and DESCRIBE on it"))
            continue
        if not exists:
            absent.append(topic)
    if not absent:
        return missing
    creates = await client.creates_topics()
    if creates is None:
        doubt = ", and the brokers do not say whether they create topics on demand"
        missing += [MissingTopic(f"{topic} does not exist{doubt}", _CREATE) for topic in absent]
    elif not creates:
        missing += [MissingTopic(f"{topic} does not exist", _CREATE) for topic in absent]
    return missing
