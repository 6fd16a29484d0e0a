"""Resolve `MODULE:APP` to the app, in Spark's workers as well as on the driver."""

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

from aioshard.app import App
from aioshard.errors import PlanError

__all__ = ["resolve_app"]


def resolve_app(target: str, places: Sequence[str] = ()) -> App:
    """Return the app that *target* names; its module is imported once per process.

    Args:
        target: `package.module:attribute`.
        places: Additional directories to search for modules; those that do not exist here are ignored.

    Raises:
        PlanError: This machine does not have the module, or the module does not have the app.
    """
    for place in places:
        if place not in sys.path and os.path.isdir(place):  # noqa: PTH112 - `sys.path` contains strings
            sys.path.append(place)
    name, _, attribute = target.partition(":")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise PlanError(
            f"there is no module {error.name!r} where the tasks of Spark run: install it there, or ship it with "
            "spark.submit.pyFiles (a wheel, a zip or a file)"
        ) from None
    try:
        found = pkgutil.resolve_name(f"{name}:{attribute or 'app'}")
    except (AttributeError, ValueError):
        raise PlanError(f"{target!r} was found, MODULE:APP was expected: module {name!r} has no such app") from None
    if not isinstance(found, App):
        raise PlanError(f"{target!r} is of type {type(found).__name__}, an aioshard.App was expected")
    return found
