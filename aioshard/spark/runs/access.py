"""How a planned run reaches the brokers from where its commands run."""

from typing import TYPE_CHECKING

from aioshard.app import App
from aioshard.errors import PlanError
from aioshard.spark.runs.plan import Plan
from aioshard.spark.tasks.loading import resolve_app

if TYPE_CHECKING:
    from aioshard.settings import Settings

__all__ = ["settings_for", "settings_of"]


def settings_of(app: App, bootstrap_servers: str | None) -> "Settings":
    """The app's settings, with the brokers of a plan where it names them.

    Raises:
        SettingsError: The brokers are not known.
    """
    settings = app.settings
    if bootstrap_servers is not None:
        settings = settings.replace(bootstrap_servers=bootstrap_servers)
    settings.require_bootstrap_servers()
    return settings


def settings_for(plan: Plan) -> "Settings":
    """The settings of a planned app; those of the environment alone where its module is not on this machine.

    Raises:
        SettingsError: The brokers are not known, or a setting of the environment is refused.
    """
    from aioshard.settings import Settings  # noqa: PLC0415 - pydantic is imported on use

    try:
        app = resolve_app(plan.app)
    except PlanError:
        settings = Settings() if plan.bootstrap_servers is None else Settings(bootstrap_servers=plan.bootstrap_servers)
        settings.require_bootstrap_servers()
        return settings
    return settings_of(app, plan.bootstrap_servers)
