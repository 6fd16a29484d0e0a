"""`aioshard record`: retry, skip or cancel one record of a running process."""

import os
from collections.abc import Callable
from typing import Any

import click

from aioshard.cli import options
from aioshard.cli.health import HealthServer, timeout_option
from aioshard.cli.output import print_result
from aioshard.cli.run import TOKEN_VARIABLE
from aioshard.serde.side_records import Coordinates


def _takes_record(function: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments and options that all actions on a record have."""
    function = options.as_json("what was done")(function)
    function = timeout_option(function)
    function = click.argument("record", metavar="TOPIC/PARTITION/OFFSET", type=options.coordinates)(function)
    return click.argument("url", metavar="URL")(function)


@click.group("record", cls=options.OrderedGroup)
def command() -> None:
    """Retry, skip or cancel one record of a process.

    URL is the base of its health server, as for `aioshard explain`, which names the records. The process must run with
    `--web` and a token, and the same token must be in AIOSHARD_WEB_TOKEN here.
    """


@command.command("retry")
@_takes_record
def retry(url: str, record: Coordinates, *, timeout: float, as_json: bool) -> None:
    """Retry a halted record now, or one that waits for its next attempt."""
    _act("retry_now", url, record, timeout=timeout, as_json=as_json)


@command.command("skip")
@_takes_record
def skip(url: str, record: Coordinates, *, timeout: float, as_json: bool) -> None:
    """Complete a halted record without processing it."""
    _act("skip", url, record, timeout=timeout, as_json=as_json)


@command.command("cancel")
@_takes_record
def cancel(url: str, record: Coordinates, *, timeout: float, as_json: bool) -> None:
    """Cancel the current attempt of a record: the attempt fails."""
    _act("cancel_run", url, record, timeout=timeout, as_json=as_json)


def _act(action: str, url: str, record: Coordinates, *, timeout: float, as_json: bool) -> None:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise click.UsageError(
            f"{TOKEN_VARIABLE} is not set: expected the token with which the process at {url} was started"
        )
    content: dict[str, Any] = {"action": action, **record._asdict()}
    done = HealthServer(url, timeout=timeout).post("actions", content, token=token)
    print_result(done, [f"{done['done']}."], as_json=as_json)
