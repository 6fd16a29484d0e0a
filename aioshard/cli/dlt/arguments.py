"""Options that several commands for dead letters share, and their checks."""

import logging

import click

from aioshard.app import App
from aioshard.cli.loading import load_app
from aioshard.dead_letters import audit
from aioshard.dead_letters.filters import Filters
from aioshard.telemetry import logs

again = click.option("--again", is_flag=True, help="Include those that are done already.")
transform = click.option(
    "--transform",
    metavar="MODULE:FUNCTION",
    help="Change each record: the function takes the Record, and returns the new value, or None to leave it alone.",
)
yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
log_level = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
    default="critical",
    show_default=True,
    help="Lowest level that is logged, with --app; error shows the traceback of each failure.",
)


def check_at(filters: Filters, topic: str) -> None:
    """Check that `--at` names positions in the dead-letter topic.

    Raises:
        UsageError: It does not.
    """
    for position in filters.at:
        if position.topic != topic:
            raise click.UsageError(f"--at {position} is not in {topic}: it takes positions in the dead-letter topic")


def load_configured_app(target: str, app_dir: str, bootstrap_servers: str | None) -> App:
    """Load an app, and let `--bootstrap-servers` override its brokers."""
    app = load_app(target, app_dir)
    if bootstrap_servers is not None:
        app.configure(bootstrap_servers=bootstrap_servers)
    return app


def app_to_run(target: str, app_dir: str, bootstrap_servers: str | None, log_level: str, filters: Filters) -> App:
    """Load an app whose handlers are to run, and configure logging.

    Raises:
        SettingsError: It has no brokers.
        UsageError: The filters select another group than its own.
    """
    logs.configure(log_level)
    audit.logger.setLevel(logging.WARNING)
    app = load_configured_app(target, app_dir, bootstrap_servers)
    app.settings.require_bootstrap_servers()
    if filters.group not in {None, app.group_id}:
        raise click.UsageError(
            f"--group {filters.group} was given, but the handlers of --app {target} belong to {app.group_id!r}"
        )
    return app
