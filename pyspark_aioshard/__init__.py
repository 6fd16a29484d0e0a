"""Lets Spark find `format("aioshard")` by name: it looks into packages that begin with `pyspark_`, in every session.

So nothing but pyspark is imported here; the rest comes with the first use.
"""

from typing import Any

from pyspark.sql.datasource import DataSource

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """Stands for `aioshard.spark.source.AioshardSource`."""

    @classmethod
    def name(cls) -> str:
        """What `format` takes."""
        return "aioshard"

    def _source(self) -> DataSource:
        from aioshard.spark.source import AioshardSource  # noqa: PLC0415 - on use only

        return AioshardSource(self.options)

    def schema(self) -> Any:
        """See `AioshardSource.schema`."""
        return self._source().schema()

    def reader(self, schema: Any) -> Any:
        """See `AioshardSource.reader`."""
        return self._source().reader(schema)

    def streamReader(self, schema: Any) -> Any:  # noqa: N802 - Spark's name
        """See `AioshardSource.streamReader`."""
        return self._source().streamReader(schema)
