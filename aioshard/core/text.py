"""Text that comes from users' code and records, made safe to show: it can always be encoded, and never raises."""

import base64
from typing import Any


def encodable(text: str) -> str:
    r"""Return *text* with lone surrogates escaped: no output in UTF-8 can contain them.

    File names that are not UTF-8 have lone surrogates, and so may text from JSON.

    Example:
        >>> print(encodable("cannot open caf\udce9.txt"))
        cannot open caf\udce9.txt
        >>> encodable("café")
        'café'
    """
    return str.encode(text, "utf-8", "backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """Return the message of an exception, ready for any output, even if the exception fails to produce one."""
    try:
        return encodable(str(error))
    except Exception as failure:  # noqa: BLE001 - the user's own method
        return f"its message cannot be shown ({type(failure).__name__})"


def as_text(text: str) -> str:
    """Return *text* on one line with unprintable characters escaped: a record must not control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def bytes_as_text(content: bytes | None) -> str:
    """Return a key or value as text: as it is if it is UTF-8, otherwise in hexadecimal after `0x`; `-` for null."""
    if content is None:
        return "-"
    try:
        return as_text(content.decode())
    except UnicodeDecodeError:
        return f"0x{content.hex()}"


def as_json_value(content: bytes | None) -> Any:
    """Return a key or value for JSON: a string if it is UTF-8, otherwise `{"base64": "…"}`."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
