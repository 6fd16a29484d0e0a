"""The public names of the package: `__all__`, members of these classes, and every exception."""

import inspect
from collections.abc import Iterator
from types import ModuleType

import aioshard
from aioshard import errors, spark, testing, web

MODULES: tuple[ModuleType, ...] = (aioshard, testing, spark, web)
INTERNAL = {
    "aioshard.App.run_in_loop": "for the dashboard, which may run in another event loop",
    "aioshard.App.running_engine": "for parts of the package that run handlers in another way",
    "aioshard.App.serve_until_signal": "for the command line, which has its own signal handlers",
    "aioshard.App.traced_by": "for aioshard.telemetry.tracing.trace",
}
"""Members without an underscore that the reference leaves out, and why."""
_ELSEWHERE = ("aioshard.Settings.", "aioshard.testing.VirtualTimeLoop.")
"""Members that are another library's, or have a table of their own."""


def public_names() -> set[str]:
    """Dotted names that the reference has to list."""
    names = exported()
    for name in tuple(names):
        names |= {f"{name}.{member}" for member in _members(_found(name))}
    return {name for name in names - INTERNAL.keys() if not name.startswith(_ELSEWHERE)} | exceptions()


def exported() -> set[str]:
    """Return the names in `__all__` of the modules; an exception belongs to the module that defines it."""
    names = {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__ if name != "__version__"}
    return {name for name in names if f"aioshard.errors.{name.rpartition('.')[2]}" not in exceptions()}


def exceptions() -> set[str]:
    """Every exception of the package."""
    return {
        f"aioshard.errors.{name}"
        for name, found in vars(errors).items()
        if inspect.isclass(found) and issubclass(found, Exception) and found.__module__ == errors.__name__
        if not name.startswith("_")
    }


def _found(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(next(each for each in MODULES if each.__name__ == module), attribute)


def _members(found: object) -> Iterator[str]:
    """Methods and properties of a class; those of every exception are not ours."""
    if not inspect.isclass(found):
        return
    for name in dir(found):
        if not name.startswith("_") and not any(hasattr(base, name) for base in (BaseException, tuple)):
            member = inspect.getattr_static(found, name)
            if isinstance(member, property) or inspect.isroutine(member):
                yield name
