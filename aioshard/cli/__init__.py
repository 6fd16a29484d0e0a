"""The command `aioshard`: arguments become calls. `aioshard.cli.main` is the entry."""
