"""Reports on the journal of an app: skew, tail, lag and progress. Imports DuckDB or pyspark on use."""
