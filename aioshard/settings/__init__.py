"""The settings of an app; `aioshard.settings.model` lists them all."""

from aioshard.settings.model import SettingDescription, Settings, misspelled_variables, timeout_warnings

__all__ = ["SettingDescription", "Settings", "misspelled_variables", "timeout_warnings"]
