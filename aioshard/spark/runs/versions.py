"""Versions of the code that a run was planned with, for comparison with the code on other machines."""

import hashlib
import inspect
import platform
import re
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from aioshard import __version__
from aioshard.app import App
from aioshard.core.recourse import DeadLetter, OnFailure, Park
from aioshard.handlers import Registration

__all__ = ["app_version", "on_failure_text", "versions_of"]

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_OPTIONS = (
    *("name", "topics", "pattern", "shard_by", "shards", "concurrency", "adaptive", "retry", "timeout", "on_failure"),
    *("batch", "rate_limit", "key_rate_limit", "takes_context", "is_async", "decode", "around"),
)


def versions_of(app: App) -> dict[str, str]:
    """Return the versions that a plan records: `aioshard`, `python`, `app`."""
    return {"aioshard": __version__, "python": platform.python_version(), "app": app_version(app)}


def app_version(app: App) -> str:
    """Return a digest of an app's handlers, their options and the source of their modules.

    The same code gives the same digest on every machine. Settings and modules that the handlers import are not part
    of it.
    """
    digest = hashlib.sha256()
    modules = set()
    for handler in app.handlers:
        options = {name: _told(getattr(handler, name)) for name in _OPTIONS}
        digest.update(repr(sorted(options.items())).encode())
        function = _function_of(handler)
        if _source_of(function.__module__) is None:
            digest.update(_code_of(function))
        modules.add(function.__module__)
    for name in sorted(modules):
        digest.update((_source_of(name) or "").encode())
    return f"sha256:{digest.hexdigest()}"


def on_failure_text(policy: OnFailure) -> str:
    """Describe what happens to a record once its retries are exhausted, in the words of a plan.

    Example:
        >>> on_failure_text("halt"), on_failure_text(DeadLetter("orders.dlt"))
        ('halt', 'dead-letter:orders.dlt')
    """
    match policy:
        case DeadLetter(topic):
            return f"dead-letter:{topic}"
        case Park(topic):
            return f"park:{topic}"
        case _:
            return policy


def _function_of(handler: Registration) -> Callable[..., Any]:
    function = inspect.unwrap(handler.function)
    function = getattr(function, "func", function)  # functools.partial
    return function if inspect.isroutine(function) else type(function).__call__


def _source_of(module: str) -> str | None:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return None


def _told(value: object) -> str:
    """Return text that does not depend on memory addresses."""
    if inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))


def _code_of(function: Callable[..., Any]) -> bytes:
    """Return the bytecode of a function whose module has no source; names of files and lines are left out."""
    code = getattr(function, "__code__", None)
    return _code(code) if isinstance(code, CodeType) else _told(function).encode()


def _code(code: CodeType) -> bytes:
    constants = [_code(one) if isinstance(one, CodeType) else _told(one).encode() for one in code.co_consts]
    return b"\0".join([code.co_code, repr(code.co_names).encode(), *constants])
