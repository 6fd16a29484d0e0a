"""The schema registries of a running app: values decoded and encoded with their schemas."""

import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from aioshard.errors import DecodeError, HandlerError, MessageError, MissingExtraError, SchemaNotLoadedError
from aioshard.records import Record
from aioshard.schema_registry.client import Loaded, RegistryClient, UnusableSchemaError
from aioshard.schema_registry.formats import Decode, Encode, RegistryFormat, content_of, format_of
from aioshard.schema_registry.framing import FramingError, SchemaId, frame_of, framed
from aioshard.schema_registry.settings import SchemaRegistry
from aioshard.serde.payloads import PASSED_ON, Payload, alternatives, no_value, not_valid, shown, validators
from aioshard.serde.side_records import Coordinates

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema


class RegistryInput(NamedTuple):
    """How a handler takes values that were written with a schema of a registry."""

    format: RegistryFormat
    kind: Any
    """The annotated type, without None."""
    name: str
    """The type as users write it."""
    convert: Callable[[Any], Any]
    """Validates a decoded value."""
    takes_none: bool

    @classmethod
    def of(cls, annotation: Any, owner: str) -> "RegistryInput | None":
        """Return how a type is decoded; None if it names no format.

        Raises:
            HandlerError: The type cannot be decoded in this format.
        """
        form = format_of(annotation, owner)
        if form is None:
            return None
        kind = _without_none(annotation)
        form.check_type(kind, owner)
        convert: Callable[[Any], Any] = _same
        if form.type != "PROTOBUF":
            from_json, from_object = validators(annotation, owner)
            convert = from_object if form.reads_schemas else from_json
        return cls(form, kind, shown(annotation), convert, NoneType in alternatives(annotation))

    @property
    def payload(self) -> Payload:
        """The conversion before the app has started: it refuses every record."""

        def read(record: Record) -> Any:
            raise SchemaNotLoadedError(f"{Coordinates.of(record)} was not decoded: the app does not run")

        return Payload(read, is_async=False, type=self.kind)


class RegistryOutput(NamedTuple):
    """How the result of a handler is published."""

    format: RegistryFormat
    kind: Any
    """The annotated type, without None."""

    @classmethod
    def of(cls, annotation: Any, owner: str) -> "RegistryOutput | None":
        """Return how a result of this type is published; None if it names no format; raises as `RegistryInput.of`."""
        form = format_of(annotation, owner)
        if form is None:
            return None
        kind = _without_none(annotation)
        form.check_type(kind, owner)
        return cls(form, kind)

    @property
    def encoded_kind(self) -> Any:
        """The class on which the encoder depends; see `RegistryFormat.kind_of`."""
        return self.kind if self.format.type == "PROTOBUF" else None


def _without_none(annotation: Any) -> Any:
    """Return the type of the values that are not None."""
    kinds = [kind for kind in alternatives(annotation) if kind is not NoneType]
    return Union[tuple(kinds)] if kinds else NoneType  # noqa: UP007 - the types are known only now


def _same(value: Any) -> Any:
    return value


class Reader:
    """Decodes the records of a handler. `read` never waits: `missing` says whether a schema must be loaded first."""

    def __init__(self, taken: RegistryInput, client: RegistryClient) -> None:
        """Create a reader that knows no schema yet."""
        self.address = client.address
        self._taken = taken
        self._client = client
        self._schemas: Loaded[SchemaId, Decode] = Loaded(self._request)
        self._without_schema: Decode | None = None
        if not taken.format.reads_schemas:
            self._without_schema = content_of

    def missing(self, record: Record) -> SchemaId | None:
        """Return the schema that must be loaded before a record can be read; None if it can, or never can."""
        if record.value is None or self._without_schema is not None:
            return None
        try:
            schema = frame_of(record).schema
        except FramingError:
            return None
        return None if self._schemas.is_decided(schema) else schema

    async def load(self, schemas: Sequence[SchemaId]) -> None:
        """Load schemas; one that the registry does not have is remembered as such.

        Raises:
            RegistryUnavailableError: The registry does not answer.
        """
        for schema in schemas:
            await self._schemas.wait(schema)

    def read(self, record: Record) -> Any:
        """Decode a record.

        Raises:
            DecodeError: It was not written with a schema, or does not match it or the handler's type.
            SchemaNotLoadedError: Its schema must be loaded first.
        """
        taken = self._taken
        if record.value is None:
            if taken.takes_none:
                return None
            raise no_value(record, taken.name) from None
        schema: SchemaId | None = None
        try:
            frame = frame_of(record)
            schema = frame.schema
            decode = self._without_schema or self._schemas.known.get(schema)
            if decode is None:
                raise self._unknown(schema)  # noqa: TRY301 - a `FramingError` of any origin becomes a `DecodeError`
            return taken.convert(decode(frame))
        except FramingError as error:
            raise DecodeError(f"{Coordinates.of(record)} {error}") from None
        except PASSED_ON:
            raise
        except Exception as error:  # noqa: BLE001 - of the decoder, and of the user's own types
            raise not_valid(record, f"{taken.name} of schema {schema}", error) from None

    def _unknown(self, schema: SchemaId) -> Exception:
        why = self._schemas.why_unusable(schema)
        if why is None:
            return SchemaNotLoadedError(f"schema {schema} of the registry at {self.address} has not been loaded yet")
        return FramingError(f"was written with schema {schema}, which cannot be used: {why}")

    async def _request(self, schema_id: SchemaId) -> Decode:
        def request(registry: Any) -> Awaitable["Schema"]:
            answer: Awaitable[Schema]
            if isinstance(schema_id, str):
                answer = registry.get_schema_by_guid(schema_id)
            else:
                answer = registry.get_schema(schema_id)
            return answer

        schema = await self._client.request(request)
        _check_schema(schema, self._taken.format)
        return await self._taken.format.decoder(schema, self._taken.kind, self._client)


def _check_schema(schema: "Schema", form: RegistryFormat) -> None:
    """Refuse a schema of another format, and one with rules, which only confluent-kafka's own serializers run."""
    found = schema.schema_type or "AVRO"
    if found != form.type:
        raise UnusableSchemaError(f"it is a schema of type {found}, and the handler names {type(form).__name__}")
    rules = schema.rule_set
    if rules is not None and (rules.domain_rules or rules.encoding_rules):
        raise UnusableSchemaError(
            "it has rules, such as for encrypted fields, which only confluent-kafka's own deserializer runs: use that "
            "one in a function, as decode=…"
        )


class _Written(NamedTuple):
    """The schema that values for a subject are written with."""

    schema: int
    encode: Encode


class _Writer:
    """Encodes values in one format."""

    def __init__(self, form: RegistryFormat, client: RegistryClient) -> None:
        self._format = form
        self._client = client
        self._schemas: Loaded[tuple[str, Any], _Written] = Loaded(self._request)

    async def encode(self, topic: str, value: Any) -> bytes:
        kind = self._format.kind_of(value)
        subject = self._format.subject_of(topic)
        written = self._schemas.known.get((subject, kind)) or await self.load(topic, kind)
        refused = f"a {shown(type(value))} for topic {topic!r} was not published"
        try:
            content = written.encode(value)
        except MessageError as error:
            raise MessageError(f"{refused}: it does not match schema {written.schema} of {subject} ({error})") from None
        return framed(written.schema, content)

    def knows(self, topic: str, kind: Any) -> bool:
        return (self._format.subject_of(topic), kind) in self._schemas.known

    async def load(self, topic: str, kind: Any) -> _Written:
        subject = self._format.subject_of(topic)
        await self._schemas.wait((subject, kind))
        written = self._schemas.known.get((subject, kind))
        if written is None:
            why = self._schemas.why_unusable((subject, kind))
            raise MessageError(
                f"nothing can be published to topic {topic!r} with a schema of subject {subject!r}: {why}. Register "
                "the schema, or let the format do it with auto_register=True"
            )
        return written

    async def _request(self, key: tuple[str, Any]) -> _Written:
        from confluent_kafka.schema_registry import Schema  # noqa: PLC0415 - imported on use

        subject, kind = key
        form = self._format
        text = form.own_schema(kind)
        if text is None:
            latest = await self._client.request(lambda registry: registry.get_latest_version(subject))
            schema = latest.schema
            number = latest.schema_id
        else:
            schema = Schema(text, form.type)
            if form.auto_register:
                number = await self._client.request(
                    lambda registry: registry.register_schema(subject, schema, normalize_schemas=True)
                )
            else:
                found = await self._client.request(
                    lambda registry: registry.lookup_schema(subject, schema, normalize_schemas=True)
                )
                number = found.schema_id
        _check_schema(schema, form)
        return _Written(int(number or 0), await form.encoder(schema, kind, self._client))


class Registries:
    """The schema registries of one run of an app: a client for each, created when it is first needed."""

    def __init__(self) -> None:
        """Begin without clients."""
        self._clients: dict[SchemaRegistry, RegistryClient] = {}
        self._writers: dict[RegistryFormat, _Writer] = {}

    @property
    def troubles(self) -> Sequence[str]:
        """A sentence about each registry that does not answer. Safe from any thread."""
        troubles = [client.trouble for client in tuple(self._clients.values())]
        return [trouble for trouble in troubles if trouble is not None]

    def reader(self, taken: RegistryInput) -> Reader:
        """Return a reader for a handler.

        Raises:
            MissingExtraError: Packages are missing.
            HandlerError: An option of the registry is invalid.
        """
        return Reader(taken, self._client_of(taken.format))

    async def encode(self, form: RegistryFormat, topic: str, value: object) -> bytes | None:
        """Encode a value to be published; None, a tombstone, stays None.

        Raises:
            MessageError: It does not match its schema, or the registry refuses the schema or does not have it.
            RegistryUnavailableError: The registry does not answer.
        """
        return None if value is None else await self._writer_of(form).encode(topic, value)

    def is_prepared(self, output: RegistryOutput, topic: str) -> bool:
        """Whether `prepare` has nothing to do."""
        writer = self._writers.get(output.format)
        return writer is not None and writer.knows(topic, output.encoded_kind)

    async def prepare(self, output: RegistryOutput, topic: str) -> None:
        """Load the schema for the results of a handler, before it runs; raises as `encode`."""
        await self._writer_of(output.format).load(topic, output.encoded_kind)

    async def close(self) -> None:
        """Close all clients."""
        for client in self._clients.values():
            await client.close()

    def _writer_of(self, form: RegistryFormat) -> _Writer:
        writer = self._writers.get(form)
        if writer is None:
            writer = self._writers[form] = _Writer(form, self._client_of(form))
        return writer

    def _client_of(self, form: RegistryFormat) -> RegistryClient:
        if not all(map(_is_installed, form.packages)):
            raise MissingExtraError(f"{type(form).__name__} values", "registry")
        client = self._clients.get(form.registry)
        if client is None:
            try:
                client = RegistryClient(form.registry)
            except (ValueError, TypeError, OSError) as error:
                raise HandlerError(f"{form.registry!r} cannot be used: {error}") from error
            self._clients[form.registry] = client
        return client


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package that contains it
        return False
