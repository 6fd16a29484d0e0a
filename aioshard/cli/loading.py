"""`MODULE:APP` on the command line becomes the app, or a sentence about what was found instead."""

import difflib
import importlib
import pkgutil
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO

import click

from aioshard.app import App
from aioshard.errors import AioshardError, HandlerError
from aioshard.handlers import Handlers
from aioshard.settings import misspelled_variables, timeout_warnings

__all__ = ["AppImportError", "AppTargetError", "load_app", "load_app_with_handlers", "surprises"]

_PACKAGE = Path(__file__).parents[1]


class AppTargetError(click.UsageError):
    """`MODULE:APP` leads to no app."""


class AppImportError(click.ClickException):
    """The module is there and fails as it is imported; shown with its traceback, without ours."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"module {name!r} failed as it was imported: {type(error).__name__}: {error}")
        self._traceback = "".join(traceback.format_exception(type(error), error, _trimmed(error)))

    def show(self, file: IO[str] | None = None) -> None:
        """Print the traceback and the sentence to standard error."""
        click.echo(self._traceback, file=file, err=True)
        super().show(file)


def load_app_with_handlers(target: str, directory: str = ".") -> App:
    """As `load_app`.

    Raises:
        HandlerError: The app has none; also what `load_app` raises.
    """
    app = load_app(target, directory)
    if not app.handlers:
        raise HandlerError(f"app {target!r} has no handlers: decorate a function with @app.consume('topic')")
    return app


def load_app(target: str, directory: str = ".") -> App:
    """The app that *target* names.

    Args:
        target: `package.module:attribute`, where the attribute may have dots.
        directory: Where modules are looked for first; it comes to stand at the front of `sys.path`.

    Raises:
        AppTargetError: Module or attribute do not exist, or the attribute is no app.
        AioshardError: The module was refused as it defines its app; the message begins with the line.
        AppImportError: The module raised anything else.
    """
    name, _, attribute = target.partition(":")
    if name.endswith(".py") or "/" in name:
        module_name = name.removesuffix(".py").strip("./").replace("/", ".")
        raise AppTargetError(f"{target!r} names a file; write its module: {module_name}:{attribute or 'app'}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise AppTargetError(f"{target!r} was found, MODULE:APP was expected, such as shop.billing:app")
    sys.path.insert(0, str(Path(directory).resolve()))
    module = _import(name, directory)
    if not attribute:
        raise AppTargetError(f"{target!r} names a module but no app in it: {_which(module)}")
    try:
        found = pkgutil.resolve_name(target)
    except AttributeError:
        raise AppTargetError(f"module {name!r} has no attribute {attribute!r}: {_which(module, attribute)}") from None
    except ValueError:
        raise AppTargetError(f"{target!r} was found, MODULE:APP was expected, such as shop.billing:app") from None
    if not isinstance(found, App):
        raise AppTargetError(f"{target!r} is {_kind(found)}, not an aioshard.App: {_which(module)}")
    return found


def surprises(app: App) -> list[str]:
    """Sentences about what works, but not as the numbers or the environment suggest."""
    timeouts = [(handler.name, handler.timeout) for handler in app.handlers]
    return [*timeout_warnings(app.settings, timeouts), *misspelled_variables()]


def _import(name: str, directory: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Otherwise the module is there, and something that it imports is not: the traceback says where.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise AppImportError(name, error) from error
        raise AppTargetError(_missing(name, error.name, directory)) from None
    except AioshardError as error:
        place = _place_of(error)
        if place is not None:
            error.args = (f"{place}: {error}",)
        raise
    except Exception as error:
        raise AppImportError(name, error) from error


def _missing(name: str, absent: str, directory: str) -> str:
    parent = absent.rpartition(".")[0]
    if parent:
        path = getattr(sys.modules.get(parent), "__path__", None)
        if path is None:
            return f"there is no module {name!r}: {parent!r} is a module, not a package"
        names = [module.name for module in pkgutil.iter_modules(path, f"{parent}.")]
        where = f"package {parent!r}"
    else:
        names = [module.name for module in pkgutil.iter_modules([str(Path(directory).resolve())])]
        where = f"{Path(directory).resolve()} or among the installed packages; --app-dir says where to look"
    close = difflib.get_close_matches(absent, names, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"there is no module {absent!r}: {meant}looked for in {where}"


def _which(module: ModuleType, wanted: str = "") -> str:
    """The apps of a module, as advice."""
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    close = difflib.get_close_matches(wanted, apps, n=1)
    if close:
        return f"did you mean {module.__name__}:{close[0]}?"
    if apps:
        return f"its apps are {', '.join(f'{module.__name__}:{name}' for name in apps)}"
    return "it has no app; make one with App('group id')"


def _kind(found: object) -> str:
    if isinstance(found, Handlers):
        return "a set of handlers, which an app takes over with app.include()"
    if isinstance(found, type):
        return f"the class {found.__name__}"
    if callable(found) and hasattr(found, "__name__"):
        return f"the function {found.__name__}"
    return f"of type {type(found).__name__}"


def _place_of(error: AioshardError) -> str | None:
    """`file:line` of the user's code that called us with what was refused."""
    before: traceback.FrameSummary | None = None
    for frame in traceback.extract_tb(_trimmed(error)):
        if before is not None and _is_ours(frame.filename):
            return f"{before.filename}:{before.lineno}"
        before = frame
    return None


def _trimmed(error: BaseException) -> TracebackType | None:
    """The traceback from the first line of the imported module on."""
    trace = error.__traceback__
    while trace is not None and (_is_ours(name := trace.tb_frame.f_code.co_filename) or _is_import_system(name)):
        trace = trace.tb_next
    return trace


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(_PACKAGE)


def _is_import_system(filename: str) -> bool:
    return filename.startswith("<frozen importlib") or filename == importlib.__file__
