"""What works but is probably not meant so: numbers that do not go together, variables that nobody reads."""

import os
from collections.abc import Iterable, Mapping

from aioshard.settings import refusals
from aioshard.settings.model import PREFIX, Settings

__all__ = ["misspelled_variables", "timeout_warnings"]


def timeout_warnings(settings: Settings, timeouts: Iterable[tuple[str, float | None]]) -> list[str]:
    """What works but not as the numbers suggest: handlers that may run longer than we wait for them.

    Args:
        settings: The settings in effect.
        timeouts: Name and `timeout` (seconds) of each handler.
    """
    return [
        f"handler {name!r} may run for timeout={timeout:g} s but {limit}={getattr(settings, limit):g} s: {consequence}"
        for name, timeout in timeouts
        for limit, consequence in (
            ("drain_timeout", "a rebalance cancels runs that take longer, and their records run again"),
            ("shutdown_timeout", "stopping cancels runs that take longer, and their records run again"),
        )
        if timeout is not None and timeout > getattr(settings, limit)
    ]


def misspelled_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Sentences about variables that look like settings but are none.

    They are no errors: clusters make variables such as `AIOSHARD_PORT` by themselves, so only names
    close to a setting's are reported.
    """
    sentences = []
    for variable in sorted(os.environ if environment is None else environment):
        name = variable.lower().removeprefix(PREFIX.lower())
        if not variable.upper().startswith(PREFIX) or name in Settings.model_fields:
            continue
        meant = refusals.close_match(name, Settings.model_fields)
        if meant is not None:
            sentences.append(f"{variable} is not used; did you mean {PREFIX}{meant.upper()}?")
    return sentences
