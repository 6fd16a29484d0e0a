"""`format("aioshard")` as a Spark data source and sink."""
