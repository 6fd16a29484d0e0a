"""Record keys for display: either as they are, or as a name that only distinguishes them."""

import hashlib
import os

__all__ = ["is_plain", "shown"]

_SALT = os.urandom(16)
"""Salt for hashing keys: a key has the same name throughout a process, and nobody can look it up."""


def shown(value: object, *, show_keys: bool) -> str | None:
    """Return a key for display, or a hash that distinguishes it without revealing it; None for no key.

    Args:
        value: The key of a record, or of a shard.
        show_keys: Whether to show the key as it is; it may be personal data.
    """
    if value is None:
        return None
    if not is_plain(value):
        return f"of type {type(value).__name__}"  # its repr() would run code of the application
    if show_keys:
        return repr(value)
    return f"#{hashlib.blake2s(repr(value).encode(), key=_SALT, digest_size=4).hexdigest()}"


def is_plain(value: object) -> bool:
    """Whether all methods of a value are Python's own."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in (bytes, str, int, float, bool, type(None))
