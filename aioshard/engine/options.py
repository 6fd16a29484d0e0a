"""The numbers that an engine runs with."""

from typing import TYPE_CHECKING, NamedTuple

from aioshard.engine.rebalance import Limits

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["Options", "options_of"]


class Options(NamedTuple):
    """Times in seconds, sizes in bytes; see `aioshard.settings.Settings`."""

    limits: Limits
    commit_interval: float
    start_timeout: float | None
    ready_timeout: float | None
    shutdown_timeout: float
    session_timeout: float
    fetch_max_wait: float
    stuck_after: float
    restart_when_stuck: bool
    max_buffered_records: int
    watch_loop: bool
    """Whether somebody looks from outside at whether the event loop turns."""


def options_of(settings: "Settings", group_id: str, *, watch_loop: bool) -> Options:
    """The options of an engine, out of an app's settings."""
    limits = Limits(
        group_id=group_id,
        drain_timeout=settings.drain_timeout,
        commit_timeout=settings.commit_timeout,
        auto_offset_reset=settings.auto_offset_reset,
        max_buffered_bytes=settings.max_buffered_bytes,
    )
    return Options(
        limits=limits,
        commit_interval=settings.commit_interval,
        start_timeout=settings.start_timeout,
        ready_timeout=settings.ready_timeout,
        shutdown_timeout=settings.shutdown_timeout,
        session_timeout=settings.session_timeout,
        fetch_max_wait=settings.fetch_max_wait,
        stuck_after=settings.stuck_after,
        restart_when_stuck=settings.restart_when_stuck,
        max_buffered_records=settings.max_buffered_records,
        watch_loop=watch_loop,
    )
