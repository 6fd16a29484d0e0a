"""Instructions for the tasks of a job, and the app and settings that they resolve to on a machine."""

import asyncio
import concurrent.futures
import contextlib
import os
import pkgutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aioshard.app import App
from aioshard.core.options import Park
from aioshard.engine.handler import Handler
from aioshard.errors import PlanError
from aioshard.records import TOPIC_NAME
from aioshard.schema_registry.formats import RegistryFormat
from aioshard.spark.plans import DEAD_LETTER, Plan, app_version

if TYPE_CHECKING:
    from aioshard.settings import Settings


T = TypeVar("T")


class Work(NamedTuple):
    """Instructions that every task of a job receives; they are serialized and contain no secrets."""

    app: str
    """`MODULE:APP`, or empty for a read without an app."""
    version: str | None = None
    """The driver's version of the app; a task with another version fails. None accepts any."""
    module_paths: tuple[str, ...] = ()
    """The driver's module directories; a task searches those that exist on its machine."""
    settings: Mapping[str, Any] = {}
    """Settings of the plan; all others come from the task's environment and the app's own code."""
    on_failure: str | None = None
    """Replaces the handlers' own policies: `skip` or `dead-letter:TOPIC`."""
    total_concurrency: int | None = None
    """Maximum number of concurrent handler calls in the whole job."""
    at_once: int = 1
    """Number of tasks that run in parallel; they share the total concurrency and the rate limits."""
    halted_rows: bool = False
    """If true, a halted record becomes a row and the task succeeds; otherwise it is an error.

    Spark tries a failed task four times, with all its records. So a planned run lets the task succeed, drops the batch
    and names the record."""
    topics: tuple[str, ...] | None = None
    """Topics of a task, or None if records of any topic may arrive."""

    def load(self) -> App:
        """Return the app on the machine of a task.

        Raises:
            PlanError: The app cannot be imported here, or its code differs from the driver's.
        """
        app = resolve_app(self.app, self.module_paths)
        if self.version not in {None, app_version(app)}:
            raise PlanError(
                f"{self.app} on {socket.gethostname()} differs from the driver's: ship the same code and the same "
                "version of aioshard to both"
            )
        return app

    def connection(self) -> "Settings":
        """Return the settings for a read without handlers: those of the app, in the environment of the reader."""
        from aioshard.settings import Settings  # noqa: PLC0415 - pydantic is imported on use

        if self.app:
            return self.load().settings.replace(**self.settings)
        return Settings(**self.settings)

    def concurrency_of(self, handlers: Iterable[Handler]) -> int | None:
        """Return how many runs of each handler a task may have in parallel, or None without a total.

        Args:
            handlers: The handlers of the app. Those that the task has records for divide the task's share equally.
        """
        if self.total_concurrency is None:
            return None
        serving = sum(self.topics is None or any(map(handler.takes, self.topics)) for handler in handlers)
        return max(self.total_concurrency // (self.at_once * max(serving, 1)), 1)


def check_handlers(app: App, on_failure: str | None, total_concurrency: int | None) -> None:
    """Refuse handlers and options that a backfill does not support.

    Args:
        app: The app whose handlers are checked.
        on_failure: Replaces the handlers' own policies.
        total_concurrency: Maximum number of concurrent handler calls in the whole job.

    Raises:
        PlanError: The app has no handlers, *on_failure* is unknown, a handler parks, or fixed shards, each of which is
            a worker in every task, cannot meet the total concurrency.
    """
    if not app.handlers:
        raise PlanError(f"the app of group {app.group_id!r} has no handlers: decorate a function with @app.consume(…)")
    if on_failure is not None and on_failure != "skip":
        topic = on_failure.removeprefix(DEAD_LETTER)
        if topic == on_failure or not TOPIC_NAME.fullmatch(topic):
            raise PlanError(f"on_failure={on_failure!r}: expected 'skip' or 'dead-letter:TOPIC'")
    for handler in app.handlers:
        if on_failure is None and isinstance(handler.on_failure, Park):
            raise PlanError(
                f"handler {handler.name!r} parks its failed records, and a backfill does not retry parked records: "
                "use on_failure='dead-letter:TOPIC' or 'skip'"
            )
        if total_concurrency is not None and handler.shards is not None:
            raise PlanError(
                f"total_concurrency={total_concurrency} does not work with shards={handler.shards} of handler "
                f"{handler.name!r}, because every task has a worker for each fixed shard: leave it out, or give the "
                "handler concurrency= instead"
            )


def module_paths() -> tuple[str, ...]:
    """Return the driver's directories of modules that are not installed; tasks of a local master can use them too."""
    installed = tuple(set(sysconfig.get_paths().values()))
    paths = (str(Path(path).resolve()) for path in ("", *sys.path))
    return tuple(dict.fromkeys(path for path in paths if Path(path).is_dir() and not path.startswith(installed)))


def resolve_app(target: str, module_paths: Sequence[str] = ()) -> App:
    """Return the app that *target* names; its module is imported once per process.

    Args:
        target: `package.module:attribute`.
        module_paths: Additional directories to search for modules; those that do not exist here are ignored.

    Raises:
        PlanError: The module cannot be imported on this machine, or does not have the app.
    """
    for path in module_paths:
        if path not in sys.path and os.path.isdir(path):  # noqa: PTH112 - `sys.path` contains strings
            sys.path.append(path)
    try:
        app = pkgutil.resolve_name(target if ":" in target else f"{target}:app")
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"{target!r} cannot be imported on {socket.gethostname()} ({error}): expected MODULE:APP; install the "
            "module, or ship it to Spark's tasks with spark.submit.pyFiles (a wheel, a zip or a file)"
        ) from error
    if not isinstance(app, App):
        raise PlanError(f"{target!r} is of type {type(app).__name__}, expected an aioshard.App")
    return app


def settings_of(app: App | None, bootstrap_servers: str | None) -> "Settings":
    """Return the app's settings, or those of the environment without an app, with the plan's brokers if it names any.

    Raises:
        SettingsError: The brokers are unknown, or a setting of the environment is invalid.
    """
    from aioshard.settings import Settings  # noqa: PLC0415 - pydantic is imported on use

    settings = Settings() if app is None else app.settings
    if bootstrap_servers is not None:
        settings = settings.replace(bootstrap_servers=bootstrap_servers)
    settings.require_bootstrap_servers()
    return settings


def settings_for(plan: Plan) -> "Settings":
    """Return the settings of a planned app, or those of the environment if this machine lacks its module.

    Raises:
        SettingsError: The brokers are unknown, or a setting of the environment is invalid.
    """
    app = None
    with contextlib.suppress(PlanError):
        app = resolve_app(plan.app)
    return settings_of(app, plan.bootstrap_servers)


def formats_for(plan: Plan) -> dict[str, RegistryFormat]:
    """Return the formats of the planned handlers that take values with a schema registry, by handler.

    Empty if this machine lacks the module of the app.
    """
    with contextlib.suppress(PlanError):
        handlers = resolve_app(plan.app).handlers
        return {handler.name: handler.taken.format for handler in handlers if handler.taken is not None}
    return {}


def blocking(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to completion in a new event loop on a separate thread.

    Args:
        make: Creates the coroutine.

    Example:
        >>> async def answer() -> int:
        ...     return 42
        >>> blocking(answer)
        42
    """
    with concurrent.futures.ThreadPoolExecutor(1, "aioshard blocking") as pool:
        return pool.submit(lambda: asyncio.run(make())).result()
