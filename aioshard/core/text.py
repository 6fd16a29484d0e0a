"""Text that comes from users' code, made safe to show: it can always be encoded, and never raises."""


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
