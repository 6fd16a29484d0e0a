"""Decodes dead letters as their handlers do, to show why a handler cannot."""

import contextlib
import inspect
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aioshard.app import App
from aioshard.core.text import as_json_value, message_of
from aioshard.dead_letters.dead_letter import StoredDeadLetter
from aioshard.engine.handler import Handler
from aioshard.errors import DecodeError, MessageError, RegistryUnavailableError
from aioshard.records import Record
from aioshard.schema_registry.framing import SchemaId
from aioshard.schema_registry.registries import Reader, Registries, RegistryInput
from aioshard.serde.payloads import Fault, encoded, encoded_result, faults_of, shown


class Decoded(NamedTuple):
    """A dead letter as its handler sees it."""

    handler: str | None
    """Name of the app's handler for its topic; None without one."""
    type: str | None
    """The type that the handler takes; None if it takes the record itself, or a function decodes."""
    value: Any
    """The decoded value for JSON; the value itself if the handler takes the record."""
    faults: Sequence[Fault] = ()
    """The parts that cannot be decoded."""

    def as_object(self, *, payload: bool = True) -> dict[str, Any]:
        """Return the dead letter for JSON.

        Args:
            payload: Whether to include the value, and the messages of faults, which may contain parts of it.
        """
        faults = [{"location": fault.location, "message": fault.message if payload else None} for fault in self.faults]
        return {
            "handler": self.handler,
            "type": self.type,
            "value": self.value if payload else None,
            "faults": faults,
        }


async def decode(app: App, dead_letters: Iterable[StoredDeadLetter]) -> list[Decoded]:
    """Decode dead letters as the app's handlers for their topics do. Never raises an error of a decoder."""
    schemas = _Schemas()
    try:
        return [await _decoded(app, dead_letter, schemas) for dead_letter in dead_letters]
    finally:
        await schemas.close()


async def _decoded(app: App, dead_letter: StoredDeadLetter, schemas: "_Schemas") -> Decoded:
    handler = next((handler for handler in app.handlers if handler.takes(dead_letter.original.topic)), None)
    if handler is None:
        return Decoded(None, None, as_json_value(dead_letter.original.value))
    payload = handler.payload
    if payload is None:
        return Decoded(handler.name, None, as_json_value(dead_letter.original.value))
    name = None if payload.type is None else shown(payload.type)
    try:
        value = await _read(handler, dead_letter.original, schemas)
    except DecodeError as error:
        return Decoded(handler.name, name, None, faults_of(error))
    except Exception as error:  # noqa: BLE001 - the user's own decoder, such as one without its schema registry
        return Decoded(handler.name, name, None, [Fault("", f"{type(error).__name__}: {message_of(error)}")])
    return Decoded(handler.name, name, value_as_object(value))


async def _read(handler: Handler, record: Record, schemas: "_Schemas") -> object:
    assert handler.payload is not None  # noqa: S101 - checked by the caller
    if handler.taken is not None:
        return await schemas.read(handler.taken, record)
    value = handler.payload.read(record)
    return await value if inspect.isawaitable(value) else value


class _Schemas:
    """The schemas of dead letters, requested with separate clients: the app may not run, or in another event loop."""

    def __init__(self) -> None:
        self._registries = Registries()
        self._readers: dict[str, Reader] = {}
        """By topic: each has one handler."""
        self._unavailable: dict[str, RegistryUnavailableError] = {}
        """Registries that did not answer, by address: each is asked only once."""

    async def read(self, taken: RegistryInput, record: Record) -> object:
        """Decode a record, once its schema is loaded."""
        reader = self._readers.get(record.topic)
        if reader is None:
            reader = self._readers[record.topic] = self._registries.reader(taken)
        schema = reader.missing(record)
        if schema is not None:
            await self._load(reader, schema)
        return reader.read(record)

    async def _load(self, reader: Reader, schema: SchemaId) -> None:
        unavailable = self._unavailable.get(reader.address)
        if unavailable is not None:
            raise unavailable
        try:
            await reader.load([schema])
        except RegistryUnavailableError as error:
            self._unavailable[reader.address] = error
            raise

    async def close(self) -> None:
        """Close the clients."""
        await self._registries.close()


def value_as_object(value: object) -> Any:
    """Return a decoded value or the result of a handler for JSON."""
    if value is None or isinstance(value, bytes):
        return as_json_value(value)
    with contextlib.suppress(MessageError):
        return json.loads(encoded([value]))[0]
    try:
        return json.loads(encoded_result(value) or b"null")
    except Exception as error:  # noqa: BLE001 - the user's own `repr`, or an object that contains itself
        return f"it cannot be shown ({type(error).__name__})"
