"""Describe decoding errors without the value: it may be personal, and messages go to logs and dead letters."""

import re
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

__all__ = ["fault", "raised_in"]

_MOST = 3
"""Maximum number of faults reported per value."""
_OF_MSGSPEC = re.compile(r"(Invalid (?:enum )?value) .*?( - at `\$[^`]*`)?", re.DOTALL)
"""Matches messages in which msgspec repeats the value."""


def fault(error: Exception, value: bytes | None = None) -> str:
    r"""Describe a decoder's error without the decoded value; empty for an unknown error.

    The message contains names of fields and keys, and the text of a `ValueError` raised by a user's own validator.

    Args:
        error: The error that the decoder raised.
        value: The decoder's input, if known.

    Example:
        >>> fault(UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte"), b"ab\xff")
        'it is not UTF-8 from byte 2 on'
        >>> fault(LookupError("no schema 7"))
        ''
    """
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 from byte {error.start} on" if error.object == value else "a text in it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    pydantic, msgspec = sys.modules.get("pydantic_core"), sys.modules.get("msgspec")
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        found = error.errors(include_url=False, include_input=False)
        first = "; ".join(map(_told, found[:_MOST]))
        return f"{first}; and {len(found) - _MOST} more" if len(found) > _MOST else first
    if msgspec is not None and isinstance(error, msgspec.DecodeError):
        said = str(error)
        repeats = _OF_MSGSPEC.fullmatch(said)
        return said if repeats is None else "".join(part or "" for part in repeats.groups())
    return ""


def _told(one: Mapping[str, Any]) -> str:
    """Format one fault reported by pydantic."""
    said, of = one["msg"], one.get("ctx", {})
    if one["type"] == "union_tag_invalid":
        said = f"Input should have one of the tags {of['expected_tags']} in {of['discriminator']}"
    elif one["type"] == "uuid_parsing":
        said = "Input should be a valid UUID"
    return f"{'.'.join(map(str, one['loc']))}: {said}".removeprefix(": ")


def raised_in(error: BaseException) -> str:
    """Describe an exception by its type and place only, because its message may contain the value.

    Example:
        >>> try:
        ...     {}["secret"]
        ... except KeyError as error:
        ...     print(raised_in(error).partition(",")[0])
        KeyError was raised
    """
    name, trace = type(error).__name__, error.__traceback__
    if trace is None:
        return f"{name} was raised"
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{name} was raised, by {code.co_name}() in {PurePath(code.co_filename).name}, line {trace.tb_lineno}"
