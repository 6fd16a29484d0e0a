"""Broker settings of a planned run on the machine that runs its commands."""

from typing import TYPE_CHECKING

from aioshard.app import App
from aioshard.errors import PlanError
from aioshard.spark.runs.plan import Plan
from aioshard.spark.tasks.loading import resolve_app

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["settings_for", "settings_of"]


def settings_of(app: App, bootstrap_servers: str | None) -> "Settings":
    """Return the app's settings, with the plan's brokers if it names any.

    Raises:
        SettingsError: The brokers are unknown.
    """
    settings = app.settings
    if bootstrap_servers is not None:
        settings = settings.replace(bootstrap_servers=bootstrap_servers)
    settings.require_bootstrap_servers()
    return settings


def settings_for(plan: Plan) -> "Settings":
    """Return the settings of a planned app, or those of the environment if this machine lacks its module.

    Raises:
        SettingsError: The brokers are unknown, or a setting of the environment is invalid.
    """
    from aioshard.settings import Settings  # noqa: PLC0415 - pydantic is imported on use

    try:
        app = resolve_app(plan.app)
    except PlanError:
        settings = Settings() if plan.bootstrap_servers is None else Settings(bootstrap_servers=plan.bootstrap_servers)
        settings.require_bootstrap_servers()
        return settings
    return settings_of(app, plan.bootstrap_servers)
