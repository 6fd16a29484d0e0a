"""The client of a running app for one schema registry."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioshard.errors import MissingExtraError, RegistryUnavailableError
from aioshard.log_fields import get_logger
from aioshard.schema_registry.settings import SchemaRegistry

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import AsyncSchemaRegistryClient

T = TypeVar("T")
K = TypeVar("K")

logger = get_logger("aioshard.schema_registry")

_NOT_FOUND = 404
_REFUSED = frozenset({400, 409, 422})
"""Codes of HTTP with which a registry refuses a schema: the same request would be refused again."""
_UNUSABLE_FOR = 5.0
"""Seconds for which a schema that was not found is not asked for again."""
_MOST_UNUSABLE = 1_000

_mocks: dict[str, "AsyncSchemaRegistryClient"] = {}
"""The registries in the memory of this process, by URL."""


class UnusableSchemaError(Exception):
    """A registry does not have a schema, refuses it, or it cannot be used; the message is a sentence."""


class RegistryClient:
    """Asks one registry for schemas, in one event loop. Every failure of the registry is a `RegistryUnavailableError`.

    It does not repeat requests: the records that need the answer run again.
    """

    def __init__(self, settings: SchemaRegistry) -> None:
        """Create the client; it connects with the first request.

        Raises:
            MissingExtraError: confluent-kafka's client is not installed.
            ValueError: An option is invalid.
        """
        self.address = settings.address
        self._timeout = settings.timeout
        self._failed: str | None = None
        self._failing_since = 0.0
        self._is_mock = settings.is_mock
        try:
            from confluent_kafka.schema_registry import AsyncSchemaRegistryClient  # noqa: PLC0415 - imported on use
        except ImportError as error:
            raise MissingExtraError("a schema registry", "registry") from error
        if not settings.is_mock:
            self._client = AsyncSchemaRegistryClient.new_client(settings.config())
            return
        if settings.url not in _mocks:
            _mocks[settings.url] = AsyncSchemaRegistryClient.new_client({"url": settings.url})
        self._client = _mocks[settings.url]

    async def close(self) -> None:
        """Close its connections."""
        if not self._is_mock:
            await self._client.aclose()

    @property
    def trouble(self) -> str | None:
        """Say that the latest request failed, why, and since when; None if it did not. Safe from any thread."""
        failed = self._failed
        if failed is None:
            return None
        return f"{failed} (for {time.monotonic() - self._failing_since:.0f} s)"

    async def request(self, call: "Callable[[AsyncSchemaRegistryClient], Awaitable[T]]") -> T:
        """Return the registry's answer to a request.

        Raises:
            RegistryUnavailableError: It did not answer in time, or with an error that is not about the request.
            UnusableSchemaError: It has no such schema or subject, or refuses the schema.
        """
        from confluent_kafka.schema_registry import SchemaRegistryError  # noqa: PLC0415 - imported on use

        try:
            async with asyncio.timeout(self._timeout):
                answer = await call(self._client)
        except SchemaRegistryError as error:
            if _is_not_found(error) or error.http_status_code in _REFUSED:
                self._recover()
                raise UnusableSchemaError(
                    f"the schema registry at {self.address} answered: {error.error_message} (error {error.error_code})"
                ) from error
            raise self._fail(f"answered with HTTP status {error.http_status_code}: {error.error_message}") from error
        except TimeoutError as error:
            raise self._fail(f"did not answer within {self._timeout:g} s") from error
        except Exception as error:
            # Of the HTTP library, a login or an answer that is not JSON: in no case is the record to blame.
            raise self._fail(f"cannot be reached: {str(error) or type(error).__name__}") from error
        self._recover()
        return answer

    def _fail(self, why: str) -> RegistryUnavailableError:
        sentence = f"the schema registry at {self.address} {why}"
        if self._failed is None:
            self._failing_since = time.monotonic()
            logger.warning("%s", sentence, extra={"event": "registry_unavailable", "registry": self.address})
        self._failed = sentence
        return RegistryUnavailableError(sentence)

    def _recover(self) -> None:
        if self._failed is None:
            return
        self._failed = None
        message = "the schema registry at %s answers again after %.1f s"
        seconds = time.monotonic() - self._failing_since
        logger.warning(message, self.address, seconds, extra={"event": "registry_available", "registry": self.address})


def _is_not_found(error: Any) -> bool:
    """Whether a registry says that it does not have something; a wrong URL leads to the same code of HTTP."""
    return bool(error.http_status_code == _NOT_FOUND and (error.error_code or 0) // 100 == _NOT_FOUND)


class Loaded(Generic[K, T]):
    """Values that are requested once each, however many records wait for them.

    Invariants:
        * There is at most one request for a key at a time. A waiter that is cancelled passes it on to another one.
    """

    def __init__(self, request: Callable[[K], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without values.

        Args:
            request: Returns a value, or raises.
            clock: Returns the time in seconds; called from any thread.
        """
        self.known: dict[K, T] = {}
        self._request = request
        self._clock = clock
        self._unusable: dict[K, tuple[float, str]] = {}
        """The values that could not be had, each with the time until when, and why."""
        self._requested: dict[K, asyncio.Future[None]] = {}

    def why_unusable(self, key: K) -> str | None:
        """Say why a value cannot be had; None if it can, or if that is not known. Safe from any thread."""
        unusable = self._unusable.get(key)
        return None if unusable is None or self._clock() >= unusable[0] else unusable[1]

    def is_decided(self, key: K) -> bool:
        """Whether it is known what the value is, or that it cannot be had. Safe from any thread."""
        return key in self.known or self.why_unusable(key) is not None

    async def wait(self, key: K) -> None:
        """Return once the key is decided.

        Raises:
            RegistryUnavailableError: The registry does not answer.
        """
        while not self.is_decided(key):
            requested = self._requested.get(key)
            if requested is None:
                await self._decide(key)
                return
            await asyncio.wait([requested])
            if (error := requested.exception()) is not None:
                raise RegistryUnavailableError(str(error)) from error

    async def _decide(self, key: K) -> None:
        requested = self._requested[key] = asyncio.get_running_loop().create_future()
        try:
            self.known[key] = await self._request(key)
        except UnusableSchemaError as error:
            if len(self._unusable) >= _MOST_UNUSABLE:
                self._unusable.clear()
            self._unusable[key] = (self._clock() + _UNUSABLE_FOR, str(error))
        except RegistryUnavailableError as error:
            requested.set_exception(error)
            requested.exception()  # there may be no other waiter
            raise
        finally:
            del self._requested[key]
            if not requested.done():
                requested.set_result(None)
