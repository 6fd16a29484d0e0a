"""Among equally even assignments, find the one that moves the fewest partitions."""

from collections.abc import Mapping

from aioshard.core.assignment.balance import Holdings

__all__ = ["keep_more"]

_POOL = ""
"""Source and sink of loads; not the name of a member, because Kafka's member names are never empty."""
_AT_MOST = 4_000_000
"""Limit of members² × topics; beyond it the search would block the leader for seconds."""


def keep_more(holdings: Holdings) -> None:
    """Bring partitions back home by exchanges that keep the loads as even as they are.

    An exchange is a cycle of members in which each passes one partition on, or a chain whose two ends swap their
    loads. Exchanges that bring more partitions home than they take away are repeated until none is left; fewer moves
    are then impossible. The search is skipped if all members have the same subscriptions, because no such
    exchange exists, and in groups so large that it would take seconds: their assignment is just as even but may move
    a few partitions more.
    """
    names = holdings.names
    if len(set(holdings.topics.values())) <= 1 or not _away_from_home(holdings):
        return
    if len(names) ** 2 * len(holdings.subscribers) > _AT_MOST:
        return
    while cycle := _gaining_cycle(_costs(holdings)):
        links = [(giver, taker) for giver, taker in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
        # Choose all before moving any, so that no member passes on a partition it has just received.
        chosen = [
            (holdings.cheapest(giver, taker), giver, taker) for giver, taker in links if _POOL not in {giver, taker}
        ]
        for topic_partition, giver, taker in chosen:
            holdings.move(topic_partition, giver, taker)


def _away_from_home(holdings: Holdings) -> bool:
    return any(
        home not in {None, name}
        for name, topics in holdings.held.items()
        for by_home in topics.values()
        for home in by_home
    )


def _costs(holdings: Holdings) -> dict[tuple[str, str], int]:
    """Compute the cost of passing a partition from one member to another, and of changing a load.

    Evenness weighs more than all moves together.
    """
    weight = 2 * len(holdings.names) + 2
    found: dict[tuple[str, str], int] = {}
    for giver in holdings.names:
        for topic, by_home in holdings.held[giver].items():
            strangers = by_home.keys() - {giver}
            for taker in holdings.subscribers[topic]:
                if taker != giver:
                    cost = -1 if taker in strangers else 0 if strangers else 1
                    found[giver, taker] = min(cost, found.get((giver, taker), cost))
        # The change in the sum of squared loads when a partition is removed or added.
        found[_POOL, giver] = (1 - 2 * holdings.load[giver]) * weight
        found[giver, _POOL] = (1 + 2 * holdings.load[giver]) * weight
    return dict(sorted(found.items()))


def _gaining_cycle(costs: Mapping[tuple[str, str], int]) -> list[str]:
    """Find a cycle of negative total cost with Bellman-Ford; empty if there is none."""
    distance = {name: 0 for link in costs for name in link}
    came_from: dict[str, str] = {}
    last: str | None = None
    for _ in distance:
        last = None
        for (giver, taker), cost in costs.items():
            if distance[giver] + cost < distance[taker]:
                distance[taker] = distance[giver] + cost
                came_from[taker] = giver
                last = taker
        if last is None:
            return []
    if last is None:
        return []
    at = last
    for _ in distance:
        at = came_from[at]  # after this many steps back it is on the cycle itself
    cycle = [at]
    while (before := came_from[cycle[-1]]) != at:
        cycle.append(before)
    return cycle[::-1]
