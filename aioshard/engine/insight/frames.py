"""Calls of a stack: whose they are, and what they are called; nothing here calls code of the application."""

import functools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from aioshard import records
from aioshard.observe import Frame

__all__ = ["AIOSHARD", "called_by_own", "described", "function_of", "home_of", "is_library", "is_own", "module_of"]

_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen", "uvloop")
_INSTALLED = ("site-packages", "dist-packages")
AIOSHARD = str(Path(records.__file__).parent) + os.sep
"""Where this package is, told by a module at its top: this one may move."""
_ANYIO = "anyio"
"""Stands between the engine and a handler in a thread."""


def described(frame: FrameType, home: str) -> Frame:
    """A frame in words; *home* is what `home_of` says of its stack."""
    code = frame.f_code
    return Frame(
        file=code.co_filename,
        line=frame.f_lineno or code.co_firstlineno,
        function=function_of(frame),
        own=is_own(frame, home),
    )


def function_of(frame: FrameType) -> str:
    """The qualified name of a frame's function."""
    return frame.f_code.co_qualname.replace("<locals>.", "")


def module_of(frame: FrameType) -> str:
    """The name of a frame's module."""
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else "?"


def called_by_own(frames: Sequence[FrameType], home: str) -> str | None:
    """The library's function in which the innermost frame of the application is."""
    called: FrameType | None = None
    for frame in reversed(frames):
        if is_own(frame, home):
            break
        called = frame
    return None if called is None else f"{module_of(called)}.{function_of(called)}"


def _is_installed(file: str) -> bool:
    return any(f"/{place}/" in file.replace(os.sep, "/") for place in _INSTALLED)


def is_library(frame: FrameType) -> bool:
    """Whether a frame is of the standard library, of an installed package, or of aioshard."""
    return _is_of_library(frame.f_code.co_filename)


@functools.lru_cache(maxsize=1_000)
def _is_of_library(file: str) -> bool:
    return file.startswith((*_STANDARD_LIBRARY, AIOSHARD)) or _is_installed(file)


def is_own(frame: FrameType, home: str) -> bool:
    """Whether a frame is the application's; *home* is what `home_of` says of its stack."""
    return not is_library(frame) or bool(home and frame.f_code.co_filename.startswith(home))


def home_of(frames: Sequence[FrameType]) -> str:
    """The folder of the application where all of it is installed, as a package is: that of the outermost frame."""
    if not all(is_library(frame) for frame in frames):
        return ""
    for frame in frames:
        file = frame.f_code.co_filename
        parts = Path(file).parts
        if _is_installed(file) and not file.startswith(AIOSHARD) and _ANYIO not in parts:
            place = next(n for n, part in enumerate(parts) if part in _INSTALLED)
            return str(Path(*parts[: place + 2]))
    return ""
