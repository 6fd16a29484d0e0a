"""The exit codes of all commands.

| code | meaning |
| --- | --- |
| 0 | clean |
| 1 | crashed: the brokers, or an unexpected error |
| 2 | usage: wrong options, unknown module or app, a setting, a handler or a plan refused |
| 3 | unhealthy: halted records in the way, failed dead letters, an app that is not ready, a wrong figure or run |
| 4 | records still ran or were not committed when the time to stop was over; the group is busy, moved or leased |
| 5 | records that were to be read are not in the log any more |
| 130 | interrupted, or left at a second signal |
"""

from typing import Final

from aioshard.errors import (
    AioshardError,
    DataLossError,
    GroupBusyError,
    GroupMovedError,
    HaltedError,
    HandlerError,
    LeasedError,
    MissingExtraError,
    NotDrainedError,
    NotVerifiedError,
    PlanError,
    SettingsError,
)

__all__ = ["CRASHED", "DATA_LOST", "INTERRUPTED", "NOT_DRAINED", "REFUSED", "UNHEALTHY", "exit_code"]

CRASHED: Final = 1
REFUSED: Final = 2
UNHEALTHY: Final = 3
NOT_DRAINED: Final = 4
DATA_LOST: Final = 5
INTERRUPTED: Final = 130


def exit_code(error: AioshardError) -> int:
    """The exit code that an error ends the process with."""
    match error:
        case SettingsError() | HandlerError() | MissingExtraError() | PlanError():
            return REFUSED
        case HaltedError() | NotVerifiedError():
            return UNHEALTHY
        case NotDrainedError() | GroupBusyError() | GroupMovedError() | LeasedError():
            return NOT_DRAINED
        case DataLossError():
            return DATA_LOST
        case _:
            return CRASHED
