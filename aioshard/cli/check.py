"""`aioshard check`: is the app what its author meant, and would it start? Without a broker."""

import dataclasses
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click

from aioshard.app import App
from aioshard.checks import name_of
from aioshard.cli import options
from aioshard.cli.loading import load_app_with_handlers, surprises
from aioshard.cli.tables import print_table
from aioshard.core.adaptive import Adaptive
from aioshard.core.batching import Batch
from aioshard.core.pace import RateLimit
from aioshard.core.recourse import DeadLetter, OnFailure, Park
from aioshard.errors import AioshardError, MissingExtraError
from aioshard.handlers import Registration
from aioshard.serde.annotations import shown
from aioshard.settings import Settings

__all__ = ["command"]

_LONGEST = 48
"""Characters of a type in the table; the JSON has all."""


@click.command()
@options.target
@options.app_dir
@options.as_json("what was found")
def command(target: str, *, app_dir: str, as_json: bool) -> None:
    """Check an app without a broker.

    Shows its handlers and what each takes, its settings and what may surprise; exits with 2 when it would not start.
    """
    try:
        app = load_app_with_handlers(target, app_dir)
        app.check()
        if app.settings.journal is not None and importlib.util.find_spec("pyarrow") is None:
            raise MissingExtraError("the journal", "journal")
    except (AioshardError, click.ClickException) as error:
        if as_json:
            click.echo(
                json.dumps(
                    {"ok": False, "error": error.message if isinstance(error, click.ClickException) else str(error)}
                )
            )
        raise
    warnings = list(_warnings(app))
    if as_json:
        click.echo(json.dumps(_as_json(app, target, warnings)))
    else:
        _print(app, target, warnings)


# What may surprise --------------------------------------------------------------------


def _warnings(app: App) -> Iterator[str]:
    settings, handlers = app.settings, app.handlers
    if settings.bootstrap_servers is None:
        yield "bootstrap_servers is not set: give it to the app, in AIOSHARD_BOOTSTRAP_SERVERS or to `aioshard run`"
    if settings.auto_offset_reset is None:
        yield (
            "auto_offset_reset is not set: a group without committed offsets will not start; choose 'earliest' "
            "(every record) or 'latest' (only new ones)"
        )
    workers = sum(handler.concurrency for handler in handlers)
    if workers > settings.max_buffered_records:
        yield (
            f"the handlers have {workers} workers together but max_buffered_records={settings.max_buffered_records}: "
            "they can never all be busy"
        )
    for name, count in Counter(handler.name for handler in handlers).items():
        if count > 1:
            yield f"{count} handlers are named {name!r}: statistics and metrics cannot tell them apart"
    if settings.security_protocol == "SASL_PLAINTEXT":
        yield "security_protocol='SASL_PLAINTEXT' sends names, passwords and records unencrypted"
    if settings.security_protocol in {"SSL", "SASL_SSL"} and not settings.ssl_check_hostname:
        yield "ssl_check_hostname=False lets any broker with a trusted certificate pass for ours"
    yield from surprises(app)


# Output -------------------------------------------------------------------------------


def _handler(registration: Registration) -> dict[str, Any]:
    shard_by = registration.shard_by
    return {
        "name": registration.name,
        "topics": list(registration.topics),
        "pattern": registration.pattern,
        "payload": _payload(registration),
        "decode": None if registration.decode is None else name_of(registration.decode),
        "shard_by": shard_by if isinstance(shard_by, str) else name_of(shard_by),
        "shards": registration.shards,
        "concurrency": registration.concurrency,
        "adaptive": _options(registration.adaptive),
        "rate_limit": _options(registration.rate_limit),
        "key_rate_limit": _options(registration.key_rate_limit),
        "timeout": registration.timeout,
        "batch": _options(registration.batch),
        "retry": registration.retry.attempts,
        "on_failure": _failure(registration.on_failure),
        "runs_in": "event loop" if registration.is_async else "threads",
    }


def _payload(registration: Registration) -> str | None:
    """What the handler takes, as it is annotated; None where a function decodes."""
    if registration.decode is not None:
        return None
    one = "Record" if registration.payload is None else shown(registration.payload.type)
    return one if registration.batch is None else f"list[{one}]"


def _options(option: Adaptive | Batch | RateLimit | None) -> dict[str, Any] | None:
    return None if option is None else dataclasses.asdict(option)


def _concurrency(handler: dict[str, Any]) -> str:
    adaptive = handler["adaptive"]
    return str(handler["concurrency"]) if adaptive is None else f"{adaptive['minimum']}-{adaptive['maximum']}"


def _failure(policy: OnFailure) -> str:
    match policy:
        case DeadLetter(topic):
            return f"dead letter: {topic}"
        case Park(topic):
            return f"park: {topic}"
        case _:
            return policy


def _as_json(app: App, target: str, warnings: Sequence[str]) -> dict[str, Any]:
    return {
        "ok": True,
        "app": target,
        "group_id": app.group_id,
        "handlers": [_handler(registration) for registration in app.handlers],
        "settings": app.settings.asdict(),
        "warnings": list(warnings),
    }


def _print(app: App, target: str, warnings: Sequence[str]) -> None:
    click.echo(f"{target} is an app of group {app.group_id!r}\n")
    headings = ("handler", "topics", "takes", "shard by", "shards", "concurrency", "timeout", "on failure", "runs in")
    print_table(headings, [_row(_handler(registration)) for registration in app.handlers])
    click.echo()
    print_table(("setting", "value", "unit", ""), _settings_rows(app.settings))
    for warning in warnings:
        click.echo(f"\nWarning: {warning}")


def _row(handler: dict[str, Any]) -> tuple[str, ...]:
    topics = [*handler["topics"], *([f"/{handler['pattern']}/"] if handler["pattern"] is not None else [])]
    taken = handler["payload"] or f"what {handler['decode']}() gives"
    shards = "on demand" if handler["shards"] is None else str(handler["shards"])
    return (
        handler["name"],
        ", ".join(topics),
        taken if len(taken) <= _LONGEST else f"{taken[: _LONGEST - 1]}…",
        handler["shard_by"],
        shards,
        _concurrency(handler),
        "-" if handler["timeout"] is None else f"{handler['timeout']:g} s",
        handler["on_failure"],
        handler["runs_in"],
    )


def _settings_rows(settings: Settings) -> Iterator[tuple[str, ...]]:
    values = settings.asdict()
    for setting in Settings.descriptions():
        value = values[setting.name]
        shown = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        yield setting.name, shown, setting.unit or "", "set" if setting.name in settings.model_fields_set else ""
