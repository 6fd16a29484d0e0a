"""What `aioshard run` was asked for: the options, the app that they lead to, and how to ask another process for it."""

import dataclasses
import os

import click

from aioshard.app import App
from aioshard.cli.loading import load_app
from aioshard.cli.web import Page, warn_of_readers
from aioshard.telemetry import logs

__all__ = ["WORKER_VARIABLE", "RunOptions"]

WORKER_VARIABLE = "AIOSHARD_WORKER"
"""Environment variable with the number of a worker, from 0; only workers have it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of `aioshard run`, by their names."""

    target: str
    bootstrap_servers: str | None
    assign: str | None
    until_caught_up: bool
    workers: int | None
    reload: bool
    reload_dirs: tuple[str, ...]
    health_port: int | None
    host: str
    web: bool
    token_file: str | None
    log_level: str
    log_format: logs.LogFormat
    log_config: str | None
    tracing: bool
    app_dir: str
    as_json: bool
    tether: int | None
    """Number of the socket to the process that started this one."""
    health_socket: str | None
    """Path at which the health server listens instead of a port."""

    def __post_init__(self) -> None:
        """Refuse what does not go together.

        Raises:
            UsageError: Something does not.
        """
        if self.reload and self.workers is not None:
            raise click.UsageError(
                "--reload and --workers were given: --reload is for development, with one process; leave one out"
            )
        if self.reload_dirs and not self.reload:
            raise click.UsageError("--reload-dir was given without --reload: it says what is watched for a reload")
        if self.token_file is not None and not self.web:
            raise click.UsageError("--token-file was given without --web: it is for the actions of that page")
        if (self.reload or self.workers is not None) and os.name == "nt":
            raise click.UsageError("--reload and --workers need Unix sockets between processes, which Windows lacks")

    def app(self) -> App:
        """The app with what the options set, in this worker's own form where this is one.

        Raises:
            UsageError: There is no such app, or its partitions cannot be shared.
            AioshardError: Its definition or its settings were refused.
        """
        app = load_app(self.target, self.app_dir)
        given = {"bootstrap_servers": self.bootstrap_servers, "assign": self.assign}
        number, instance = os.environ.get(WORKER_VARIABLE), app.settings.group_instance_id
        if self.tether is not None and number is not None and instance is not None:
            given["group_instance_id"] = f"{instance}-{number}"  # a static member's id is one process's alone
        if given := {name: value for name, value in given.items() if value is not None}:
            app.configure(**given)
        if self.tracing and not app.is_traced:
            from aioshard.telemetry.tracing import trace, warn_of_no_provider  # noqa: PLC0415 - needs the extra `otel`

            trace(app)
            warn_of_no_provider()
        if self.workers is not None and app.settings.assign is not None:
            raise click.UsageError(
                "--workers was given for an app whose partitions are given by hand (assign): each worker would read "
                "them all; run one process for each part of the partitions, or leave assign out"
            )
        return app

    def page(self) -> Page | None:
        """The page that is to be served; None without `--web`.

        Raises:
            UsageError: The file with its token cannot be read.
        """
        if not self.web:
            return None
        page = Page.of(self.token_file)
        # Of several processes the supervisor says it.
        if self.token_file is not None and os.environ.get(WORKER_VARIABLE) is None:
            warn_of_readers(self.token_file)
        return page

    @property
    def answers(self) -> bool:
        """Whether anybody may ask over HTTP."""
        return self.health_port is not None or self.web

    def arguments(self) -> list[str]:
        """Of `aioshard run` in a process that runs the app for this one."""
        given = {
            "--bootstrap-servers": self.bootstrap_servers,
            "--assign": self.assign,
            "--log-level": self.log_level,
            "--log-format": self.log_format,
            "--log-config": self.log_config,
            "--app-dir": self.app_dir,
            "--token-file": self.token_file,
        }
        options = [text for name, value in given.items() if value is not None for text in (name, value)]
        flags = {"--until-caught-up": self.until_caught_up, "--web": self.web, "--tracing": self.tracing}
        return [self.target, *options, *(name for name, given in flags.items() if given)]
