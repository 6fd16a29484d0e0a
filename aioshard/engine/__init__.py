"""The asyncio tasks that act on the decisions of `aioshard.core`; each module owns one kind of task."""
