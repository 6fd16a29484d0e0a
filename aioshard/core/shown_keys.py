"""Keys of records as they are shown: as they are, or by a name that tells them apart and nothing else."""

import hashlib
import os

__all__ = ["is_plain", "shown"]

_SALT = os.urandom(16)
"""Keys are hashed with it: the same key has the same name in one process, and nobody can look it up."""


def shown(value: object, *, show_keys: bool) -> str | None:
    """A key, or what tells it from others without showing it; None for no key.

    Args:
        value: The key of a record, or of a shard.
        show_keys: Whether it may be shown as it is; it may be personal data.
    """
    if value is None:
        return None
    if not is_plain(value):
        return f"of type {type(value).__name__}"  # its repr() is code of the application
    if show_keys:
        return repr(value)
    return f"#{hashlib.blake2s(repr(value).encode(), key=_SALT, digest_size=4).hexdigest()}"


def is_plain(value: object) -> bool:
    """Whether a value's methods are Python's own."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in (bytes, str, int, float, bool, type(None))
