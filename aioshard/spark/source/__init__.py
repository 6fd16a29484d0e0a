"""`format("aioshard")`: what is read, as tasks, and written."""
