"""Read the headers of confluent-kafka's messages, whose binding can crash the process.

For a header name that is not UTF-8, the binding (2.16) returns a list with a hole in place of the name, and leaves the
decoding error pending. The interpreter's fast calls do not look for it, and the process dies when it reads the hole.
Calls through `map` are checked: the first one for such a message raises `SystemError`. Later ones return the list.
"""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

_UNKNOWN = "\ufffd"


class HeadersOf(NamedTuple):
    """The headers of several messages."""

    headers: list[Any]
    """A sequence of pairs for each message; None for one without headers."""
    misnamed: bool
    """Whether a name is not UTF-8. It is decoded with `surrogateescape`; the binding reveals only the first such name
    of a message, and the others are U+FFFD."""


def headers_of(messages: Sequence[Any]) -> HeadersOf:
    """Return the headers of messages, in order."""
    if not messages:
        return HeadersOf([], misnamed=False)
    headers: list[Any] = []
    misnamed = False
    calls = map(type(messages[0]).headers, messages)
    while len(headers) < len(messages):
        try:
            headers.extend(calls)
        except SystemError as error:  # the calls before it are in the list, and `calls` continues after it
            misnamed = True
            (with_holes,) = map(type(messages[0]).headers, [messages[len(headers)]])
            headers.append(_filled(with_holes, _name_in(error)))
    return HeadersOf(headers, misnamed)


def _filled(with_holes: Sequence[tuple[str, bytes | None]], first: str) -> list[tuple[str, bytes | None]]:
    """Return headers with *first* as the name in the first hole."""
    headers = []
    missing = first
    for pair in with_holes:
        # The garbage collector's view of a tuple leaves out holes; any other access to one crashes.
        name = next((part for part in gc.get_referents(pair) if isinstance(part, str)), None)
        if name is None:
            name = missing
            missing = _UNKNOWN
        headers.append((name, pair[1]))
    return headers


def _name_in(error: BaseException) -> str:
    """Return the name that could not be decoded, from the chain of errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnicodeDecodeError):
            return bytes(cause.object).decode("utf-8", "surrogateescape")
        cause = cause.__cause__ or cause.__context__
    raise error  # the binding failed for another reason
