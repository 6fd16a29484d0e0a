"""A filter for the access log of an application in which the dashboard is mounted."""

import logging

_POLLED = ("dashboard.json", "members.json")
_OK = 200


class PollFilter(logging.Filter):
    """Keeps the polls of open dashboards out of an access log of uvicorn.

    An open dashboard sends one or two requests every two seconds. Polls that fail are still logged, and so is
    everything else that the dashboard requests.

    Example:
        >>> import logging
        >>> logging.getLogger("uvicorn.access").addFilter(PollFilter("/aioshard"))
    """

    def __init__(self, path: str = "") -> None:
        """Make a filter; add it to the logger.

        Args:
            path: The path at which the dashboard is mounted, such as `/aioshard`.
        """
        super().__init__()
        self._polls = {f"{path.rstrip('/')}/{name}" for name in _POLLED}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a request; uvicorn's records have client, method, path, version and status."""
        match record.args:
            case (_, "GET", str(path), _, int(status)):
                return status != _OK or path not in self._polls
        return True
