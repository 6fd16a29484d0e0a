"""Makes Spark find `format("aioshard")`: every session imports the packages whose names begin with `pyspark_`.

Therefore only pyspark is imported here, and the rest on first use.
"""

from typing import Any

from pyspark.sql.datasource import DataSource

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """Proxy of `aioshard.spark.source.AioshardSource`."""

    @classmethod
    def name(cls) -> str:
        """Return the name that you pass to `format`."""
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
