"""The formats of values with a schema registry, for annotations: `Annotated[Order, Avro(registry)]`."""

import dataclasses
import functools
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from aioshard.errors import HandlerError, MessageError
from aioshard.records import Record
from aioshard.schema_registry.client import RegistryClient, UnusableSchemaError
from aioshard.schema_registry.framing import Frame, FramingError, joined_indexes, schema_named_in, split_indexes
from aioshard.schema_registry.protobuf import imports_of, message_names, position_of, schema_of
from aioshard.schema_registry.settings import SchemaRegistry
from aioshard.serde.payloads import encoded, shown
from aioshard.serde.side_records import SchemaRef

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema

SchemaType = Literal["AVRO", "JSON", "PROTOBUF"]
"""The kinds of schemas, as registries name them."""
Decode = Callable[[Frame], Any]
"""Decodes a value that was written with one schema."""
Encode = Callable[[Any], bytes]
"""Encodes a value for one schema, without the schema's number."""


@dataclasses.dataclass(frozen=True, slots=True)
class RegistryFormat(ABC):
    """Base class of `Avro`, `JsonSchema` and `Protobuf`.

    Attributes:
        registry: The registry that has the schemas.
        schema: For published values, the schema that they are written with, as a text; the registry must have it under
            the subject. None takes the latest schema of the subject, as of the first value that is published.
        subject: The subject of published values; None means `TOPIC-value`.
        auto_register: Whether to register *schema* under the subject, if it is not there. By default, a schema that is
            not registered is refused.

    Raises:
        HandlerError: An argument is invalid.
    """

    registry: SchemaRegistry
    schema: str | None = None
    subject: str | None = None
    auto_register: bool = False

    type: ClassVar[SchemaType]
    title: ClassVar[str]
    """The name of the format in sentences."""
    content_type: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ("confluent_kafka",)
    """The packages that it needs."""
    reads_schemas: ClassVar[bool] = True
    """Whether decoding needs the schema that a value was written with."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.registry, SchemaRegistry):
            raise HandlerError(f"{name}({self.registry!r}) was refused: expected a SchemaRegistry('https://…')")
        for option in ("schema", "subject"):
            value = getattr(self, option)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise HandlerError(f"{name}({option}=…) was refused: expected a text, or None; found {value!r}")
        self._check()

    def _check(self) -> None:
        if self.auto_register and self.schema is None:
            raise HandlerError(
                f"{type(self).__name__}(auto_register=True) was refused: give it the schema to register, as schema=…"
            )

    def subject_of(self, topic: str) -> str:
        """Return the subject of the values of a topic.

        Example:
            >>> JsonSchema(SchemaRegistry("mock://docs")).subject_of("orders")
            'orders-value'
        """
        return self.subject or f"{topic}-value"

    def ref_of(self, record: Record) -> SchemaRef:
        """Return the schema of a record that was read in this format, as its dead letter names it."""
        return SchemaRef(schema_named_in(record), self.subject_of(record.topic))

    @abstractmethod
    def check_type(self, kind: Any, owner: str) -> None:
        """Refuse a type that values cannot be decoded into."""

    @abstractmethod
    async def decoder(self, schema: "Schema", kind: Any, client: RegistryClient) -> Decode:
        """Return the function that decodes values that were written with a schema.

        Args:
            schema: The schema.
            kind: The annotated type.
            client: For schemas that it refers to.

        Raises:
            RegistryUnavailableError: The registry does not answer.
            UnusableSchemaError: The schema cannot be used.
        """

    @abstractmethod
    async def encoder(self, schema: "Schema", kind: Any, client: RegistryClient) -> Encode:
        """Return the function that encodes values of type *kind* for a schema; raises as `decoder`."""

    def own_schema(self, kind: Any) -> str | None:  # noqa: ARG002 - Protobuf's
        """Return the schema for published values of type *kind*; None if the latest of the subject decides."""
        return self.schema

    def kind_of(self, value: Any) -> Any:  # noqa: ARG002 - Protobuf's
        """Return what `encoder` depends on besides the schema: for Protobuf, the class of a value.

        Raises:
            MessageError: The value cannot be published in this format.
        """
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Avro(RegistryFormat):
    """Values in Avro: decoded with the schema that they were written with, then validated by the annotated type.

    If *schema* is set, it is also the schema that values are read as: Avro fills in defaults for fields that the
    writer did not have.

    Example:
        >>> Avro(SchemaRegistry("http://localhost:8081"), subject="shop.Order").subject_of("orders")
        'shop.Order'
    """

    type: ClassVar[SchemaType] = "AVRO"
    title: ClassVar[str] = "Avro"
    content_type: ClassVar[str] = "avro/binary"
    packages: ClassVar[tuple[str, ...]] = ("confluent_kafka", "fastavro")

    def check_type(self, kind: Any, owner: str) -> None:
        """Accept any type: the decoded value is validated by it."""

    async def decoder(self, schema: "Schema", kind: Any, client: RegistryClient) -> Decode:  # noqa: ARG002
        """See `RegistryFormat.decoder`."""
        from fastavro import schemaless_reader  # noqa: PLC0415 - imported on use

        written = await _parsed(schema, client)
        read = None if self.schema is None else _parse(self.schema, {})

        def decode(frame: Frame) -> Any:
            return schemaless_reader(io.BytesIO(frame.content), written, read)

        return decode

    async def encoder(self, schema: "Schema", kind: Any, client: RegistryClient) -> Encode:  # noqa: ARG002
        """See `RegistryFormat.encoder`."""
        from fastavro import schemaless_writer  # noqa: PLC0415 - imported on use

        written = await _parsed(schema, client)

        def encode(value: Any) -> bytes:
            plain = _plain(value)
            stream = io.BytesIO()
            try:
                schemaless_writer(stream, written, plain)
            except Exception as error:  # noqa: BLE001 - of many types; their messages show the value
                raise MessageError(_mismatch(plain, written) or f"{type(error).__name__} was raised") from None
            return stream.getvalue()

        return encode


@dataclasses.dataclass(frozen=True, slots=True)
class JsonSchema(RegistryFormat):
    """Values in JSON with a schema in the registry: validated by the annotated type.

    The registered schema is not needed to read a value, so the registry is asked only for published ones.

    Example:
        >>> from pydantic import TypeAdapter
        >>> import json
        >>> schema = json.dumps(TypeAdapter(dict[str, int]).json_schema())
        >>> JsonSchema(SchemaRegistry("http://localhost:8081"), schema=schema, auto_register=True).subject_of("totals")
        'totals-value'
    """

    type: ClassVar[SchemaType] = "JSON"
    title: ClassVar[str] = "JSON with a schema"
    content_type: ClassVar[str] = "application/json"
    reads_schemas: ClassVar[bool] = False

    def check_type(self, kind: Any, owner: str) -> None:
        """Accept any type: the value is validated by it."""

    async def decoder(self, schema: "Schema", kind: Any, client: RegistryClient) -> Decode:  # noqa: ARG002
        """See `RegistryFormat.decoder`."""
        return content_of

    async def encoder(self, schema: "Schema", kind: Any, client: RegistryClient) -> Encode:  # noqa: ARG002
        """See `RegistryFormat.encoder`."""
        return encoded


def content_of(frame: Frame) -> bytes:
    """Return a value without the number of its schema."""
    return frame.content


@dataclasses.dataclass(frozen=True, slots=True)
class Protobuf(RegistryFormat):
    """Values in Protobuf: the annotated type is the class that `protoc` generated for the message.

    A value of another message is refused: its schema names it. With *auto_register*, the schema of the class is
    registered; *schema* is not used.

    Example:
        >>> Protobuf(SchemaRegistry("http://localhost:8081"), auto_register=True).subject_of("orders")
        'orders-value'
    """

    type: ClassVar[SchemaType] = "PROTOBUF"
    title: ClassVar[str] = "Protobuf"
    content_type: ClassVar[str] = "application/protobuf"
    packages: ClassVar[tuple[str, ...]] = ("confluent_kafka", "google.protobuf")

    def _check(self) -> None:
        if self.schema is not None:
            raise HandlerError("Protobuf(schema=…) was refused: the generated class has the schema, so leave it out")

    def check_type(self, kind: Any, owner: str) -> None:
        """Refuse a type that is not a generated class.

        Raises:
            HandlerError: It is not one.
        """
        if not (hasattr(kind, "DESCRIPTOR") and hasattr(kind, "FromString")):
            raise HandlerError(
                f"{owner} takes Annotated[{getattr(kind, '__name__', kind)}, Protobuf(…)]: expected the class that "
                "protoc generated for the message"
            )

    async def decoder(self, schema: "Schema", kind: Any, client: RegistryClient) -> Decode:  # noqa: ARG002
        """See `RegistryFormat.decoder`."""
        names = message_names(schema.schema_str or "")
        expected, nested = position_of(kind.DESCRIPTOR)

        def decode(frame: Frame) -> Any:
            if frame.rest is None:
                indexes, content = split_indexes(frame.content)
            else:
                indexes, _ = split_indexes(frame.rest)
                content = frame.content
            found = names[indexes[0]] if 0 <= indexes[0] < len(names) else None
            # Only the depth of a nested message counts: compilers disagree about the order of nested ones and maps.
            if found != expected or len(indexes) != len(nested) + 1:
                raise FramingError(f"is a Protobuf message {found or 'that its schema does not have'}, not {expected}")
            return kind.FromString(content)

        return decode

    async def encoder(self, schema: "Schema", kind: Any, client: RegistryClient) -> Encode:  # noqa: ARG002
        """See `RegistryFormat.encoder`."""
        name, nested = position_of(kind.DESCRIPTOR)
        names = message_names(schema.schema_str or "")
        if name not in names:
            raise UnusableSchemaError(f"the registered schema has no message {name}; it has {', '.join(names)}")
        prefix = joined_indexes((names.index(name), *nested))
        return lambda value: prefix + value.SerializeToString()

    def own_schema(self, kind: Any) -> str | None:
        """See `RegistryFormat.own_schema`."""
        if not self.auto_register:
            return None
        imports = imports_of(kind.DESCRIPTOR)
        if imports:
            raise UnusableSchemaError(
                f"the schema of {kind.DESCRIPTOR.full_name} imports {', '.join(imports)}: register it yourself, with "
                "references to these files, and leave auto_register out"
            )
        return schema_of(kind.DESCRIPTOR)

    def kind_of(self, value: Any) -> Any:
        """See `RegistryFormat.kind_of`."""
        if not hasattr(value, "SerializeToString"):
            raise MessageError(
                f"a {shown(type(value))} was not published: expected a Protobuf message, of a class that protoc "
                "generated"
            )
        return type(value)


# Avro -----------------------------------------------------------------------------------


async def _parsed(schema: "Schema", client: RegistryClient) -> Any:
    """Parse a schema and those that it refers to."""
    named: dict[str, Any] = {}
    await _add_references(schema, client, named)
    return _parse(schema.schema_str or "", named)


async def _add_references(schema: "Schema", client: RegistryClient, named: dict[str, Any]) -> None:
    """Parse the schemas that a schema refers to, and those that they refer to first."""
    for reference in schema.references or ():
        referenced = await _referenced(reference.subject or "", reference.version or 0, client)
        await _add_references(referenced, client, named)
        _parse(referenced.schema_str or "", named)


async def _referenced(subject: str, version: int, client: RegistryClient) -> "Schema":
    registered = await client.request(lambda registry: registry.get_version(subject, version, deleted=True))
    return registered.schema


def _parse(text: str, named: dict[str, Any]) -> Any:
    from fastavro import parse_schema  # noqa: PLC0415 - imported on use
    from fastavro.schema import SchemaParseException, UnknownType  # noqa: PLC0415

    try:
        return parse_schema(_loaded(text), named_schemas=named)
    except (SchemaParseException, UnknownType, ValueError, KeyError, TypeError) as error:
        raise UnusableSchemaError(f"it is not an Avro schema: {error}") from error


def _loaded(text: str) -> Any:
    """Return a schema as an object; registries also accept the plain name of a simple type."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _mismatch(value: Any, schema: Any) -> str:
    """Name the fields that do not match a schema; empty if they are not known."""
    from fastavro.validation import ValidationError, validate  # noqa: PLC0415 - imported on use

    try:
        validate(value, schema, raise_errors=True)
    except ValidationError as error:
        return "; ".join(f"{fault.field}: expected {_shown_type(fault.schema)}" for fault in error.errors)
    except Exception:  # noqa: BLE001 - the caller names the first error
        return ""
    return ""


def _shown_type(schema: Any) -> str:
    """Format a part of an Avro schema for a message: the type, without its fields."""
    if isinstance(schema, dict):
        return str(schema.get("name") or schema.get("type"))
    if isinstance(schema, list):
        return " or ".join(map(_shown_type, schema))
    return str(schema)


def _plain(value: Any) -> Any:
    """Convert models and dataclasses to dictionaries; dates, decimals and bytes stay objects for Avro's own types."""
    if type(value) in (str, int, float, bool, bytes):
        return value
    return _any_type().dump_python(value, by_alias=True, fallback=_plain_struct)


@functools.cache
def _any_type() -> Any:
    """Return what converts a value of any type; it takes long to make."""
    from pydantic import TypeAdapter  # noqa: PLC0415 - pydantic is imported on use

    return TypeAdapter(Any)


def _plain_struct(value: Any) -> Any:
    if not hasattr(type(value), "__struct_fields__"):
        return value
    import msgspec  # noqa: PLC0415 - a struct needs it

    return msgspec.structs.asdict(value)


# Annotations ----------------------------------------------------------------------------


def formats_in(annotation: Any) -> Iterator[RegistryFormat]:
    """Iterate over the formats that an annotation names, for itself or in a union.

    Raises:
        HandlerError: It names a class instead of a format, or the format of a part of the value.
    """
    if get_origin(annotation) is Annotated:
        marked, *metadata = get_args(annotation)
        for mark in metadata:
            if isinstance(mark, RegistryFormat):
                yield mark
            elif isinstance(mark, type) and issubclass(mark, RegistryFormat):
                raise HandlerError(f"Annotated[…, {mark.__name__}] names no registry: write {mark.__name__}(registry)")
        yield from formats_in(marked)
        return
    is_union = get_origin(annotation) in (Union, UnionType)
    for argument in get_args(annotation):
        for found in formats_in(argument):
            if not is_union:
                raise HandlerError(
                    f"{shown(annotation)} names {type(found).__name__}(…) for a part of the value: a record has one "
                    "schema, so write Annotated[…] around the whole type"
                )
            yield found


def format_of(annotation: Any, owner: str) -> RegistryFormat | None:
    """Return the format that an annotation names; None without one.

    Raises:
        HandlerError: It names several, or the packages of the format are not installed.

    Example:
        >>> registry = SchemaRegistry("mock://docs")
        >>> format_of(Annotated[int, Avro(registry)] | None, "handler 'on_order'") == Avro(registry)
        True
    """
    found = dict.fromkeys(formats_in(annotation))
    if len(found) > 1:
        raise HandlerError(f"{owner} names {len(found)} formats of a schema registry: expected one")
    return next(iter(found), None)
