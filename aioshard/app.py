"""The app: turns handlers, settings and a client into a running engine."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from aioshard.checks import check_assign, check_linger
from aioshard.errors import HandlerError, SettingsError, StateError
from aioshard.handlers import Handlers, Registration
from aioshard.lifecycle import Lifecycle

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["App"]

Resources = Callable[["App"], AbstractAsyncContextManager[Any]]


class App(Lifecycle):
    """A member of a consumer group with its handlers.

    Run it with `run` (blocks), `serve` (inside a running event loop), `async with app:` or, in FastAPI, with
    `lifespan=app.lifespan`. Each app runs only once at a time; you can start it again after it has stopped.

    Example:
        >>> from aioshard import App, Record
        >>> app = App("billing", bootstrap_servers="localhost:9092", auto_offset_reset="earliest")
        >>> @app.consume("orders", concurrency=256)
        ... async def on_order(record: Record) -> None: ...
        >>> [handler.name for handler in app.handlers]
        ['on_order']
    """

    def __init__(
        self,
        group_id: str,
        *,
        bootstrap_servers: str | Sequence[str] | None = None,
        settings: "Settings | None" = None,
        resources: Resources | None = None,
        **overrides: Any,
    ) -> None:
        """Create an app; nothing connects yet.

        Args:
            group_id: The consumer group.
            bootstrap_servers: `host:port`; several as a list, or separated by commas.
            settings: Used instead of `AIOSHARD_*` variables and defaults.
            resources: An async context manager that is open while handlers run; the value it yields is
                `Context.state`.
            overrides: Single settings by name; they take precedence over *settings* and the environment.

        Raises:
            SettingsError: If *group_id* is empty, or a setting is unknown, outside its range, or contradicts
                another.
        """
        super().__init__(resources)
        if not str(group_id or "").strip():
            message = f"App({group_id!r}): a group id was expected, such as App('billing')"
            raise SettingsError(message)
        self.group_id = group_id
        if bootstrap_servers is not None:
            overrides["bootstrap_servers"] = bootstrap_servers
        self._overrides = overrides
        self._given = settings
        self._settings = self._load()

    def _load(self) -> "Settings":
        from aioshard.settings import Settings  # noqa: PLC0415 - pydantic is imported on use

        if self._given is None:
            return Settings(**self._overrides)
        return self._given.replace(**self._overrides) if self._overrides else self._given

    @property
    def settings(self) -> "Settings":
        """The settings in effect."""
        return self._settings

    @property
    def handlers(self) -> tuple[Registration, ...]:
        """The registered handlers, in order."""
        return tuple(self)

    def configure(self, **overrides: Any) -> None:
        """Change settings by name before the app is started.

        Raises:
            SettingsError: As in the constructor.
            StateError: If the app is running.
        """
        if self._engine is not None:
            message = f"app {self.group_id!r} runs: its settings can be changed only before it is started"
            raise StateError(message)
        before = self._overrides
        self._overrides = {**before, **overrides}
        try:
            self._settings = self._load()
        except BaseException:
            self._overrides = before
            raise

    def check(self) -> None:
        """Reject handlers and settings that do not fit together; starting the app also calls it.

        Raises:
            HandlerError: A handler's batches wait longer than `stuck_after`.
            SettingsError: The partitions in `assign` do not match the handlers.
        """
        for handler in self:
            check_linger(handler.name, handler.batch, self._settings.stuck_after)
        check_assign(self._settings.assign, [(one.name, one.topics, one.pattern, one.on_failure) for one in self])

    def include(self, handlers: Handlers) -> None:
        """Add the handlers of another module.

        Raises:
            HandlerError: If a topic already has a handler. Nothing is added then.
            StateError: If the app is running.
        """
        before = list(self._registrations)
        try:
            for registration in handlers:
                self._add(dataclasses.replace(registration, around=(self._around, *registration.around)))
        except HandlerError:
            self._registrations = before
            raise

    def _refuse_late(self, what: str) -> None:
        if self._engine is not None:
            raise StateError(f"app {self.group_id!r} runs: {what} came too late, register it before")
