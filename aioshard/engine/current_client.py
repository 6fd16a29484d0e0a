"""The Kafka client that an engine uses now."""

from aioshard.errors import ClientLostError
from aioshard.ports import Transport


class CurrentClient:
    """The current Kafka client of an engine: a lost one is replaced, and in between there is none.

    Only the supervisor (`Engine`) changes it. Owned by the event loop; safe to read from any thread.
    """

    __slots__ = ("_client", "transport")

    def __init__(self) -> None:
        self.transport: Transport | None = None
        """The client in use; None before the first one, between two of them and once the last one is being closed."""
        self._client: Transport | None = None
        """The same, but also while it is being closed: it may still call the `GroupListener`."""

    def use(self, transport: Transport) -> None:
        """Use a new client from now on."""
        self.transport = transport
        self._client = transport

    def retire(self) -> None:
        """Stop using the client, which is being closed: it reports no outage any more, even if the brokers are away."""
        self.transport = None

    def forget(self) -> None:
        """Forget the client, which is closed."""
        self._client = None

    def get(self) -> Transport:
        """Return the client, also while it is being closed.

        Raises:
            ClientLostError: No client exists now.
        """
        if self._client is None:
            raise ClientLostError("the Kafka client is gone: a new one is being created, or the app has stopped")
        return self._client

    def wake(self) -> None:
        """Make a waiting poll return now, if there is a client."""
        if self.transport is not None:
            self.transport.wake()
