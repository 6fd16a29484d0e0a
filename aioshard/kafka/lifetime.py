"""The life of one client: when its requests may be sent."""

from aioshard.errors import ClientLostError


class Lifetime:
    """Requests may be sent from the first answer of a broker until the client has left its group."""

    def __init__(self) -> None:
        """Begin before the start."""
        self.is_started = False
        """Whether the brokers have answered."""
        self.is_closed = False
        """Whether `close` was called: from then on, no records are returned."""
        self.has_left = False
        """Whether all requests must stop, including the commits of a final drain."""

    @property
    def is_open(self) -> bool:
        """Whether the client is started and not closed."""
        return self.is_started and not self.is_closed

    def check(self) -> None:
        """Raise if no request may be sent now.

        Raises:
            ClientLostError: The client was not started, or it has left its group.
        """
        if not self.is_started or self.has_left:
            raise ClientLostError(f"the Kafka client {'is closed' if self.is_closed else 'was not started'}")
