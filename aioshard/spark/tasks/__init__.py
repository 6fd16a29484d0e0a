"""Code that runs in Spark's workers: the engine, its event loop, its rows."""
