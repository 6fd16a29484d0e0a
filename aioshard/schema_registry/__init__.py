"""Values with a schema registry: `Annotated[Order, Avro(registry)]`. Needs the extra `registry`."""

from aioshard.schema_registry.formats import Avro, JsonSchema, Protobuf, RegistryFormat
from aioshard.schema_registry.settings import SchemaRegistry

__all__ = ["Avro", "JsonSchema", "Protobuf", "RegistryFormat", "SchemaRegistry"]
