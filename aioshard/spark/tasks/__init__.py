"""What runs in the workers of Spark: the engine, its loop, its rows."""
