"""Header names that are not UTF-8: Kafka requires UTF-8, but brokers store any bytes.

The clients decode such a name with the error handler `surrogateescape`, so that no byte is lost. A record with one
fails with a `DecodeError` before its handler sees it, whatever the handler takes.
"""

from collections.abc import Iterable

from aioshard.errors import DecodeError
from aioshard.records import Record

Headers = tuple[tuple[str, bytes | None], ...]


def is_utf8(name: str) -> bool:
    r"""Return whether a client can write a header of this name.

    Example:
        >>> is_utf8("größe"), is_utf8(b"\xff".decode("utf-8", "surrogateescape"))
        (True, False)
    """
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def undecodable(record: Record) -> DecodeError | None:
    """Return the error of a record that has a header whose name is not UTF-8; None for any other record."""
    name = next((name for name, _ in record.headers if not is_utf8(name)), None)
    if name is None:
        return None
    return DecodeError(
        f"{record.topic}/{record.partition}/{record.offset} has a header whose name is not UTF-8, as Kafka requires "
        f"({_bytes_of(name)!r}): its handler does not get it; fix the producer of the record"
    )


def undecodable_among(records: Iterable[Record]) -> dict[int, DecodeError] | None:
    """Return the errors of the records with such a header, by offset; None if no record has one."""
    errors = {record.offset: error for record in records if record.headers and (error := undecodable(record))}
    return errors or None


def escaped(headers: Headers) -> Headers:
    r"""Return headers that a client can write: bytes of a name that are not UTF-8 become `\xNN`.

    Example:
        >>> escaped(((b"a\xff".decode("utf-8", "surrogateescape"), b"1"), ("b", None)))
        (('a\\xff', b'1'), ('b', None))
    """
    if all_utf8(name for name, _ in headers):
        return headers
    return tuple((_bytes_of(name).decode("utf-8", "backslashreplace"), content) for name, content in headers)


def all_utf8(names: Iterable[str]) -> bool:
    """Return whether a client can write headers of these names."""
    return all(map(is_utf8, names))


def _bytes_of(name: str) -> bytes:
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # other surrogates do not come from a decoder
        return name.encode("utf-8", "surrogatepass")
