"""Package versions, reported in metrics, spans and the journal."""

import functools
import importlib.metadata


@functools.cache  # a scrape must not read files
def version(package: str = "aioshard") -> str:
    """Return the version of a package, or `unknown` if it is not installed, such as in a source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
