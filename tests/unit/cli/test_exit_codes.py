"""Exit codes of the commands, for scripts."""

import pytest

from aioshard.cli.output import exit_code
from aioshard.errors import (
    AioshardError,
    DataLossError,
    GroupBusyError,
    GroupMovedError,
    HaltedError,
    MissingTopicError,
    NotVerifiedError,
    PlanError,
    StartError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlanError("no"), 2),
        (HaltedError(["orders/0/3"]), 3),
        (NotVerifiedError("no"), 3),
        (GroupBusyError("orders", ["member 'a'"], 2.0), 4),
        (GroupMovedError("orders", ["orders/0: then 3, now 6"]), 4),
        (DataLossError(["orders/0: offsets 3 to 5"], "Begin elsewhere"), 5),
        (StartError("no"), 1),
        (MissingTopicError("no"), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, AioshardError) else "",
)
def test_every_error_has_its_exit_code(error: AioshardError, code: int) -> None:
    assert exit_code(error) == code


def test_error_messages_name_the_finding_and_the_fix() -> None:
    assert "orders/0: offsets 3 to 5. Begin elsewhere" in str(
        DataLossError(["orders/0: offsets 3 to 5"], "Begin elsewhere")
    )
