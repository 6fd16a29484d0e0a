"""The command line in the test process."""

from tests.support.commands import aioshard as aioshard  # noqa: PLC0414 - a fixture of the tests beside this file
