"""`aioshard check`: show how an app is configured and whether it would start, without a broker."""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from aioshard.app import App
from aioshard.cli import options
from aioshard.cli.loading import load_app
from aioshard.cli.output import cut, print_result, table
from aioshard.core.options import Adaptive, DeadLetter, OnFailure
from aioshard.engine.handler import Handler
from aioshard.errors import MissingExtraError
from aioshard.functions import name_of
from aioshard.serde.payloads import shown
from aioshard.settings import Settings, misspelled_variables, timeout_warnings, unit_of

_LONGEST = 48
"""Characters of a payload in the table; the JSON has all of them."""


@click.command()
@options.target
@options.app_dir
@click.option("--all", "all_settings", is_flag=True, help="Show every setting, not only those that are set.")
@options.as_json("the handlers, all settings and warnings")
def command(target: str, *, app_dir: str, all_settings: bool, as_json: bool) -> None:
    """Check an app without a broker.

    Shows its handlers with their payloads, its settings and warnings. Ends with 2 if the app would not start.
    """
    app = load_app(target, app_dir)
    app.check()
    if app.settings.journal is not None and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("the journal", "journal")
    handlers = [_handler(handler) for handler in app.handlers]
    warnings = list(_warnings(app))
    content = {
        "ok": True,
        "app": target,
        "group_id": app.group_id,
        "handlers": handlers,
        "settings": app.settings.asdict(),
        "warnings": warnings,
    }
    headings = ("handler", "topics", "payload", "shard by", "shards", "concurrency", "timeout", "on failure", "runs in")
    lines = [
        f"{target} is an app of group {app.group_id!r}\n",
        *table(headings, map(_row, handlers)),
        "",
        *table(("setting", "value", "unit"), _settings_rows(app.settings, all_settings=all_settings)),
        *(f"\nWarning: {warning}" for warning in warnings),
    ]
    print_result(content, lines, as_json=as_json)


# Warnings -----------------------------------------------------------------------------


def _warnings(app: App) -> Iterator[str]:
    settings = app.settings
    handlers = app.handlers
    if settings.bootstrap_servers is None:
        yield "bootstrap_servers is not set: give it to the app, in AIOSHARD_BOOTSTRAP_SERVERS or to `aioshard run`"
    if settings.auto_offset_reset is None:
        yield (
            "auto_offset_reset is not set: a group without committed offsets will not start; choose 'earliest' "
            "(every record) or 'latest' (only new ones)"
        )
    for name, count in Counter(handler.name for handler in handlers).items():
        if count > 1:
            yield f"{count} handlers are named {name!r}: statistics and metrics cannot tell them apart"
    if settings.security_protocol == "SASL_PLAINTEXT":
        yield "security_protocol='SASL_PLAINTEXT' sends names, passwords and records unencrypted"
    yield from timeout_warnings(settings, [(handler.name, handler.timeout) for handler in handlers])
    yield from misspelled_variables()


# Output -------------------------------------------------------------------------------


def _handler(registration: Handler) -> dict[str, Any]:
    shard_by = registration.shard_by
    return {
        "name": registration.name,
        "topics": list(registration.topics),
        "pattern": registration.pattern,
        "payload": _payload(registration),
        "decode": None if registration.decode is None else name_of(registration.decode),
        "shard_by": shard_by if isinstance(shard_by, str) else name_of(shard_by),
        "shards": registration.shards,
        "shard_queue_size": registration.shard_queue_size,
        "concurrency": registration.concurrency,
        "adaptive": registration.adaptive,
        "limit": registration.limit,
        "timeout": registration.timeout,
        "batch": registration.batch,
        "retry": registration.retry.attempts,
        "on_failure": _failure(registration.on_failure),
        "keep": registration.keep,
        "max_age": registration.max_age,
        "runs_in": {"loop": "event loop", "thread": "threads", "process": "processes"}[registration.run_in],
    }


def _payload(registration: Handler) -> str | None:
    """Return the annotation of the payload; None if a function decodes it."""
    if registration.decode is not None:
        return None
    name = "Record" if registration.payload is None else shown(registration.payload.type)
    return name if registration.batch is None else f"list[{name}]"


def _failure(policy: OnFailure) -> str:
    if isinstance(policy, str):
        return policy
    kind = "dead letter" if isinstance(policy, DeadLetter) else "park"
    return f"{kind}: {policy.topic}"


def _row(handler: dict[str, Any]) -> tuple[object, ...]:
    topics = list(handler["topics"])
    if handler["pattern"] is not None:
        topics.append(f"/{handler['pattern']}/")
    return (
        handler["name"],
        ", ".join(topics),
        cut(handler["payload"] or f"decoded by {handler['decode']}()", _LONGEST),
        handler["shard_by"],
        handler["shards"] or "on demand",
        handler["concurrency"] if handler["adaptive"] is None else _range(handler["adaptive"]),
        None if handler["timeout"] is None else f"{handler['timeout']:g} s",
        handler["on_failure"],
        handler["runs_in"],
    )


def _range(adaptive: Adaptive) -> str:
    return f"{adaptive.minimum} to {adaptive.maximum}"


def _settings_rows(settings: Settings, *, all_settings: bool) -> Iterator[tuple[object, ...]]:
    for name, value in settings.asdict().items():
        if all_settings or name in settings.model_fields_set:
            yield name, f"{value:g}" if isinstance(value, float) else value, unit_of(name) or ""
