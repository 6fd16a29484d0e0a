"""Timeouts that limit each other: values for those that are not set, such that they fit those that are."""

from collections.abc import Mapping

DEFAULTS: Mapping[str, float] = {
    "session_timeout": 45.0,
    "heartbeat_interval": 3.0,
    "rebalance_timeout": 60.0,
    "commit_timeout": 5.0,
    "drain_timeout": 20.0,
    "transaction_timeout": 30.0,
}
"""The defaults, in seconds."""

_HEARTBEATS = 3
"""Heartbeats that fit into a session."""
_HEARTBEAT_SHARE = 1 / 5
_COMMIT_SHARE = 1 / 3
_DRAIN_SHARE = 0.9
"""Parts of the time that is left, for a heartbeat, the commits and a drain, if it is too short for the defaults."""
_MARGIN = 1.5
"""Factor between what must fit into a timeout and the timeout, if it must be longer than its default."""


class Timeouts:
    """Finds values for the timeouts that are not set.

    Each is its default as far as possible. Where those that are set leave less room, heartbeat, commits and drain share
    it; a limit that is not set grows. If the ones that are set contradict each other, no value can fit.
    """

    def __init__(self, given: Mapping[str, float], *, exactly_once: bool) -> None:
        """Start with the defaults.

        Args:
            given: The timeouts that are set, in seconds.
            exactly_once: Whether commits are transactions.
        """
        self._given = given
        self._exactly_once = exactly_once
        self._values = {**DEFAULTS, **given}
        # With transactions, the last one may have to wait for another that is undecided.
        self.commits = 2 if exactly_once else 1
        """How many `commit_timeout` the end of a drain may take."""

    def fitting(self) -> dict[str, float]:
        """Return the timeouts that are not set.

        Example:
            >>> timeouts = Timeouts({"rebalance_timeout": 18.0}, exactly_once=False)
            >>> timeouts.fitting()["drain_timeout"]
            9.0
        """
        self._shorten_parts_of_a_session()
        self._shorten_parts_of_a_rebalance()
        self._shorten_parts_of_a_transaction()
        self._extend_session()
        self._extend_rebalance()
        self._shorten_drain()
        self._extend_transaction()
        return {name: value for name, value in self._values.items() if name not in self._given}

    def _shorten_parts_of_a_session(self) -> None:
        if "session_timeout" in self._given:
            self._shorten("heartbeat_interval", self._values["session_timeout"] / _HEARTBEATS)

    def _shorten_parts_of_a_rebalance(self) -> None:
        if "rebalance_timeout" not in self._given:
            return
        room = self._values["rebalance_timeout"] - self._given.get("drain_timeout", 0.0)
        given_commits = self.commits * self._given.get("commit_timeout", 0.0)
        self._shorten("heartbeat_interval", (room - given_commits) * _HEARTBEAT_SHARE)
        self._shorten("commit_timeout", (room - self._values["heartbeat_interval"]) * _COMMIT_SHARE / self.commits)

    def _shorten_parts_of_a_transaction(self) -> None:
        if self._exactly_once and "transaction_timeout" in self._given:
            room = self._values["transaction_timeout"] - self._given.get("drain_timeout", 0.0)
            self._shorten("commit_timeout", room * _COMMIT_SHARE)

    def _extend_session(self) -> None:
        self._extend("session_timeout", _HEARTBEATS * self._values["heartbeat_interval"])

    def _extend_rebalance(self) -> None:
        needed = self._taken() + self._given.get("drain_timeout", 0.0)
        if needed >= self._values["rebalance_timeout"]:
            self._extend("rebalance_timeout", _MARGIN * needed)

    def _shorten_drain(self) -> None:
        self._shorten("drain_timeout", (self._values["rebalance_timeout"] - self._taken()) * _DRAIN_SHARE)
        if self._exactly_once and "transaction_timeout" in self._given:
            room = self._values["transaction_timeout"] - self._values["commit_timeout"]
            self._shorten("drain_timeout", room * _DRAIN_SHARE)

    def _extend_transaction(self) -> None:
        needed = self._values["drain_timeout"] + self._values["commit_timeout"]
        if self._exactly_once and needed >= self._values["transaction_timeout"]:
            self._extend("transaction_timeout", _MARGIN * needed)

    def _taken(self) -> float:
        """Return the part of a rebalance that is not for the drain."""
        return self.commits * self._values["commit_timeout"] + self._values["heartbeat_interval"]

    def _shorten(self, name: str, limit: float) -> None:
        """Limit a timeout that is not set; without room, those that are set contradict each other."""
        if name not in self._given and limit > 0:
            self._values[name] = min(self._values[name], limit)

    def _extend(self, name: str, least: float) -> None:
        if name not in self._given:
            self._values[name] = max(self._values[name], least)


def least_beside_drain(limit: float) -> float:
    """Return the least seconds of a limit that a drain must leave for commits and a heartbeat that are not set.

    With less, commits fail and sessions expire on a busy machine.

    Example:
        >>> least_beside_drain(60.0), least_beside_drain(2.0)
        (3.0, 0.1)
    """
    return min(3.0, limit / 20)
