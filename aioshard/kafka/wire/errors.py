"""Errors between us and a broker."""

from collections.abc import Collection

from aioshard.kafka.errors import Cause


class WireError(Exception):
    """A request that did not succeed."""

    code = -1
    """Kafka's error code; -1 if no broker answered."""
    retriable = True
    """Whether the same request may succeed later."""
    topics: tuple[str, ...] = ()
    """The topics that the error is about."""

    @property
    def cause(self) -> Cause:
        """The error as a value, for the messages that users see."""
        return Cause(self.code, str(self).rstrip("."), self.retriable, self.topics)


class ConnectionLostError(WireError):
    """The connection ended, or could not be opened. The broker may have handled the request."""


class RequestTimedOutError(WireError):
    """The broker did not answer in time. It may handle the request later."""


class UnexpectedResponseError(ConnectionLostError):
    """The other side sent something that is not a response to our requests, and the connection was closed."""


class IncompleteResponseError(WireError):
    """A broker's response leaves out something that was requested, names it twice, or names something else."""


class UnsupportedVersionError(WireError):
    """The broker speaks no version of the request that we speak too."""

    code = 35
    retriable = False


class AuthenticationFailedError(WireError):
    """The broker rejected our credentials."""

    code = 58
    retriable = False


class UnsupportedMechanismError(AuthenticationFailedError):
    """The listener does not offer our SASL mechanism, or no SASL at all."""

    code = 33


class BrokerError(WireError):
    """An error code in a broker's response."""

    def __init__(self, code: int, text: str, *, retriable: bool, topics: Collection[str] = ()) -> None:
        """Describe it.

        Args:
            code: Kafka's error code.
            text: Kafka's name of it, and the broker's message if there is one.
            retriable: Whether the same request may succeed later.
            topics: The topics that it is about.
        """
        super().__init__(text)
        self.code = code
        self.retriable = retriable
        self.topics = tuple(topics)
