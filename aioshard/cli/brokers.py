"""Connections of commands to the brokers: settings, and publishing."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

from aioshard.cli.output import progress
from aioshard.kafka.publisher import Publisher
from aioshard.loops import loop_factory
from aioshard.ports import Message
from aioshard.settings import Settings

T = TypeVar("T")


def settings_of(bootstrap_servers: str | None) -> Settings:
    """Return the settings of a command without an app: `AIOSHARD_*` variables and `--bootstrap-servers`.

    Raises:
        SettingsError: No brokers are set, or a variable is not valid.
    """
    settings = Settings() if bootstrap_servers is None else Settings(bootstrap_servers=bootstrap_servers)
    settings.require_bootstrap_servers()
    return settings


def run(work: Coroutine[object, object, T]) -> T:
    """Run a command's coroutine to its end."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


async def publish(settings: Settings, messages: Iterable[Message], label: str, *, total: int | None = None) -> None:
    """Publish, wait for all acknowledgements, and show the progress under *label*; see `Publisher` and `progress`."""
    async with Publisher(settings) as publisher, progress(label, lambda: publisher.acknowledged, total=total):
        await publisher.publish(messages)
