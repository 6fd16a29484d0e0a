"""Versions of packages, for who observes: in metrics, spans and the journal."""

import functools
import importlib.metadata

__all__ = ["version"]


@functools.cache  # a scrape must not read files
def version(package: str = "aioshard") -> str:
    """The version of a package; `unknown` where it is not installed, as one that runs from a source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
