"""Load the app or the function that an argument of the command line names, or explain why there is none."""

import importlib
import itertools
import operator
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click

from aioshard.app import App
from aioshard.errors import AioshardError, SettingsError


def load_app(target: str, directory: str = ".") -> App:
    """Import the app that *target* names.

    Args:
        target: `package.module:attribute`; the attribute may have dots.
        directory: Directory to search for modules first; it is added to the front of `sys.path`.

    Raises:
        UsageError: The module or the attribute does not exist, or the attribute is not an app.
        AioshardError: The definition of the app is refused; the message begins with the line.
        ClickException: The module raised another error.
    """
    name, _, attribute = target.partition(":")
    if name.endswith(".py") or "/" in name:
        module_name = name.removesuffix(".py").strip("./").replace("/", ".")
        raise click.UsageError(f"{target!r} names a file; use its module: {module_name}:{attribute or 'app'}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise click.UsageError(f"{target!r} is not MODULE:APP, such as shop.billing:app")
    sys.path.insert(0, str(Path(directory).resolve()))
    module = _import(name, directory)
    if not attribute:
        raise click.UsageError(f"{target!r} names a module but no app in it: {_apps(module)}")
    try:
        app = operator.attrgetter(attribute)(module)
    except AttributeError:
        raise click.UsageError(f"module {name!r} has no attribute {attribute!r}: {_apps(module)}") from None
    if not isinstance(app, App):
        raise click.UsageError(f"{target!r} is a {type(app).__name__}, not an aioshard.App: {_apps(module)}")
    return app


def load_function(target: str, directory: str = ".") -> Callable[..., Any]:
    """Import the function that *target* names.

    Args:
        target: `package.module:function`.
        directory: As for `load_app`.

    Raises:
        UsageError: The module or the function does not exist, or cannot be called.
        ClickException: The module raised an error.
    """
    name, _, attribute = target.partition(":")
    if not attribute or not all(part.isidentifier() for part in name.split(".")):
        raise click.UsageError(f"{target!r} is not MODULE:FUNCTION, such as shop.fixes:add_currency")
    sys.path.insert(0, str(Path(directory).resolve()))
    module = _import(name, directory)
    try:
        function = operator.attrgetter(attribute)(module)
    except AttributeError:
        raise click.UsageError(f"module {name!r} has no attribute {attribute!r}") from None
    if not callable(function):
        raise click.UsageError(f"{target!r} is of type {type(function).__name__}, not a function")
    return cast("Callable[..., Any]", function)


def _import(name: str, directory: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another name: the module exists, but imports one that does not. The traceback says where.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error
        raise click.UsageError(
            f"module {error.name!r} not found: searched {Path(directory).resolve()} and the installed packages; "
            "--app-dir adds a directory"
        ) from None
    except AioshardError as error:
        error.args = (f"{_location_of(error)}{error}",)
        raise
    except Exception as error:
        if "App.__init__()" in str(error):
            raise SettingsError(
                f"{_location_of(error)}App() takes one group id, and settings by name: write App('billing') or "
                "App('billing', bootstrap_servers='localhost:9092')"
            ) from None
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> click.ClickException:
    """Print the traceback after our own code; return the error to raise."""
    report = traceback.TracebackException.from_exception(error)
    report.stack = traceback.StackSummary.from_list(_user_frames(error))
    click.echo("".join(report.format()), err=True)
    return click.ClickException(f"module {name!r} failed during its import: {type(error).__name__}: {error}")


def _apps(module: ModuleType) -> str:
    """Name the apps of a module, as advice."""
    apps = [f"{module.__name__}:{name}" for name, value in vars(module).items() if isinstance(value, App)]
    return f"its apps are {', '.join(apps)}" if apps else "it has no app; create one with App('group id')"


def _location_of(error: Exception) -> str:
    """Return `file:line: ` of the user's code that called us with the refused values; empty if there is none."""
    users = [*itertools.takewhile(lambda frame: not _is_ours(frame), _user_frames(error))]
    if users:
        return f"{users[-1].filename}:{users[-1].lineno}: "
    return ""


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the traceback, starting in the imported module."""
    frames = traceback.extract_tb(error.__traceback__)
    return [*itertools.dropwhile(lambda frame: _is_ours(frame) or "importlib" in frame.filename, frames)]


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(Path(__file__).parents[1])
