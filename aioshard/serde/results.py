"""Encode the result of a handler as bytes, for outcome rows and the journal."""

__all__ = ["encoded_result"]


def encoded_result(result: object) -> bytes | None:
    """Encode the result of a handler for storage.

    Args:
        result: None stays None, bytes stay as they are, and anything else becomes JSON: models, dataclasses, dates
            and numbers in pydantic's format, and unsupported objects as their `repr`.

    Example:
        >>> encoded_result(None), encoded_result(b"raw"), encoded_result({"paid": True})
        (None, b'raw', b'{"paid":true}')
    """
    if result is None or isinstance(result, bytes):
        return result
    from pydantic_core import to_json  # noqa: PLC0415 - pydantic is imported on use

    try:
        return to_json(result, fallback=repr)
    except ValueError:  # for example an object that contains itself
        return to_json(_shown(result))


def _shown(result: object) -> str:
    try:
        return repr(result)
    except Exception as error:  # noqa: BLE001 - the user's own method
        return f"a {type(result).__name__} that cannot be shown ({type(error).__name__})"
