"""The address of a schema registry and the way to log in there."""

import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from aioshard.errors import SettingsError

MOCK = "mock://"
"""Scheme of a registry in the memory of this process, for tests."""
_SCHEMES = ("http://", "https://", MOCK)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class SchemaRegistry:
    """A schema registry with the interface of Confluent's: the value that `Avro`, `JsonSchema` and `Protobuf` take.

    It connects to nothing. An app opens one client for each of its registries when it starts, and closes it when it
    ends. Neither user nor password appears in logs, explanations or the `repr`.

    Attributes:
        url: Address of the registry, such as `https://registry:8081`, or several for the same registry, separated by
            commas. A user and a password may be part of it. `mock://NAME` is a registry in the memory of the process,
            for tests: all apps that name it share it.
        auth: User and password, or the key and the secret of an API key.
        timeout: Seconds that a request may take.
        options: More options of confluent-kafka's `AsyncSchemaRegistryClient`, by their names there, such as
            `ssl.ca.location` or `bearer.auth.credentials.source`.

    Raises:
        SettingsError: A value is invalid.

    Example:
        >>> SchemaRegistry("https://key:secret@registry:8081")
        SchemaRegistry('https://registry:8081')
    """

    url: str
    auth: tuple[str, str] | None = None
    timeout: float = 10.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # No message shows the URL or `auth`: either may contain a password.
        expected = "expected an address such as SchemaRegistry('https://registry:8081')"
        if not str(self.url or "").strip():
            raise SettingsError(f"SchemaRegistry was given no url: {expected}")
        for url in self._urls():
            if not (url.startswith(_SCHEMES) and _is_address(url)):
                raise SettingsError(f"the url of a SchemaRegistry is not an address of http or https: {expected}")
        if self.auth is not None and not _is_pair(self.auth):
            raise SettingsError("the auth of a SchemaRegistry is not a pair of texts: expected auth=(user, password)")
        if type(self.timeout) not in (int, float) or not 0 < self.timeout < float("inf"):
            raise SettingsError(f"SchemaRegistry(timeout={self.timeout!r}): expected a number of seconds above 0")

    def __repr__(self) -> str:
        return f"SchemaRegistry({self.address!r})"

    @property
    def address(self) -> str:
        """The URL without user and password, for logs and explanations."""
        return ",".join(map(_without_login, self._urls()))

    @property
    def is_mock(self) -> bool:
        """Whether it is in the memory of this process."""
        return self.url.startswith(MOCK)

    def config(self) -> dict[str, Any]:
        """Return the configuration of confluent-kafka's client, which contains the password."""
        # The client of the HTTP library logs the URLs that it requests: they must not contain the password.
        config = {"url": self.address, "timeout": self.timeout, "max.retries": 0, **self.options}
        login = self.auth or next(filter(None, map(_login_of, self._urls())), None)
        if login is not None:
            config["basic.auth.user.info"] = ":".join(login)
        return config

    def _urls(self) -> list[str]:
        return [url.strip() for url in self.url.split(",")]


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and [type(part) for part in value] == [str, str]


def _is_address(url: str) -> bool:
    try:
        return bool(urlsplit(url).netloc)
    except ValueError:
        return False


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _login_of(url: str) -> tuple[str, str] | None:
    login, found, _ = urlsplit(url).netloc.rpartition("@")
    if not found:
        return None
    user, _, password = login.partition(":")
    return unquote(user), unquote(password)
