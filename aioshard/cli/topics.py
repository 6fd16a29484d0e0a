"""`aioshard topics`: the topics that an app needs, as the brokers describe them; creates those that are missing."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.brokers import run
from aioshard.cli.loading import load_app
from aioshard.cli.output import UNHEALTHY, print_result, table
from aioshard.engine.topics import NeededTopic, needed_topics
from aioshard.errors import AuthorizationError, TransportError
from aioshard.kafka.admin import KafkaAdmin
from aioshard.kafka.topics import (
    COMPACTED,
    LARGEST,
    POLICY,
    RETENTION,
    TIMESTAMP_TYPE,
    TopicDescription,
    dead_letter_settings,
    dead_letter_warnings,
    side_topic_policy_problem,
    side_topic_problem,
)
from aioshard.records import age

_SETTINGS = (POLICY, RETENTION, TIMESTAMP_TYPE, LARGEST)
_COMPARED = (POLICY, TIMESTAMP_TYPE)
"""Settings that are shown beside those that the topic should have."""
_SHOW_UP = 10.0
"""Seconds until a created topic is known to the brokers."""
_PAUSE = 0.1
"""Seconds between two look-ups of it."""
_BROKERS_DEFAULT = -1


class _Hidden(NamedTuple):
    """A topic that this user may not see."""

    why: str


_Found = TopicDescription | _Hidden | None
"""A topic as the brokers describe it; None if it does not exist."""


@click.command()
@options.target
@options.bootstrap_servers("the app's setting")
@click.option("--create", is_flag=True, help="Create the topics that are missing.")
@click.option(
    "--partitions",
    type=click.IntRange(1),
    metavar="N",
    help="With --create: partitions of input topics; without it, the brokers' default. Other topics get as many as "
    "the input topics of their handlers.",
)
@options.app_dir
@options.as_json("the topics")
def command(
    target: str, *, bootstrap_servers: str | None, create: bool, partitions: int | None, app_dir: str, as_json: bool
) -> int:
    """Show the topics that an app needs, and create missing ones.

    Lists the topics that the handlers consume, publish to, and use for dead letters and parked records. Ends with 3 if
    one is missing, or cannot be used as it is.
    """
    app = load_app(target, app_dir)
    if bootstrap_servers is not None:
        app.configure(bootstrap_servers=bootstrap_servers)
    app.check()
    app.settings.require_bootstrap_servers()
    survey = run(_survey(app, partitions or _BROKERS_DEFAULT if create else None))
    rows = [survey.row(topic) for topic in survey.needed]
    ok = not any(row["problems"] for row in rows)
    content = {"ok": ok, "app": target, "group_id": app.group_id, "topics": rows}
    headings = ("topic", "role", "handlers", "exists", "partitions", "retention", POLICY)
    notes = []
    for row in rows:
        notes += [f"Problem: {row['topic']}: {problem}" for problem in row["problems"]]
        notes += [f"Warning: {row['topic']}: {warning}" for warning in row["warnings"]]
    lines = table(headings, map(_cells, rows))
    if notes:
        lines += ["", *notes]
    print_result(content, lines, as_json=as_json)
    return 0 if ok else UNHEALTHY


class _Survey:
    """The needed topics of an app, each as the brokers describe it."""

    def __init__(self, needed: Sequence[NeededTopic], found: dict[str, _Found]) -> None:
        self.needed = needed
        self.found = found
        self.created: set[str] = set()
        self.errors: dict[str, str] = {}
        """Why topics could not be created."""

    def sources(self, topic: NeededTopic) -> list[TopicDescription]:
        """Return the existing input topics of the handlers that need a topic."""
        names = {
            source.name
            for source in self.needed
            if source.role == "input" and any(handler.takes(source.name) for handler in topic.handlers)
        }
        described = (self.found[name] for name in sorted(names))
        return [source for source in described if isinstance(source, TopicDescription)]

    def wanted_partitions(self, topic: NeededTopic) -> int | None:
        """Return how many partitions a topic needs, so that its records keep their partitions; None if any number."""
        counts = [source.partitions for source in self.sources(topic)]
        return max(counts) if counts and topic.role != "input" else None

    def largest_of_sources(self, topic: NeededTopic) -> int | None:
        """Return the size of the largest message that the input topics accept; None if unknown."""
        sizes = [int(source.settings[LARGEST]) for source in self.sources(topic) if LARGEST in source.settings]
        return max(sizes, default=None)

    def wanted_settings(self, topic: NeededTopic) -> Mapping[str, str]:
        """Return the settings with which a topic is created."""
        if topic.role == "parked records":
            return COMPACTED
        return dead_letter_settings(self.largest_of_sources(topic)) if topic.role == "dead letters" else {}

    def problems(self, topic: NeededTopic) -> list[str]:
        """Return why the app cannot use a topic, each with what to do."""
        found = self.found[topic.name]
        if topic.name in self.errors:
            return [self.errors[topic.name]]
        if found is None:
            return ["it does not exist: create it with --create, or check its name"]
        if isinstance(found, _Hidden):
            return [found.why]
        if topic.role != "parked records":
            return []
        policy = found.settings.get(POLICY, "compact")
        needed = self.wanted_partitions(topic) or 0
        problems = (
            side_topic_problem(topic.name, found.partitions, needed),
            side_topic_policy_problem(topic.name, policy),
        )
        return [problem for problem in problems if problem is not None]

    def warnings(self, topic: NeededTopic) -> list[str]:
        """Return what may lose messages of a topic that the app can use, each with what to do."""
        found = self.found[topic.name]
        if not isinstance(found, TopicDescription):
            return []
        if not found.settings:
            return ["its settings are unknown: grant DESCRIBE_CONFIGS on it to see them here"]
        if topic.role != "dead letters":
            return []
        return list(dead_letter_warnings(found.settings, self.largest_of_sources(topic)))

    def row(self, topic: NeededTopic) -> dict[str, Any]:
        """Return everything about a topic for JSON."""
        found = self.found[topic.name]
        partitions: int | None = None
        settings: Mapping[str, str] = {}
        if isinstance(found, TopicDescription):
            partitions = found.partitions
            settings = found.settings
        wanted = self.wanted_settings(topic)
        retention = settings.get(RETENTION)
        compared = {name: {"found": settings.get(name), "wanted": wanted.get(name)} for name in _COMPARED}
        return {
            "topic": topic.name,
            "role": topic.role,
            "handlers": [handler.name for handler in topic.handlers],
            "exists": None if isinstance(found, _Hidden) else found is not None,
            "created": topic.name in self.created,
            "partitions": {"found": partitions, "wanted": self.wanted_partitions(topic)},
            "retention_ms": None if retention is None else int(retention),
            "settings": compared,
            "problems": self.problems(topic),
            "warnings": self.warnings(topic),
        }


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        row["topic"],
        row["role"],
        ", ".join(row["handlers"]),
        _existence(row),
        _found_or_wanted(row["partitions"]),
        _retention(row["retention_ms"]),
        _found_or_wanted(row["settings"][POLICY]),
    )


def _existence(row: Mapping[str, Any]) -> str:
    if row["exists"] is None:
        return "not visible"
    if not row["exists"]:
        return "no"
    return "created" if row["created"] else "yes"


def _retention(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    if milliseconds < 0:
        return "forever"
    return age(milliseconds / 1000)


def _found_or_wanted(values: Mapping[str, Any]) -> str | None:
    """Return what was found; what is wanted if it differs or is unknown."""
    found = values["found"]
    wanted = values["wanted"]
    if found is None:
        return None if wanted is None else f"(wanted: {wanted})"
    if wanted in (None, found):
        return str(found)
    return f"{found} (wanted: {wanted})"


# Requests -----------------------------------------------------------------------------


async def _survey(app: App, partitions: int | None) -> _Survey:
    """Look the topics of an app up; create missing ones.

    Args:
        app: The app.
        partitions: Of input topics that are created; None to create nothing.
    """
    async with KafkaAdmin(app.settings) as admin:
        has_pattern = any(handler.pattern is not None for handler in app.handlers)
        needed = needed_topics(app.handlers, await admin.topics() if has_pattern else ())
        names = dict.fromkeys(topic.name for topic in needed)
        found = await asyncio.gather(*(_look_up(admin, name) for name in names))
        survey = _Survey(needed, dict(zip(names, found, strict=True)))
        if partitions is not None:
            for topic in _in_order_of_creation(needed):
                if survey.found[topic.name] is None:
                    await _create(admin, survey, topic, partitions)
    return survey


def _in_order_of_creation(needed: Iterable[NeededTopic]) -> list[NeededTopic]:
    """Return each topic once, by its most special role; topics that are only consumed come first.

    The others get as many partitions as those.
    """
    ranks = {"input": 0, "output": 1, "dead letters": 2, "parked records": 3}
    special: dict[str, NeededTopic] = {}
    for topic in sorted(needed, key=lambda topic: ranks[topic.role]):
        special[topic.name] = topic
    return sorted(special.values(), key=lambda topic: ranks[topic.role])


async def _look_up(admin: KafkaAdmin, name: str) -> _Found:
    try:
        return await admin.describe_topic(name, _SETTINGS)
    except AuthorizationError:
        return _Hidden("this user may not see it, so whether it exists is unknown: grant DESCRIBE on it")


async def _create(admin: KafkaAdmin, survey: _Survey, topic: NeededTopic, partitions: int) -> None:
    """Create a topic, and wait until the brokers know it."""
    count = partitions if topic.role == "input" else survey.wanted_partitions(topic) or partitions
    try:
        await admin.create_topic(topic.name, count, survey.wanted_settings(topic))
    except TransportError as error:
        if error.retriable:
            raise
        survey.errors[topic.name] = str(error)
        return
    survey.created.add(topic.name)
    deadline = asyncio.get_running_loop().time() + _SHOW_UP
    while survey.found[topic.name] is None and asyncio.get_running_loop().time() < deadline:
        survey.found[topic.name] = await _look_up(admin, topic.name)
        await asyncio.sleep(_PAUSE)
