"""Connections of commands to the brokers: settings, and publishing."""

import asyncio
import contextlib
import getpass
import logging
import os
import sys
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import click

from aioshard.cli.output import progress
from aioshard.dead_letters import audit
from aioshard.kafka.publisher import Publisher
from aioshard.loops import loop_factory
from aioshard.ports import Message
from aioshard.settings import Settings
from aioshard.telemetry.logs import TextFormatter

T = TypeVar("T")


def settings_of(bootstrap_servers: str | None) -> Settings:
    """Return the settings of a command without an app: `AIOSHARD_*` variables and `--bootstrap-servers`.

    Raises:
        SettingsError: No brokers are set, or a variable is not valid.
    """
    settings = Settings() if bootstrap_servers is None else Settings(bootstrap_servers=bootstrap_servers)
    settings.require_bootstrap_servers()
    return settings


def open_runner() -> asyncio.Runner:
    """Return a runner for coroutines that share connections, with input of the user between them."""
    return asyncio.Runner(loop_factory=loop_factory())


def run(work: Coroutine[object, object, T]) -> T:
    """Run a command's coroutine to its end."""
    with open_runner() as runner:
        return runner.run(work)


@contextlib.contextmanager
def entered(runner: asyncio.Runner, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter an async context for several calls of *runner*."""
    yielded = runner.run(_enter(context))
    try:
        yield yielded
    finally:
        runner.run(_leave(context))


async def _enter(context: AbstractAsyncContextManager[T]) -> T:
    return await context.__aenter__()


async def _leave(context: AbstractAsyncContextManager[T]) -> None:
    await context.__aexit__(None, None, None)


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user, unless *yes*; return if the answer is yes.

    Raises:
        UsageError: Nobody can answer, because the input is not a terminal.
        Exit: The answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nothing was done, because there is no terminal to answer: give --yes")
    if not click.confirm(question, err=True):
        click.echo("Nothing was done.", err=True)
        raise click.exceptions.Exit(0)


def os_user() -> str:
    """Return the user of the operating system, for the audit log."""
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):  # a container may have no name for the user
        return f"user {os.getuid()}"


@contextlib.contextmanager
def audit_log() -> Iterator[None]:
    """Write the audit log to standard error, each line with its time: for commands that configure no logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    audit.logger.addHandler(handler)
    try:
        yield
    finally:
        audit.logger.removeHandler(handler)


async def publish(settings: Settings, messages: Iterable[Message], label: str, *, total: int | None = None) -> None:
    """Publish, wait for all acknowledgements, and show the progress under *label*; see `Publisher` and `progress`."""
    async with Publisher(settings) as publisher, progress(label, lambda: publisher.acknowledged, total=total):
        await publisher.publish(messages)
