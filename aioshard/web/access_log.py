"""A filter for the access log of an application in which the dashboard is mounted."""

import logging

_POLLED = (("GET", "dashboard.json"), ("GET", "members.json"), ("POST", "dead-letters/jobs"))
_OK = 200


class PollFilter(logging.Filter):
    """Keeps the polls of open dashboards out of an access log of uvicorn.

    An open dashboard sends one or two requests every two seconds, and more while it shows a progress. Polls that fail
    are still logged, and so is everything else that the dashboard requests.

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
        self._polls = {(method, f"{path.rstrip('/')}/{name}") for method, name in _POLLED}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a request; uvicorn's records have client, method, path, version and status."""
        match record.args:
            case (_, str(method), str(path), _, int(status)):
                return status != _OK or (method, path) not in self._polls
        return True
