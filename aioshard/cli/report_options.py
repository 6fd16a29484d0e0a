"""What the commands of `aioshard report` have in common: what is looked at, options and the session."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from aioshard.cli import options
from aioshard.cli.moments import moment
from aioshard.errors import SettingsError
from aioshard.records import TOPIC_NAME

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aioshard.spark.analysis.journal import Journal
    from aioshard.spark.analysis.topic import Topics

__all__ = ["AskedOf", "asked", "journal_only", "opened", "opened_topics", "print_json", "shards", "top"]

F = TypeVar("F", bound=Callable[..., Any])


def _topic_names(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not TOPIC_NAME.fullmatch(value):
            raise click.BadParameter(
                f"{value!r} is no topic name: 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-' were expected"
            )
    return tuple(dict.fromkeys(values))


_journal = click.argument("path", metavar="[JOURNAL]", required=False)
"""A local path, or a URI."""

_handler = click.option("--handler", metavar="NAME", help="Whose records; by default the handler with the most.")

_master = click.option(
    "--master",
    default="local[*,4]",
    show_default=True,
    help="Where Spark runs; its own notation.",
)

_topics = click.option(
    "--topic",
    "topics",
    multiple=True,
    callback=_topic_names,
    metavar="TOPIC",
    help="Look at the records of a topic instead of a journal; may be given again and again.",
)
_refused_topics = click.option("--topic", "topics", multiple=True, callback=_topic_names, hidden=True)
"""For commands that cannot answer with a topic: they say what they need instead."""

_start = click.option(
    "--start",
    callback=moment("earliest"),
    default="earliest",
    show_default=True,
    metavar="earliest|TIME|FILE",
    help="With --topic: begin with the oldest record, the first one not older than a time, or offsets.",
)
_end = click.option(
    "--end",
    callback=moment("latest"),
    default="latest",
    show_default=True,
    metavar="latest|TIME|FILE",
    help="With --topic: where to end, frozen now.",
)

top = click.option(
    "--top", type=click.IntRange(1), default=10, show_default=True, help="How many to name of each kind."
)

shards = click.option(
    "--shards",
    multiple=True,
    type=click.IntRange(1),
    metavar="N",
    help="With --topic: also by shard, were there N fixed ones; may be given again and again.",
)


class AskedOf(NamedTuple):
    """What a command looks at: a journal or topics."""

    path: str | None
    topics: tuple[str, ...]
    bootstrap_servers: str | None
    start: Any
    end: Any
    handler: str | None
    master: str

    def refuse(self, **without_sense: object) -> None:
        """Refuse options that make no sense with what is looked at: those that were given, by name.

        Raises:
            UsageError: One was given.
        """
        other = "--topic" if self.topics else "a journal"
        for name, value in without_sense.items():
            if value:
                raise click.UsageError(f"--{name.replace('_', '-')} was given with {other}, which has no such thing")


def asked(what: str) -> Callable[[F], F]:
    """What to look at as `of`, and --json, which prints *what*."""
    return _asked(what, _topics, options.bootstrap_servers("AIOSHARD_BOOTSTRAP_SERVERS"), _start, _end)


def journal_only(what: str, needed: str) -> Callable[[F], F]:
    """As `asked`, of a journal alone: with --topic it says that *needed* needs one."""
    return _asked(what, _refused_topics, needed=needed)


def _asked(what: str, *more: Callable[[Any], Any], needed: str | None = None) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        @click.pass_context
        def gathered(context: click.Context, /, **values: Any) -> Any:
            of = AskedOf(**{name: values.pop(name, default) for name, default in _DEFAULTS.items()})
            _check(of, needed)
            return context.invoke(function, of=of, **values)

        gathered.__doc__ = function.__doc__
        gathered.__name__ = function.__name__
        gathered.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
        for option in (options.as_json(what), _master, *reversed(more), _handler, _journal):
            gathered = option(gathered)
        return gathered  # type: ignore[return-value]

    return decorate


_DEFAULTS: dict[str, Any] = {
    "path": None,
    "topics": (),
    "bootstrap_servers": None,
    "start": "earliest",
    "end": "latest",
    "handler": None,
    "master": None,
}


def _check(of: AskedOf, needed: str | None) -> None:
    """Refuse what does not go together, before Spark starts."""
    if of.topics and needed is not None:
        from aioshard.spark.session import check_packages  # noqa: PLC0415 - imported on use

        check_packages()
        from aioshard.spark.analysis.wording import needs_journal  # noqa: PLC0415

        raise SettingsError(needs_journal(needed))
    if of.topics and of.path is not None:
        raise click.UsageError(f"JOURNAL {of.path} and --topic {of.topics[0]} were given: expected is one of them")
    if not of.topics and of.path is None:
        other = "" if needed is not None else ", or --topic TOPIC"
        raise click.UsageError(f"nothing to look at was given: expected is JOURNAL, the directory of a journal{other}")
    if of.topics:
        of.refuse(handler=of.handler)
    else:
        of.refuse(
            bootstrap_servers=of.bootstrap_servers,
            start=None if of.start == "earliest" else of.start,
            end=None if of.end == "latest" else of.end,
        )


@contextlib.contextmanager
def opened(of: AskedOf) -> "Iterator[Journal]":
    """The journal, in a session of Spark that ends with the context.

    Raises:
        SettingsError: There is no journal, or Spark cannot be used.
        MissingExtraError: Spark is not installed.
    """
    from aioshard.spark.session import check_packages  # noqa: PLC0415 - imported on use

    check_packages()
    from aioshard.spark.analysis.journal import check_journal, read_journal  # noqa: PLC0415 - imported on use

    assert of.path is not None  # noqa: S101 - checked with the options
    check_journal(of.path)
    with _session(of.master) as spark:
        yield read_journal(spark, of.path)


@contextlib.contextmanager
def opened_topics(of: AskedOf) -> "Iterator[Topics]":
    """The topics, in a session of Spark that ends with the context; what is read of them is frozen before it starts.

    Raises:
        SettingsError: The brokers are not set, a range makes no sense or is empty, or Spark cannot be used.
        MissingExtraError: Spark is not installed.
        TransportError: The brokers do not answer, or have no such topic.
    """
    from aioshard.spark.session import check_packages  # noqa: PLC0415 - imported on use

    check_packages()
    from aioshard.cli.sides import run, settings_of  # noqa: PLC0415 - imported on use
    from aioshard.spark.analysis.topic import ask_for_topics, read_topics  # noqa: PLC0415

    found = run(ask_for_topics(settings_of(of.bootstrap_servers), of.topics, of.start, of.end))
    if not found.offsets:
        raise SettingsError(
            f"{', '.join(of.topics)} has no records in the range that was asked for: publish some, or give another "
            "--start and --end"
        )
    with _session(of.master) as spark:
        yield read_topics(spark, found)


@contextlib.contextmanager
def _session(master: str) -> "Iterator[SparkSession]":
    from pyspark.sql import SparkSession  # noqa: PLC0415 - imported on use

    from aioshard.spark.session import local_session  # noqa: PLC0415

    ours = SparkSession.getActiveSession() is None
    if ours:
        click.echo(f"Starting Spark ({master}) …", err=True)
    session = local_session(master, "aioshard report")
    try:
        yield session
    finally:
        if ours:
            session.stop()


def print_json(found: Any) -> None:
    """Print what was found, named tuples and dataclasses as objects. Durations ending in `_us` are microseconds."""
    click.echo(json.dumps(_plain(found)))


def _plain(found: Any) -> Any:
    """What *found* holds, for JSON."""
    if hasattr(found, "_asdict"):
        return {name: _plain(value) for name, value in found._asdict().items()}
    if hasattr(found, "__dataclass_fields__"):
        return {name: _plain(getattr(found, name)) for name in found.__dataclass_fields__}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return found
